"""The learner as the controller sees it: commands executed on every rank, awaited on rank 0.

Guarantees: the learner lives in one thread for its whole life; a command is broadcast only after
the one before it has ended; the event loop stays free while a command runs, so that rollouts go on.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from megatron_forest_trainer.controller.channel import (
    Channel,
    Command,
    ComputeLogprobs,
    ExportWeights,
    LoadCheckpoint,
    SaveCheckpoint,
    Stop,
    TrainStep,
)
from megatron_forest_trainer.core.metrics import TokenErrors
from megatron_forest_trainer.core.plan import StepPlan
from megatron_forest_trainer.core.types import DeltaReader
from megatron_forest_trainer.learner import Learner, StepStats

_T = TypeVar("_T")


class Worker:
    """Executes commands on this rank."""

    def __init__(self, learner: Learner, reader: DeltaReader) -> None:
        self.learner = learner
        self._reader = reader

    def execute(self, command: Command) -> Any:
        """Do what `command` says; every rank does the same at the same time."""
        match command:
            case ComputeLogprobs(plan=plan):
                return self.learner.logprobs(plan, self._reader)
            case TrainStep(plan=plan):
                return self.learner.train_step(plan, self._reader)
            case ExportWeights(directory=directory):
                return self.learner.export_hf(Path(directory))
            case SaveCheckpoint(directory=directory):
                return self.learner.save(Path(directory))
            case LoadCheckpoint(directory=directory):
                return self.learner.load(Path(directory))
            case Stop():
                return None


class LearnerThread:
    """Rank 0's learner, in a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._worker: Worker | None = None
        self._channel: Channel | None = None
        self._broken = False

    async def start(self, make: Callable[[], tuple[Worker, Channel]]) -> None:
        """Build the learner; `make` runs in the learner's thread."""
        self._worker, self._channel = await self._run(make)

    async def logprobs(self, plan: StepPlan) -> dict[str, TokenErrors]:
        """See `Learner.logprobs`."""
        errors: dict[str, TokenErrors] = await self._command(ComputeLogprobs(plan=plan))
        return errors

    async def train_step(self, plan: StepPlan) -> StepStats:
        """See `Learner.train_step`."""
        stats: StepStats = await self._command(TrainStep(plan=plan))
        return stats

    async def export_hf(self, directory: Path) -> None:
        """See `Learner.export_hf`."""
        await self._command(ExportWeights(directory=str(directory)))

    async def save(self, directory: Path) -> None:
        """See `Learner.save`."""
        await self._command(SaveCheckpoint(directory=str(directory)))

    async def load(self, directory: Path) -> None:
        """See `Learner.load`."""
        await self._command(LoadCheckpoint(directory=str(directory)))

    async def stop(self, error: str | None = None) -> None:
        """Tell the other ranks that the run is over, and end the thread.

        After a failed command the other ranks cannot listen; torchrun ends them.
        """
        if self._channel is not None and not self._broken:
            channel = self._channel
            # A rank that is gone cannot listen, and must not hide the error that ends the run.
            with contextlib.suppress(RuntimeError):
                await self._run(lambda: _end(channel, error))
        self._executor.shutdown(wait=not self._broken)

    async def _command(self, command: Command) -> Any:
        worker, channel = self._worker, self._channel
        assert worker is not None
        assert channel is not None

        def run() -> Any:
            try:
                channel.send(command)
                return worker.execute(command)
            except BaseException:
                self._broken = True
                raise

        return await self._run(run)

    async def _run(self, work: Callable[[], _T]) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        # An interrupted run has no one left to fetch what the interruption broke on other ranks.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The ranks are inside the command together: it ends before anything else happens.
            await asyncio.wait([future])
            raise


def _end(channel: Channel, error: str | None) -> None:
    channel.send(Stop(error=error))
    if error is None:
        channel.leave()
