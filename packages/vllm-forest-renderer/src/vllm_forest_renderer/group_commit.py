"""One thread that makes everything queued durable together.

Guarantees: work is committed in the order of submission; a future is resolved only after the
commit that contains its work has returned; while one commit runs, whatever is submitted becomes
the next batch, so the cost of a disk flush is shared by overlapping work and nobody waits for a
timer. Submitting never blocks and never touches the disk.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.metrics import CommitMetrics

Work = TypeVar("Work")


class Raised(NamedTuple):
    """Outcome of work that raised."""

    error: Exception


Outcome = Any
"""What a commit returns for one piece of work: its result, or `Raised`."""


class GroupCommitter(Generic[Work]):
    """Batches `Work` for `commit`, which runs on one daemon thread."""

    def __init__(
        self,
        commit: Callable[[Sequence[Work]], Sequence[Outcome]],
        *,
        name: str,
        max_batch: int,
        metrics: CommitMetrics,
    ) -> None:
        """`commit` returns one outcome per piece of work; what it raises fails the whole batch."""
        self._commit = commit
        self._name = name
        self._max_batch = max_batch
        self._metrics = metrics
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Future[Any]:
        """A future of the work's outcome. Raises `StoreUnavailable` after `stop`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._stopped:
                raise StoreUnavailable(f"{self._name} is shut down")
            self._queue.put((work, future))
        self._metrics.queue_depth.inc()
        return future

    def stop(self) -> None:
        """Commit what is queued, then end the thread."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch, stopping = self._next_batch()
            # A cancelled future is dropped here and cannot be cancelled from here on.
            live = [entry for entry in batch if entry[1].set_running_or_notify_cancel()]
            outcomes = self._outcomes([work for work, _ in live])
            self._metrics.queue_depth.dec(len(batch))
            for (_, future), outcome in zip(live, outcomes, strict=True):
                if isinstance(outcome, Raised):
                    future.set_exception(outcome.error)
                else:
                    future.set_result(outcome)

    def _next_batch(self) -> tuple[list[tuple[Work, Future[Any]]], bool]:
        batch: list[tuple[Work, Future[Any]]] = []
        entry = self._queue.get()
        while entry is not None:
            batch.append(entry)
            if len(batch) == self._max_batch:
                return batch, False
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _outcomes(self, works: Sequence[Work]) -> Sequence[Outcome]:
        if not works:
            return ()
        self._metrics.batch_size.observe(len(works))
        try:
            with self._metrics.seconds.time():
                return self._commit(works)
        except Exception as error:
            return [Raised(error)] * len(works)
