"""One captured call from its admission to its commit.

Guarantees: the intent is durable before inference, the delta durable before the commit, the commit
durable before `complete` returns; whatever leaves the path after the intent records exactly one
failure. A caller that goes away does not stop a finished generation from being committed.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from forest_schema.items import SourceHistory
from forest_schema.reasons import EFFECTS, Effect, Reason
from forest_schema.records import CallRecord

from vllm_forest_renderer import metrics
from vllm_forest_renderer.capture.prefixes import PrefixCache
from vllm_forest_renderer.capture.record import Answer, build_delta, build_record, replay_summary
from vllm_forest_renderer.capture.routes import RouteShape, captured_routes
from vllm_forest_renderer.capture.sampling import (
    SENT_AS,
    sampling_record,
    unreproducible_parameters,
)
from vllm_forest_renderer.context import Call
from vllm_forest_renderer.errors import ForestError, StoreUnavailable
from vllm_forest_renderer.ledger import Ledger
from vllm_forest_renderer.media.cache import MediaCache
from vllm_forest_renderer.media.items import identified
from vllm_forest_renderer.resolution import PrefixResolver
from vllm_forest_renderer.store.protocol import DeltaSink
from vllm_forest_renderer.weights import EngineControl

logger = logging.getLogger("vllm.forest")


class CaptureService:
    """Captures calls of one server."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        sink: DeltaSink,
        resolver: PrefixResolver,
        control: EngineControl,
        logprobs_mode: str,
        routes: RouteShape | None,
        server_changes: Sequence[str],
        allow_unreproducible: bool,
        hot_prefix_tokens: int,
        hot_media_bytes: int,
    ) -> None:
        """`server_changes` names what the server does to every sampled distribution.

        `routes` is the shape of the routed experts; None where the engine reports none.
        """
        self._ledger = ledger
        self._sink = sink
        self._resolver = resolver
        self._control = control
        self._logprobs_mode = logprobs_mode
        self._routes = routes
        self._server_changes = tuple(server_changes)
        self._allow_unreproducible = allow_unreproducible
        self._prefixes = PrefixCache(sink, capacity_tokens=hot_prefix_tokens)
        self._media = MediaCache(sink, capacity_bytes=hot_media_bytes)
        self._background: set[asyncio.Task[Any]] = set()

    def committed(self, attempt_id: str) -> tuple[CallRecord, ...]:
        """Committed calls of an open attempt. Raises `ForestError` for another attempt."""
        return self._ledger.calls(attempt_id)

    def begin(
        self,
        attempt_id: str,
        *,
        api: str,
        model: str,
        history: SourceHistory,
        calls: tuple[CallRecord, ...],
    ) -> Call:
        """A request of an attempt whose committed calls are `calls`."""
        return Call(
            attempt_id=attempt_id,
            api=api,
            model=model,
            history=history,
            calls=calls,
            resolver=self._resolver,
            history_tokens=self._prefixes.history,
            stored_media=self._media.tensors,
            admit=self._admit,
            around_generation=self._control.generation,
        )

    async def _admit(self, call: Call, params: Any) -> None:
        changed = unreproducible_parameters(params, self._server_changes)
        if changed and not self._allow_unreproducible:
            names = ", ".join(SENT_AS.get(name, name) for name in changed)
            raise ForestError(
                Reason.UNREPRODUCIBLE_SAMPLING,
                f"the trainer cannot rebuild a distribution changed by {names}; leave it out "
                "(server defaults come from the model's generation_config.json: start with "
                "--generation-config vllm), or set allow_unreproducible_sampling to capture the "
                "call marked and untrained",
                param=changed[0],
            )
        call.sampling = sampling_record(
            params, logprobs_mode=self._logprobs_mode, reproducible=not changed
        )
        intent = await self._ledger.record_intent(call.attempt_id, api=call.api, model=call.model)
        call.call_id, call.order = intent.call_id, intent.order
        call.started_at, call.partition = intent.started_at, intent.partition
        call.admitted.set()

    async def complete(self, call: Call, answer: Answer) -> CallRecord:
        """Stage the delta and commit the record; both are durable on return.

        Raises `ForestError` after recording the failure.
        """
        call.completing = True
        task = asyncio.create_task(self._complete(call, answer))
        self._keep(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The commit goes on; what is recorded is that nobody waited for it.
            self._keep(asyncio.create_task(self._note_absence(call, task)))
            raise

    async def _complete(self, call: Call, answer: Answer) -> CallRecord:
        assert call.call_id is not None
        assert call.generation is not None
        assert call.sampling is not None
        try:
            call.generation.check(call.prompt_tokens or [])
            spans = call.generation.weight_spans(call.weight_version)
            replay = replay_summary(call, answer)
            routes = captured_routes(call, self._routes) if self._routes is not None else None
            info, rows = routes or (None, None)
            if call.media:
                call.media = await asyncio.to_thread(identified, call.media)
            delta = build_delta(call, rows)
            ref = await self._sink.put(call.partition, call.call_id, delta)
            record = build_record(
                call,
                delta=delta,
                ref=ref,
                replay=replay,
                answer=answer,
                sampling=call.sampling,
                weight_spans=spans,
                committed_at=time.time(),
                routes=info,
            )
            await self._ledger.commit(record)
        except StoreUnavailable as error:
            # The generation is spent: unlike a refused admission, this must not invite a retry.
            failure = ForestError(Reason.STAGING_FAILED, str(error))
            await self.fail(call, failure)
            raise failure from error
        except Exception as error:
            await self.fail(call, error)
            raise
        for item in call.media:
            self._media.put(item.described.blob, item.arrays)
        self._prefixes.put(call.call_id, [*(call.prompt_tokens or ()), *call.generation.tokens])
        metrics.GENERATED_TOKENS.inc(record.generated_len)
        if record.parent_call_id is None:
            metrics.ROOTS.labels(record.root_reason).inc()
        else:
            metrics.CONTINUATIONS.inc()
            metrics.SPLICED_TOKENS.inc(record.prev_len)
        return record

    async def _note_absence(self, call: Call, completing: "asyncio.Task[CallRecord]") -> None:
        await asyncio.wait([completing])
        if not completing.cancelled() and completing.exception() is None:
            await self._record(
                call,
                Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES,
                "the client went away while its finished answer was committed",
            )

    async def fail(self, call: Call, error: BaseException) -> None:
        """Record why an admitted call leaves no capture. Does nothing without an intent."""
        await self._record(call, failure_reason(error), f"{type(error).__name__}: {error}")

    def fail_in_background(self, call: Call, error: BaseException) -> None:
        """`fail` for a task that is being cancelled before its generation was finished."""
        if call.call_id is not None and not call.completing:
            self._keep(asyncio.create_task(self.fail(call, error)))

    async def _record(self, call: Call, reason: Reason, detail: str) -> None:
        if call.call_id is None:
            return
        try:
            await self._ledger.record_failure(call.attempt_id, call.call_id, reason, detail)
        except ForestError as error:
            # The call stays pending, which masks the rollout as a failure would.
            logger.error("failure %s of call %s is not recorded: %s", reason, call.call_id, error)

    def _keep(self, task: "asyncio.Task[Any]") -> None:
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()

    async def shutdown(self) -> None:
        """Wait for commits that outlived their requests."""
        if self._background:
            await asyncio.wait(set(self._background))


def failure_reason(error: BaseException) -> Reason:
    """The capture failure that an error stands for."""
    if isinstance(error, asyncio.CancelledError):
        return Reason.CLIENT_DISCONNECTED
    if isinstance(error, ForestError) and EFFECTS[error.reason] is Effect.CAPTURE_FAILURE:
        return error.reason
    return Reason.ENGINE_ERROR
