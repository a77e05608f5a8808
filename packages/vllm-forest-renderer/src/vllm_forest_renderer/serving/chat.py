"""Chat Completions of an attempt.

Guarantees: the answer is vLLM's own, with an id that names the captured call; it goes out after
its capture is durable. A request that is refused leaves nothing behind, one that fails after its
admission leaves a recorded failure.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from forest_schema.items import ItemError, normalize_chat
from forest_schema.reasons import Reason
from pydantic import ValidationError

from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.record import Answer
from vllm_forest_renderer.capture.service import CaptureService
from vllm_forest_renderer.context import CURRENT, Call
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.serving.answers import refusal, upstream_error
from vllm_forest_renderer.serving.refusals import check_fields, check_messages

_SHOWN_ERRORS = 4
"""Validation errors quoted in an answer; a union yields one per alternative."""


class ChatRoute:
    """`POST /v1/forest/{attempt}/chat/completions`."""

    def __init__(self, service: CaptureService, serving: Any, *, default_model: str) -> None:
        """`serving` is a copy of vLLM's chat serving object that generates through the proxy."""
        self._service = service
        self._serving = serving
        self._default_model = default_model

    async def handle(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Answer one decoded request body."""
        call: Call | None = None
        try:
            check_fields(body)
            messages = check_messages(body.get("messages"))
            if body.get("stream"):
                raise ForestError(
                    Reason.UNSUPPORTED_REQUEST, "stream: not supported", param="stream"
                )
            call = self._service.begin(
                raw_request.path_params["attempt"],
                api="chat",
                model=body.get("model") or self._default_model,
                history=_history(messages),
            )
            request = _parse({**body, "messages": [_for_vllm(message) for message in messages]})
            CURRENT.set(call)
            result = await self._serving.create_chat_completion(request, raw_request)
            if isinstance(result, compat.ErrorResponse):
                return await self._upstream(call, result)
            choice = result.choices[0]
            assert call.call_id is not None
            result.id = f"chatcmpl-{call.call_id.removeprefix('call_')}"
            answer = Answer(result.id, [choice.message.model_dump()], choice.finish_reason)
            await self._service.complete(call, messages, answer)
            return JSONResponse(result.model_dump())
        except ForestError as error:
            if call is not None:
                await self._service.fail(call, error)
            return refusal(error, intent_written=call is not None and call.call_id is not None)
        except asyncio.CancelledError as error:
            if call is not None:
                self._service.fail_in_background(call, error)
            raise
        except Exception as error:
            if call is not None:
                await self._service.fail(call, error)
            found = compat.create_error_response(error).error
            return upstream_error(
                found.message,
                found.code,
                found.param,
                intent_written=call is not None and call.call_id is not None,
            )

    async def _upstream(self, call: Call, result: Any) -> Response:
        """vLLM answered with an error; it turns a cancelled generation into one too."""
        task = asyncio.current_task()
        cancelled = task is not None and task.cancelling() > 0
        error: BaseException = (
            asyncio.CancelledError() if cancelled else RuntimeError(result.error.message)
        )
        await self._service.fail(call, error)
        return upstream_error(
            result.error.message,
            result.error.code,
            result.error.param,
            intent_written=call.call_id is not None,
        )


def _history(messages: Any) -> Any:
    try:
        return normalize_chat(messages)
    except ItemError as error:
        raise ForestError(error.reason, str(error), param=error.param) from error


def _for_vllm(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy (vLLM's validators edit what they are given) with tool arguments as text.

    Clients that keep arguments decoded send objects, which vLLM's types refuse.
    """
    copied = dict(message)
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


def _parse(body: Mapping[str, Any]) -> Any:
    try:
        return compat.ChatCompletionRequest.model_validate(body)
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
