"""The ledger: which calls an attempt admitted, and what became of each.

Guarantees: every method that changes something returns after the change is durable; what it
refuses it did not do. Committed records of open attempts are in memory and include what other
processes of this host committed. Nothing blocks the event loop: writes run on one thread and
share transactions, reads are look-ups in SQLite's page cache.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self, TypeVar

from forest_schema import CallRecord, Reason, Receipt, TensorRef
from forest_schema.control import ATTEMPT_PREFIX, AttemptOpened, CleanupReport, OpenAttempt
from forest_schema.shards import ShardError

from vllm_forest_renderer import metrics
from vllm_forest_renderer.errors import AttemptError, CoordinateError, StoreUnavailable
from vllm_forest_renderer.ledger import attempts, calls, owners, restoration
from vllm_forest_renderer.ledger.attempts import SealPlan
from vllm_forest_renderer.ledger.calls import Intent
from vllm_forest_renderer.ledger.database import LedgerReader, open_database
from vllm_forest_renderer.ledger.writer import LedgerWriter
from vllm_forest_renderer.names import check_attempt_id, check_label, check_partition
from vllm_forest_renderer.process import ProcessIdentity
from vllm_forest_renderer.store.protocol import DeltaSink

_log = logging.getLogger(__name__)

_CACHED_ATTEMPTS = 512
_POLL_SECONDS = (0.005, 0.1)
"""First and longest pause between two looks at what another process may change."""
_LIVENESS_SECONDS = 1.0
_SEALER_SECONDS = 60.0
"""Longest wait for another process that is sealing or deleting the same attempt."""

T = TypeVar("T")


class _Committed:
    """Committed calls of one attempt up to `version`."""

    def __init__(self) -> None:
        self.version = 0
        self.calls: tuple[CallRecord, ...] = ()


class Ledger:
    """Attempts and calls of one store directory. Create with `open`."""

    def __init__(self, writer: LedgerWriter, path: Path, sink: DeltaSink, owner: int) -> None:
        self._writer = writer
        self._reader = LedgerReader(path)
        self._receipt_reader = LedgerReader(path)
        self._sink = sink
        self._owner = owner
        self._cache: OrderedDict[str, _Committed] = OrderedDict()
        self._closing: dict[str, asyncio.Task[Receipt]] = {}
        self._deadlines: dict[str, float] = {}
        self._background: set[asyncio.Task[int]] = set()

    @classmethod
    async def open(cls, path: Path, sink: DeltaSink) -> Self:
        """Open or create the ledger file and recover what dead processes left.

        Raises `StoreUnavailable` and `SchemaError`.
        """
        connection = await asyncio.to_thread(open_database, path, store_id=sink.store_id)
        writer = LedgerWriter(connection)
        owner = await asyncio.wrap_future(
            writer.submit(lambda db: owners.register_owner(db, ProcessIdentity.current()))
        )
        ledger = cls(writer, path, sink, owner)
        await ledger._fail_lost_calls()
        with ledger._reader.snapshot() as db:
            garbage = attempts.read_garbage(db)
        ledger._discard_in_background(garbage)
        return ledger

    async def shutdown(self) -> None:
        """Make what was submitted durable and close the file.

        A closing that still waits for calls is given up; closing the attempt again resumes it.
        """
        closing = list(self._closing.values())
        for task in closing:
            task.cancel()
        if unfinished := [*closing, *self._background]:
            await asyncio.wait(unfinished)
        with contextlib.suppress(StoreUnavailable):
            await self._write(lambda db: owners.end_owner(db, self._owner))
        await asyncio.to_thread(self._writer.stop)
        self._reader.close()
        self._receipt_reader.close()

    async def open_attempt(self, body: OpenAttempt) -> AttemptOpened:
        """A fresh attempt. Raises `ForestError` for a bad name, `StoreUnavailable`."""
        check_label(body.rollout_id, "rollout_id")
        check_label(body.group_id, "group_id")
        await self._sink.prepare(check_partition(body.partition))
        attempt_id = await self._write(lambda db: attempts.open_attempt(db, body))
        return AttemptOpened(attempt_id=attempt_id, base_path=f"{ATTEMPT_PREFIX}/{attempt_id}")

    def calls(self, attempt_id: str) -> tuple[CallRecord, ...]:
        """Committed calls of an open attempt in commit order; the tuple only ever grows.

        Includes calls whose generation failed or was aborted (`status`): they cannot be parents.
        Raises `AttemptError` for an unknown attempt and for one that admits nothing more.
        """
        check_attempt_id(attempt_id)
        with self._reader.snapshot() as db:
            attempt = attempts.read_attempt(db, attempt_id)
            if attempt.state != "open":
                self._cache.pop(attempt_id, None)
                raise attempts.closed_error(attempt)
            committed = self._cache.setdefault(attempt_id, _Committed())
            self._cache.move_to_end(attempt_id)
            if committed.version != attempt.version:
                # Versions count commits, and these are the commits after the known version.
                fresh = calls.committed_since(db, attempt_id, committed.version)
                committed.calls += tuple(fresh)
                committed.version += len(fresh)
            while len(self._cache) > _CACHED_ATTEMPTS:
                self._cache.popitem(last=False)
            return committed.calls

    async def record_intent(self, attempt_id: str, *, api: str, model: str) -> Intent:
        """Admit a call, durably, before its inference starts.

        A caller that is cancelled while it waits leaves no pending call behind. Raises
        `AttemptError`, `StoreUnavailable`.
        """
        check_attempt_id(attempt_id)
        started_at = time.time()
        future = self._writer.submit(
            lambda db: calls.record_intent(
                db, attempt_id, owner=self._owner, api=api, model=model, started_at=started_at
            )
        )
        try:
            intent = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._abandon(attempt_id, done))
            raise
        metrics.INTENTS.labels(api).inc()
        return intent

    async def commit(self, record: CallRecord) -> None:
        """Complete an admitted call whose delta is stored.

        Raises `AttemptError` for a call that comes after its attempt was sealed (it stays
        isolated), `CoordinateError` for a record that contradicts the ledger or the store,
        `StoreUnavailable`.
        """
        check_attempt_id(record.attempt_id)
        try:
            acknowledgement = await self._sink.acknowledgement(record.delta)
        except ShardError as error:
            raise CoordinateError(f"call {record.call_id}: delta: {error}") from error
        try:
            await self._write(lambda db: calls.commit_call(db, record, acknowledgement))
        except AttemptError:
            metrics.LATE_COMMITS.inc()
            raise
        metrics.COMMITTED.labels(record.api).inc()

    async def record_failure(
        self, attempt_id: str, call_id: str, reason: Reason, detail: str = ""
    ) -> None:
        """Record why an admitted call failed; the first failure of a call counts.

        Raises `AttemptError`, `CoordinateError`, `StoreUnavailable`; after the latter the failure
        is recorded as soon as the ledger can be written again.
        """
        check_attempt_id(attempt_id)
        # Shielded: this is what a cancelled request does on its way out.
        if await asyncio.shield(
            asyncio.wrap_future(self._fail(attempt_id, call_id, reason, detail))
        ):
            metrics.FAILURES.labels(reason).inc()

    async def receipt(self, attempt_id: str) -> Receipt:
        """What the attempt holds. Raises `AttemptError`, for a deleted attempt too."""
        check_attempt_id(attempt_id)
        return await asyncio.to_thread(self._read_receipt, attempt_id)

    async def close(self, attempt_id: str, wait_s: float) -> Receipt:
        """Refuse later calls, wait at most `wait_s` for admitted ones, seal, return the receipt.

        Closing again returns the same calls. A caller that goes away does not stop the closing.
        Raises `AttemptError`, `StoreUnavailable`; after the latter, close again.
        """
        check_attempt_id(attempt_id)
        deadline = time.monotonic() + wait_s
        task = self._closing.get(attempt_id)
        if task is None:
            self._deadlines[attempt_id] = deadline
            task = asyncio.create_task(self._close(attempt_id))
            self._closing[attempt_id] = task
            task.add_done_callback(lambda done: self._forget_closing(attempt_id, done))
        else:
            self._deadlines[attempt_id] = min(self._deadlines[attempt_id], deadline)
        return await asyncio.shield(task)

    async def restore(
        self, attempt_id: str, call_ids: Sequence[str] | None = None
    ) -> AttemptOpened:
        """Move committed calls (None: all) into a fresh attempt; the old id becomes a tombstone.

        The other committed calls are deleted; pending and failed ones stay with the tombstone. A
        closing that has begun is brought to its end first, without waiting for calls. Raises
        `AttemptError`, `ForestError` for `call_ids` that cannot go on, `StoreUnavailable`.
        """
        check_attempt_id(attempt_id)
        while (
            restored := await self._write(
                lambda db: restoration.restore_attempt(db, attempt_id, call_ids)
            )
        ) is None:
            await self.close(attempt_id, 0.0)
        self._cache.pop(attempt_id, None)
        self._discard_in_background(restored.left)
        return AttemptOpened(
            attempt_id=restored.attempt_id, base_path=f"{ATTEMPT_PREFIX}/{restored.attempt_id}"
        )

    async def cleanup(self, attempt_id: str) -> CleanupReport:
        """Delete the attempt's committed calls and their deltas; the id stays a tombstone.

        Closes admissions first where they are open. Pending calls and failed ones without a
        committed capture are kept until the partition goes. Raises `AttemptError`,
        `StoreUnavailable`.
        """
        check_attempt_id(attempt_id)
        closing = self._closing.get(attempt_id)
        if closing is not None:
            self._deadlines[attempt_id] = 0.0
            await asyncio.wait([closing])
        deletion = await self._once_free(
            lambda db: attempts.delete_attempt(db, attempt_id, deleter=self._owner)
        )
        self._cache.pop(attempt_id, None)
        if deletion.resumed:
            await self._delete_copies(deletion.partition, deletion.removed, keep=())
        return CleanupReport(
            removed_calls=len(deletion.removed),
            removed_shards=await self._discard(deletion.removed),
            kept_pending=deletion.kept_pending,
        )

    async def cleanup_partition(self, partition: str) -> CleanupReport:
        """Delete everything in the partition, pending writes included. Raises as `cleanup`."""
        check_partition(partition)
        removed = await self._write(lambda db: attempts.delete_partition(db, partition))
        shards = await self._sink.drop_partition(partition)
        return CleanupReport(removed_calls=removed, removed_shards=shards)

    async def _close(self, attempt_id: str) -> Receipt:
        attempt = await self._write(lambda db: attempts.begin_close(db, attempt_id))
        if attempt.state == "closing":
            await self._wait_for_calls(attempt_id)
        plan = await self._once_free(
            lambda db: attempts.begin_seal(db, attempt_id, sealer=self._owner)
        )
        if not plan.closed:
            await self._seal(attempt_id, attempt.partition, plan)
        self._cache.pop(attempt_id, None)
        return await self.receipt(attempt_id)

    async def _wait_for_calls(self, attempt_id: str) -> None:
        """Until no admitted call is pending, or the deadline of the closing."""
        pause, longest = _POLL_SECONDS
        look_for_dead = time.monotonic() + _LIVENESS_SECONDS
        while True:
            with self._reader.snapshot() as db:
                pending = calls.pending_calls(db, attempt_id)
            left = self._deadlines[attempt_id] - time.monotonic()
            if not pending or left <= 0:
                return
            if time.monotonic() >= look_for_dead:
                await self._fail_lost_calls()
                look_for_dead = time.monotonic() + _LIVENESS_SECONDS
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    async def _seal(self, attempt_id: str, partition: str, plan: SealPlan) -> None:
        try:
            sealed = await self._sink.seal(partition, plan.refs)
            if plan.resumed:
                # Before the attempt is closed: a restored one would seal the same keys again.
                await self._delete_copies(partition, plan.refs, keep={*plan.refs, *sealed})
            replaced = tuple(zip(plan.refs, sealed, strict=True))
            await self._write(
                lambda db: attempts.finish_seal(db, attempt_id, replaced, sealer=self._owner)
            )
        except BaseException:
            # The copies stay: where the disk failed, nobody knows which references it kept. The
            # next close or cleanup removes what turned out superfluous.
            with contextlib.suppress(StoreUnavailable):
                self._writer.submit(
                    lambda db: attempts.release_seal(db, attempt_id, sealer=self._owner)
                )
            raise
        self._discard_in_background([old for old, new in replaced if old != new])

    async def _delete_copies(
        self, partition: str, refs: Sequence[TensorRef], *, keep: Container[TensorRef]
    ) -> None:
        """Delete what the store holds of the calls of `refs`, except for `keep`."""
        keys = {ref.key for ref in refs}
        with self._tolerating():
            stored = await self._sink.list(partition)
            await self._sink.delete([ref for ref in stored if ref.key in keys and ref not in keep])

    async def _discard(self, garbage: Sequence[TensorRef]) -> int:
        """Let the store give up garbage; returns the number of removed shards.

        What fails stays noted as garbage and is tried again at the next start.
        """
        removed = 0
        with self._tolerating():
            removed = await self._sink.delete(garbage)
            await self._write(lambda db: attempts.forget_garbage(db, garbage))
        return removed

    def _discard_in_background(self, garbage: Sequence[TensorRef]) -> None:
        if garbage:
            task = asyncio.create_task(self._discard(garbage))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _fail_lost_calls(self) -> None:
        with self._reader.snapshot() as db:
            lost = owners.lost_owners(db)
        if lost:
            failed = await self._write(lambda db: owners.fail_calls(db, lost))
            metrics.FAILURES.labels(Reason.PROCESS_LOST).inc(failed)
            _log.warning("%d calls of processes that are gone failed: process_lost", failed)

    def _abandon(self, attempt_id: str, admitted: "Future[Intent]") -> None:
        """Fail a call that was admitted after its request had gone away."""
        if admitted.cancelled() or admitted.exception() is not None:
            return
        with contextlib.suppress(StoreUnavailable):
            self._fail(
                attempt_id,
                admitted.result().call_id,
                Reason.CLIENT_DISCONNECTED,
                "the request went away while it was admitted",
            )
            metrics.FAILURES.labels(Reason.CLIENT_DISCONNECTED).inc()

    def _fail(self, attempt_id: str, call_id: str, reason: Reason, detail: str) -> "Future[bool]":
        return self._writer.submit(
            lambda db: calls.record_failure(db, attempt_id, call_id, reason, detail), owed=True
        )

    def _forget_closing(self, attempt_id: str, task: asyncio.Task[Receipt]) -> None:
        del self._closing[attempt_id], self._deadlines[attempt_id]
        if not task.cancelled() and task.exception() is not None:
            _log.warning("closing %s failed: %s", attempt_id, task.exception())

    async def _write(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.wrap_future(self._writer.submit(operation))

    async def _once_free(self, operation: Callable[[sqlite3.Connection], T | None]) -> T:
        """Repeat an operation that answers None while another process seals the attempt."""
        pause, longest = _POLL_SECONDS
        deadline = time.monotonic() + _SEALER_SECONDS
        while (result := await self._write(operation)) is None:
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    "another server process is still sealing this attempt; try again"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        return result

    @contextlib.contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Log what keeps the store from giving space back: it costs nothing but space."""
        try:
            yield
        except (StoreUnavailable, ShardError):
            _log.exception("unreferenced deltas stay until the next start or teardown")

    def _read_receipt(self, attempt_id: str) -> Receipt:
        with self._receipt_reader.snapshot() as db:
            return calls.read_receipt(db, attempt_id, store=self._sink.store_id)
