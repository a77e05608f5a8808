"""What differs between the OpenAI APIs.

Guarantees: an adapter has no state of its own and writes nothing; the exchange around it is the
same for every API.
"""

from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from forest_schema.items import ItemError, SourceHistory
from forest_schema.reasons import Reason
from pydantic import ValidationError

from vllm_forest_renderer.capture.record import Answer
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.serving.answers import Failure

_SHOWN_ERRORS = 4
"""Validation errors quoted in an answer; a union yields one per alternative."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is not refused on sight."""

    history: SourceHistory
    request: Any
    """vLLM's request object."""
    model: str


class ApiAdapter(Protocol):
    """One API of vLLM."""

    name: str
    """`chat` or `responses`."""

    async def prepare(self, body: dict[str, Any], attempt_id: str) -> Prepared:
        """Check and parse a request body of an attempt. Raises `ForestError`."""
        ...

    async def create(self, request: Any, raw_request: Request) -> Any:
        """vLLM's answer object, its `ErrorResponse`, or its stream for a streaming request."""
        ...

    async def render(self, request: Any) -> Any:
        """Render as generation would; None, or vLLM's `ErrorResponse`."""
        ...

    def answer(self, response: Any, call_id: str, finish_reason: str | None) -> Answer:
        """Give the response the id of the call, and say what is recorded about it.

        `finish_reason` is the engine's.
        """
        ...

    def dump(self, response: Any) -> dict[str, Any]:
        """The response as JSON values."""
        ...

    def events(self, response: Any, body: Mapping[str, Any]) -> Iterator[str]:
        """The finished response as server-sent events."""
        ...

    def error_event(self, failure: Failure) -> str:
        """An error as the last server-sent event of a stream."""
        ...

    def live_events(self, chunks: AsyncIterator[str], call_id: str) -> "LiveStream | None":
        """Events of a streaming answer as they come; None where the API is served buffered."""
        ...


class LiveStream(Protocol):
    """A streaming answer whose end is held back until it is captured."""

    def passing(self) -> AsyncIterator[str]:
        """Events that may go out at once, until the generation is finished."""
        ...

    def answer(self) -> Answer:
        """What the client will have assembled."""
        ...

    def held(self) -> Iterator[str]:
        """The events that finish the stream."""
        ...


async def normalised(reading: Awaitable[SourceHistory]) -> SourceHistory:
    """The history that is read, its refusals as `ForestError`."""
    try:
        return await reading
    except ItemError as error:
        raise ForestError(error.reason, str(error), param=error.param) from error


def parsed(model: Any, body: Mapping[str, Any]) -> Any:
    """vLLM's request object. Raises `ForestError` (`malformed_request`)."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        found = [
            (".".join(str(part) for part in entry["loc"]), entry["msg"])
            for entry in error.errors(include_url=False, include_input=False)
        ]
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            "; ".join(f"{param or 'body'}: {message}" for param, message in found[:_SHOWN_ERRORS]),
            param=found[0][0].partition(".")[0] or None,
        ) from error
