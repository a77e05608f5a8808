"""Proxy around vLLM's engine client that sees what the engine is given and gives back.

Guarantees: outside a captured request everything is passed through untouched. Inside, what the
engine would refuse is refused before the admission, by the engine's own checks and queue limits;
the call is admitted durably before the engine sees it; the engine is asked for the log-probability
of every sampled token, and for the routed experts of the call's own tokens where it reports them;
the outputs reach the caller unchanged but for these routes. One request makes one generation.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from forest_schema.reasons import Reason

from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.generation import Generation
from vllm_forest_renderer.capture.routes import first_row
from vllm_forest_renderer.context import CURRENT, Call
from vllm_forest_renderer.errors import ForestError

_QUEUE_WAIT_S = 60.0
"""How long an admitted call waits for room in the engine's queue."""


class CaptureClient:
    """Stands in front of an `EngineClient` on copies of vLLM's serving objects."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._admitting = 0
        """Calls between the check of the queue and the engine."""
        self._turn = asyncio.Lock()
        self._watched: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **keywords: Any
    ) -> AsyncGenerator[Any, None]:
        """See `EngineClient.generate`."""
        call = CURRENT.get()
        if call is None:
            outputs: AsyncGenerator[Any, None] = self._inner.generate(
                prompt, sampling_params, request_id, **keywords
            )
            return outputs
        return self._captured(call, prompt, sampling_params, request_id, keywords)

    async def _captured(
        self,
        call: Call,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        keywords: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        try:
            await self._check(call, prompt, sampling_params, request_id, keywords)
            async with call.around_generation() as weight_version:
                await self._admit(call, sampling_params, request_id)
                if keywords.get("reasoning_ended") is None:
                    keywords["reasoning_ended"] = _reasoning_ended(call)
                generation = call.generation = Generation()
                outputs = self._inner.generate(prompt, sampling_params, request_id, **keywords)
                self._watch()
                try:
                    async for output in outputs:
                        generation.add(output)
                        yield output
                    call.weight_version = await weight_version()
                finally:
                    # Also aborts the engine's request where the capture or the caller gave up.
                    await outputs.aclose()
        except Exception as error:
            call.refusal = error
            raise

    def _watch(self) -> None:
        """End all requests with the task that takes their outputs apart.

        A stopping server cancels it, and where it has not seen the dead engine before, vLLM leaves
        its requests waiting for as long as their clients do.
        """
        handler = self._inner.output_handler
        if handler is not None and handler is not self._watched:
            self._watched = handler
            handler.add_done_callback(self._end_all)

    def _end_all(self, handler: "asyncio.Task[None]") -> None:
        if handler.cancelled():
            self._inner.output_processor.propagate_error(compat.EngineDeadError())

    async def _admit(self, call: Call, sampling_params: Any, request_id: str) -> None:
        """Admit a call for which the engine's queue has room.

        Calls that are being admitted count. Where others took the room meanwhile, the call waits
        for its turn and for room: refusing it would leave a failure, of what any client sends
        again. The caller hands it to the engine without waiting for anything else.
        """
        self._inner.check_admission(1 + self._admitting, request_id)
        self._admitting += 1
        try:
            deadline = time.monotonic() + _QUEUE_WAIT_S
            await call.admit(call, sampling_params)
            async with self._turn:
                await self._room(request_id, deadline)
        finally:
            self._admitting -= 1

    async def _room(self, request_id: str, deadline: float) -> None:
        pause_s = 0.01
        while True:
            try:
                self._inner.check_admission(request_id=request_id)
                return
            except (compat.QueueOverflowError, compat.MaxQueuedTokensError):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _check(
        self,
        call: Call,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        keywords: dict[str, Any],
    ) -> None:
        if call.generation is not None:
            raise ForestError(
                Reason.UNSUPPORTED_REQUEST, "a captured request is one generation", param="n"
            )
        if prompt.get("prompt_token_ids") is not call.prompt_tokens:
            raise ForestError(
                Reason.UNSUPPORTED_REQUEST, "the prompt did not come from the captured renderer"
            )
        if sampling_params.logprobs is None:
            sampling_params.logprobs = 0
            if hasattr(sampling_params, "flat_logprobs"):
                sampling_params.flat_logprobs = True
        sampling_params.routed_experts_prompt_start = first_row(call)
        try:
            await compat.check_request(
                self._inner,
                prompt,
                sampling_params,
                request_id,
                keywords,
                unchecked=call.tail_tokens,
            )
        except Exception as error:
            refused = compat.create_error_response(error).error
            if refused.code >= 500:
                raise
            raise ForestError(
                Reason.MALFORMED_REQUEST, refused.message, param=refused.param
            ) from error


def _reasoning_ended(call: Call) -> bool | None:
    """Whether a spliced prompt leaves reasoning behind it; None lets the engine judge.

    The engine would look at the whole prompt, with the closed reasoning of earlier turns.
    """
    if call.predecessor is None or getattr(call.parser, "reasoning_parser", None) is None:
        return None
    ended: bool = call.parser.is_reasoning_end(call.prompt_tokens)
    return ended
