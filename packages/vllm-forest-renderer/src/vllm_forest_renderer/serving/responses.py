"""Responses of an attempt.

Guarantees: the answer is vLLM's own, with an id that names the captured call; a request that
leaves `store` out works, and no state is kept for it. Streams are buffered: their events are made
from the captured answer.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
from fastapi import Request
from forest_schema.reasons import Reason

from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.record import Answer
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.serving.adapter import Prepared, normalised, parsed
from vllm_forest_renderer.serving.answers import Failure
from vllm_forest_renderer.serving.known_histories import KnownHistories
from vllm_forest_renderer.serving.refusals import (
    check_fields,
    check_input,
    check_tools,
    without_uuids,
)


class ResponsesAdapter:
    """`/responses`."""

    name = "responses"

    def __init__(self, serving: Any, *, default_model: str) -> None:
        """`serving` is a copy of vLLM's serving object that generates through the proxy."""
        self._serving = serving
        self._default_model = default_model
        self._known = KnownHistories("responses")

    async def prepare(self, body: dict[str, Any], attempt_id: str) -> Prepared:
        """See `ApiAdapter`."""
        check_fields(body)
        check_tools(body.get("tools"))
        source = check_input(body.get("input"))
        instructions = body.get("instructions")
        if not isinstance(instructions, str | None):
            raise ForestError(
                Reason.MALFORMED_REQUEST, "instructions: must be a string", param="instructions"
            )
        items = [{"role": "user", "content": source}] if isinstance(source, str) else source
        history = await normalised(self._known.normalize(attempt_id, items, instructions))
        copied = source if isinstance(source, str) else [_for_vllm(item) for item in source]
        request = {**body, "input": copied, "stream": False, "store": False}
        return Prepared(
            history=history,
            request=parsed(compat.ResponsesRequest, request),
            model=body.get("model") or self._default_model,
        )

    async def create(self, request: Any, raw_request: Request) -> Any:
        """See `ApiAdapter`."""
        return await self._serving.create_responses(request, raw_request)

    async def render(self, request: Any) -> Any:
        """See `ApiAdapter`."""
        error = await self._serving._check_model(request)
        if error is not None:
            return error
        result = await self._serving.online_renderer.render_responses(
            request, tool_server=self._serving.tool_server
        )
        return result if isinstance(result, compat.ErrorResponse) else None

    def answer(self, response: Any, call_id: str, finish_reason: str | None) -> Answer:
        """See `ApiAdapter`."""
        response.id = f"resp_{call_id.removeprefix('call_')}"
        output = self.dump(response)["output"]
        # A generation without any text has no items; it is an empty turn all the same.
        empty = {"type": "message", "role": "assistant", "content": []}
        return Answer(response.id, output or [empty], finish_reason)

    def dump(self, response: Any) -> dict[str, Any]:
        """See `ApiAdapter`."""
        dumped: dict[str, Any] = response.model_dump(mode="json", by_alias=True)
        return dumped

    def events(self, response: Any, body: Mapping[str, Any]) -> Iterator[str]:
        """See `ApiAdapter`."""
        for number, event in enumerate(_events(self.dump(response))):
            yield _event({**event, "sequence_number": number})

    def error_event(self, failure: Failure) -> str:
        """See `ApiAdapter`."""
        error = failure.error
        return _event(
            {
                "type": "error",
                "code": error.type,
                "message": error.message,
                "param": error.param,
                "sequence_number": 0,
            }
        )

    def live_events(self, chunks: AsyncIterator[str], call_id: str) -> None:
        """See `ApiAdapter`."""
        return


def _for_vllm(item: Mapping[str, Any]) -> dict[str, Any]:
    """A copy (vLLM's validators edit what they are given) without uuids of media, and with the
    default detail of images, which vLLM asks for.
    """
    copied = dict(item)
    for key in ("content", "output"):
        if key in copied:
            copied[key] = _with_detail(without_uuids(copied[key]))
    return copied


def _with_detail(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"detail": "auto", **part}
        if isinstance(part, dict) and part.get("type") == "input_image"
        else part
        for part in content
    ]


def _events(full: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events whose deltas add up to the finished response."""
    begun = {**full, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(full["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            opened: dict[str, Any] = {**item, "status": "in_progress", "content": []}
            parts = list(_message_events(item, at))
        elif item["type"] == "function_call":
            opened = {**item, "status": "in_progress", "arguments": ""}
            parts = list(_call_events(item, at))
        elif item["type"] == "reasoning":
            opened = {**item, "content": []}
            parts = list(_reasoning_events(item, at))
        else:
            opened, parts = item, []
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        yield from parts
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    ended = "completed" if full["status"] == "completed" else "incomplete"
    yield {"type": f"response.{ended}", "response": full}


def _message_events(item: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(item["content"]):
        where = {**at, "content_index": number}
        empty = {**part, "text": "", "logprobs": []}
        logprobs = part.get("logprobs") or []
        yield {"type": "response.content_part.added", **where, "part": empty}
        yield {
            "type": "response.output_text.delta",
            **where,
            "delta": part["text"],
            "logprobs": logprobs,
        }
        yield {
            "type": "response.output_text.done",
            **where,
            "text": part["text"],
            "logprobs": logprobs,
        }
        yield {"type": "response.content_part.done", **where, "part": part}


def _call_events(item: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
    yield {
        "type": "response.function_call_arguments.done",
        **at,
        "name": item["name"],
        "arguments": item["arguments"],
    }


def _reasoning_events(item: dict[str, Any], at: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(item.get("content") or ()):
        where = {**at, "content_index": number}
        yield {"type": "response.reasoning_text.delta", **where, "delta": part["text"]}
        yield {"type": "response.reasoning_text.done", **where, "text": part["text"]}


def _event(value: Mapping[str, Any]) -> str:
    return f"event: {value['type']}\ndata: {msgspec.json.encode(value).decode()}\n\n"
