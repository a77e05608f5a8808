"""HTTP answers of the capture routes.

Guarantees: every refusal is an `ErrorBody` with a `Reason`; only an answer that left no intent
behind may be retried by a client on its own, everything else says `x-should-retry: false`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request, Response
from forest_schema.control import ErrorBody
from forest_schema.reasons import EFFECTS, Effect, Reason

from vllm_forest_renderer.control.messages import status_of
from vllm_forest_renderer.errors import ForestError


def refusal(error: ForestError, *, intent_written: bool) -> Response:
    """The response to a request that `error` ended."""
    failed = EFFECTS[error.reason] is Effect.CAPTURE_FAILURE
    return _error(
        500 if failed else status_of(error.reason),
        str(error),
        error.reason,
        error.param,
        intent_written=intent_written,
    )


def upstream_error(
    message: str, status: int, param: str | None, *, intent_written: bool
) -> Response:
    """An error of vLLM's own in our shape."""
    reason = Reason.ENGINE_ERROR if status >= 500 else Reason.MALFORMED_REQUEST
    return _error(status, message, reason, param, intent_written=intent_written)


def _error(
    status: int, message: str, reason: Reason, param: str | None, *, intent_written: bool
) -> Response:
    body = ErrorBody(error=ErrorBody.Error(message=message, type=reason, param=param, code=status))
    retryable = status >= 500 and not intent_written
    headers = {} if retryable else {"x-should-retry": "false"}
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request's body. Raises `ForestError` (`malformed_request`)."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise ForestError(
                Reason.MALFORMED_REQUEST,
                f"body: larger than {max_bytes} bytes; raise max_body_bytes to admit it",
                param="body",
            )
    try:
        body = msgspec.json.decode(bytes(data))
    except msgspec.DecodeError as error:
        raise ForestError(Reason.MALFORMED_REQUEST, f"body: {error}", param="body") from error
    if not isinstance(body, Mapping):
        raise ForestError(Reason.MALFORMED_REQUEST, "body: must be a JSON object", param="body")
    return dict(body)
