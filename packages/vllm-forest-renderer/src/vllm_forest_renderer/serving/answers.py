"""HTTP answers of the capture routes.

Guarantees: every refusal is an `ErrorBody` with a `Reason`; only an answer that left no intent
behind may be retried by a client on its own, everything else says `x-should-retry: false`.
"""

from dataclasses import dataclass

import msgspec
from fastapi import Response
from forest_schema.control import ErrorBody
from forest_schema.reasons import EFFECTS, Effect, Reason

from vllm_forest_renderer.control.messages import status_of
from vllm_forest_renderer.errors import ForestError


class Ended(Exception):
    """A request that ends with an error answer; what had to be recorded is recorded."""

    def __init__(self, failure: "Failure") -> None:
        super().__init__(failure.error.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Failure:
    """An error answer, as a response of its own or as the last event of a stream."""

    error: ErrorBody.Error
    intent_written: bool

    @classmethod
    def of(cls, error: ForestError, *, intent_written: bool) -> "Failure":
        """The answer to a request that `error` ended."""
        failed = EFFECTS[error.reason] is Effect.CAPTURE_FAILURE
        status = 500 if failed else status_of(error.reason)
        return cls._make(status, str(error), error.reason, error.param, intent_written)

    @classmethod
    def upstream(
        cls, message: str, status: int, param: str | None, *, intent_written: bool
    ) -> "Failure":
        """An error of vLLM's own in our shape."""
        reason = Reason.ENGINE_ERROR if status >= 500 else Reason.MALFORMED_REQUEST
        return cls._make(status, message, reason, param, intent_written)

    @classmethod
    def _make(
        cls, status: int, message: str, reason: Reason, param: str | None, intent_written: bool
    ) -> "Failure":
        error = ErrorBody.Error(message=message, type=reason, param=param, code=status)
        return cls(error, intent_written)

    def response(self) -> Response:
        """The error as a response."""
        retryable = self.error.code >= 500 and not self.intent_written
        return Response(
            msgspec.json.encode(ErrorBody(error=self.error)),
            self.error.code,
            headers={} if retryable else {"x-should-retry": "false"},
            media_type="application/json",
        )
