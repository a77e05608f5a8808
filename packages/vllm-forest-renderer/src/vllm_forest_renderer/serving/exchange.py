"""One request of a captured API, from its body to its answer.

Guarantees: what is refused leaves nothing behind; what fails after its admission leaves a recorded
failure; a finished answer, and the end of a stream, go out after their capture is durable.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from forest_schema.control import MeasureAnswer
from forest_schema.reasons import Reason

from vllm_forest_renderer import compat, metrics
from vllm_forest_renderer.capture.service import CaptureService
from vllm_forest_renderer.context import CURRENT, Call
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.serving.adapter import ApiAdapter, LiveStream, Prepared
from vllm_forest_renderer.serving.answers import Ended, Failure

KEEP_ALIVE = ": keep-alive\n\n"
"""A comment: server-sent events without meaning that keep a connection open."""


class CapturedApi:
    """Serves one API of vLLM and captures its calls."""

    def __init__(
        self, service: CaptureService, adapter: ApiAdapter, *, keep_alive_s: float
    ) -> None:
        """`keep_alive_s` is the pause between two comments of a buffered stream."""
        self._service = service
        self._adapter = adapter
        self._keep_alive_s = keep_alive_s

    async def handle(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Answer one decoded request body."""
        try:
            prepared, call = await self._begin(body, raw_request)
            if body.get("stream"):
                return await self._stream(call, prepared, body, raw_request)
            response = await self._answer(call, prepared, raw_request)
        except Ended as ended:
            if not ended.failure.intent_written:
                metrics.REFUSALS.labels(ended.failure.error.type).inc()
            return ended.failure.response()
        return JSONResponse(self._adapter.dump(response))

    async def measure(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Length of the prompt that generation would be given. Leaves nothing behind."""
        try:
            prepared, call = await self._begin(body, raw_request)
            error = await self._guarded(call, self._adapter.render(prepared.request))
            if error is not None:
                raise Ended(_upstream(error, call))
        except Ended as ended:
            return ended.failure.response()
        answer = MeasureAnswer(
            count=len(call.prompt_tokens or ()), continuation=call.predecessor is not None
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _begin(self, body: dict[str, Any], raw_request: Request) -> tuple[Prepared, Call]:
        """Raises `Ended`."""
        try:
            attempt = raw_request.path_params["attempt"]
            calls = self._service.committed(attempt)
            prepared = await self._adapter.prepare(body, attempt)
            call = self._service.begin(
                attempt,
                api=self._adapter.name,
                model=prepared.model,
                history=prepared.history,
                calls=calls,
            )
        except RecursionError as error:
            deep = ForestError(Reason.MALFORMED_REQUEST, "body: nested too deeply", param="body")
            raise Ended(_failure(deep, None)) from error
        except Exception as error:
            # Some of vLLM's validators raise errors of its own out of pydantic.
            raise Ended(_failure(error, None)) from error
        # The hooks find the call in the context of this task.
        CURRENT.set(call)
        return prepared, call

    async def _guarded(self, call: Call, work: Awaitable[Any]) -> Any:
        """`work`'s result; what it raises is recorded. Raises `Ended`, and re-raises
        cancellation.
        """
        try:
            return await work
        except asyncio.CancelledError as error:
            self._service.fail_in_background(call, error)
            raise
        except Exception as error:
            await self._service.fail(call, error)
            raise Ended(_failure(error, call)) from error

    async def _answer(self, call: Call, prepared: Prepared, raw_request: Request) -> Any:
        """The captured response object. Raises `Ended`."""
        response = await self._guarded(call, self._adapter.create(prepared.request, raw_request))
        if isinstance(response, compat.ErrorResponse):
            await self._record_upstream(call, response)
            raise Ended(_upstream(response, call))
        await self._guarded(call, self._complete(call, response))
        return response

    async def _complete(self, call: Call, response: Any) -> None:
        assert call.call_id is not None
        assert call.generation is not None
        answer = self._adapter.answer(response, call.call_id, call.generation.finish_reason)
        await self._service.complete(call, answer)

    async def _record_upstream(self, call: Call, response: Any) -> None:
        """vLLM answered with an error; it turns a cancelled generation into one too."""
        task = asyncio.current_task()
        cancelled = task is not None and task.cancelling() > 0
        await self._service.fail(
            call,
            asyncio.CancelledError() if cancelled else RuntimeError(response.error.message),
        )

    async def _stream(
        self, call: Call, prepared: Prepared, body: dict[str, Any], raw_request: Request
    ) -> Response:
        """Raises `Ended` for what is refused before the stream begins."""
        if prepared.request.stream:
            return await self._live(call, prepared, raw_request)
        return await self._buffered(call, prepared, body, raw_request)

    async def _buffered(
        self, call: Call, prepared: Prepared, body: dict[str, Any], raw_request: Request
    ) -> Response:
        """The finished answer's events, with comments until it is there."""
        work = asyncio.create_task(self._answer(call, prepared, raw_request))
        admitted = asyncio.create_task(call.admitted.wait())
        try:
            await asyncio.wait({work, admitted}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            admitted.cancel()
        if work.done():
            # A refusal, or an answer that was faster: an error gets its own status.
            await work

        async def events() -> AsyncIterator[str]:
            try:
                while not work.done():
                    done, _ = await asyncio.wait({work}, timeout=self._keep_alive_s)
                    if not done:
                        yield KEEP_ALIVE
                for event in self._adapter.events(work.result(), body):
                    yield event
            except Ended as ended:
                yield self._adapter.error_event(ended.failure)
            finally:
                work.cancel()

        return _event_stream(events())

    async def _live(self, call: Call, prepared: Prepared, raw_request: Request) -> Response:
        """Tokens as they come; the end of the stream waits for the capture."""
        chunks = await self._guarded(call, self._adapter.create(prepared.request, raw_request))
        if isinstance(chunks, compat.ErrorResponse):
            await self._record_upstream(call, chunks)
            raise Ended(_upstream(chunks, call))
        # The first chunk comes after the admission: a refusal is still a response of its own.
        first = await self._guarded(call, anext(chunks))
        if call.refusal is not None:
            await self._service.fail(call, call.refusal)
            raise Ended(_failure(call.refusal, call))
        if call.call_id is None:
            raise Ended(Failure.upstream("the engine gave no output", 500, None,
                                         intent_written=False))  # fmt: skip
        live = self._adapter.live_events(_chained(first, chunks), call.call_id)
        assert live is not None
        events: asyncio.Queue[str | None] = asyncio.Queue()
        # A task of its own: a client that goes away cancels it once, and it unwinds in peace.
        pump = asyncio.create_task(self._pump(call, live, chunks, events))

        async def flowing() -> AsyncIterator[str]:
            try:
                while (event := await events.get()) is not None:
                    yield event
            finally:
                pump.cancel()

        return _event_stream(flowing())

    async def _pump(
        self,
        call: Call,
        live: LiveStream,
        chunks: Any,
        events: "asyncio.Queue[str | None]",
    ) -> None:
        try:
            async for event in live.passing():
                events.put_nowait(event)
            await self._service.complete(call, live.answer())
            for event in live.held():
                events.put_nowait(event)
        except asyncio.CancelledError as error:
            self._service.fail_in_background(call, error)
            raise
        except Exception as error:
            reported = call.refusal or error
            await self._service.fail(call, reported)
            events.put_nowait(self._adapter.error_event(_failure(reported, call)))
        finally:
            await chunks.aclose()
            events.put_nowait(None)


async def _chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for chunk in rest:
        yield chunk


def _failure(error: Exception, call: Call | None) -> Failure:
    """What `error` is answered with; `call` is None before there is one."""
    if isinstance(error, ForestError):
        return Failure.of(error, intent_written=_admitted(call))
    return _upstream(compat.create_error_response(error), call)


def _upstream(response: Any, call: Call | None) -> Failure:
    """What vLLM's `ErrorResponse` is answered with."""
    error = response.error
    return Failure.upstream(error.message, error.code, error.param, intent_written=_admitted(call))


def _admitted(call: Call | None) -> bool:
    return call is not None and call.call_id is not None


def _event_stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )
