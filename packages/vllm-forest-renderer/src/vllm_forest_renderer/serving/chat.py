"""Chat Completions of an attempt.

Guarantees: the answer is vLLM's own, with an id that names the captured call. Tool arguments that
a client sends decoded are given to vLLM as text, uuids of media are left out; nothing else of a
request is changed.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
from fastapi import Request

from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.record import Answer
from vllm_forest_renderer.serving.adapter import Prepared, normalised, parsed
from vllm_forest_renderer.serving.answers import Failure
from vllm_forest_renderer.serving.known_histories import KnownHistories
from vllm_forest_renderer.serving.refusals import check_fields, check_messages, without_uuids


class ChatAdapter:
    """`/chat/completions`."""

    name = "chat"

    def __init__(self, serving: Any, *, default_model: str, incremental: bool) -> None:
        """`serving` is a copy of vLLM's chat serving object that generates through the proxy;
        `incremental` lets tokens of a stream flow as they are generated.
        """
        self._serving = serving
        self._default_model = default_model
        self._incremental = incremental
        self._known = KnownHistories("chat")

    async def prepare(self, body: dict[str, Any], attempt_id: str) -> Prepared:
        """See `ApiAdapter`."""
        check_fields(body)
        messages = check_messages(body.get("messages"))
        history = await normalised(self._known.normalize(attempt_id, messages))
        request = parsed(
            compat.ChatCompletionRequest,
            {**body, "messages": [_for_vllm(message) for message in messages]},
        )
        if not self._incremental:
            request.stream, request.stream_options = False, None
        return Prepared(
            history=history,
            request=request,
            model=body.get("model") or self._default_model,
        )

    async def create(self, request: Any, raw_request: Request) -> Any:
        """See `ApiAdapter`."""
        return await self._serving.create_chat_completion(request, raw_request)

    async def render(self, request: Any) -> Any:
        """See `ApiAdapter`."""
        result = await self._serving.render_chat_request(request)
        return result if isinstance(result, compat.ErrorResponse) else None

    def answer(self, response: Any, call_id: str, finish_reason: str | None) -> Answer:
        """See `ApiAdapter`. The API's finish reason is recorded, which knows of tool calls, unless
        the engine was interrupted: vLLM says `tool_calls` of a generation that was cut off or
        aborted behind a complete call, too.
        """
        response.id = response_id(call_id)
        choice = response.choices[0]
        if finish_reason == "stop":
            finish_reason = choice.finish_reason
        return Answer(response.id, [choice.message.model_dump()], finish_reason)

    def dump(self, response: Any) -> dict[str, Any]:
        """See `ApiAdapter`."""
        dumped: dict[str, Any] = response.model_dump()
        return dumped

    def events(self, response: Any, body: Mapping[str, Any]) -> Iterator[str]:
        """See `ApiAdapter`: role, then everything at once, finish reason, usage, `[DONE]`."""
        full = self.dump(response)
        base = {
            "id": full["id"],
            "object": "chat.completion.chunk",
            "created": full["created"],
            "model": full["model"],
        }
        for choice in full["choices"]:
            delta = {key: value for key, value in choice["message"].items() if value is not None}
            for index, call in enumerate(delta.get("tool_calls") or ()):
                call["index"] = index
            shared = {"index": choice["index"], "logprobs": choice["logprobs"]}
            yield _data({**base, "choices": [{**shared, "delta": delta, "finish_reason": None}]})
            end = {
                "index": choice["index"],
                "delta": {},
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
            }
            yield _data({**base, "choices": [end]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _data({**base, "choices": [], "usage": full["usage"]})
        yield "data: [DONE]\n\n"

    def error_event(self, failure: Failure) -> str:
        """See `ApiAdapter`."""
        return _data({"error": msgspec.to_builtins(failure.error)})

    def live_events(self, chunks: AsyncIterator[str], call_id: str) -> "ChatStream":
        """See `ApiAdapter`."""
        return ChatStream(chunks, call_id)


def response_id(call_id: str) -> str:
    """Id of the answer that `call_id` captured."""
    return f"chatcmpl-{call_id.removeprefix('call_')}"


class ChatStream:
    """vLLM's chunks: those before the finish reason pass, the rest is held.

    The message is assembled from the chunks, as a client does it.
    """

    def __init__(self, chunks: AsyncIterator[str], call_id: str) -> None:
        self._chunks = chunks
        self._id = response_id(call_id)
        self._held: list[str] = []
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None

    async def passing(self) -> AsyncIterator[str]:
        """See `LiveStream`."""
        async for chunk in self._chunks:
            payload = chunk.removeprefix("data: ").strip()
            if payload == "[DONE]":
                self._held.append(chunk)
                continue
            value = msgspec.json.decode(payload)
            if "error" in value:
                raise RuntimeError(value["error"]["message"])
            for choice in value["choices"]:
                self._add(choice["delta"])
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
            renamed = _data({**value, "id": self._id})
            if self._finish_reason is None:
                yield renamed
            else:
                self._held.append(renamed)

    def answer(self) -> Answer:
        """See `LiveStream`."""
        message = dict(self._message)
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return Answer(self._id, [message], self._finish_reason)

    def held(self) -> Iterator[str]:
        """See `LiveStream`."""
        return iter(self._held)

    def _add(self, delta: Mapping[str, Any]) -> None:
        for key in ("content", "reasoning"):
            text = delta.get(key)
            if text is not None:
                self._message[key] = (self._message.get(key) or "") + text
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(
                part["index"],
                {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["function"]["name"] = function.get("name") or call["function"]["name"]
            call["function"]["arguments"] += function.get("arguments") or ""


def _data(value: Mapping[str, Any]) -> str:
    return f"data: {msgspec.json.encode(value).decode()}\n\n"


def _for_vllm(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy (vLLM's validators edit what they are given) with tool arguments as text.

    Clients that keep arguments decoded send objects, which vLLM's types refuse.
    """
    copied = dict(message)
    if "content" in copied:
        copied["content"] = without_uuids(copied["content"])
    calls = copied.get("tool_calls")
    if isinstance(calls, list):
        copied["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return copied


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict | list):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
