"""Deleting captures that no step needs any more.

Guarantees: the controller deletes only attempts that it opened; captures of a step go after the
step was trained and recorded, and, with checkpoints, after a checkpoint covers it; calls whose
writes may still arrive stay until the run ends, when their partition is torn down. A failed
deletion is logged and repeated at the end, it never stops training.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_forest_trainer.controller import journal
from megatron_forest_trainer.controller.client import ControlClient, ControlError, TransportFailure
from megatron_forest_trainer.controller.run_dir import RunDirectory

logger = logging.getLogger(__name__)

_PARALLEL = 16


@dataclass
class Cleaner:
    """Cleans up after the steps of one run."""

    client: ControlClient
    run: RunDirectory
    keep_captures: bool
    wait_for_checkpoint: bool
    """Keep a step's captures until `checkpoint_saved`."""
    _waiting: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    _left_over: set[int] = field(default_factory=set)

    async def step_done(self, step: int, attempts: Sequence[str]) -> None:
        """The step was trained and recorded; these are all attempts that it opened."""
        if self.keep_captures:
            return
        self._waiting.append((step, tuple(attempts)))
        if not self.wait_for_checkpoint:
            await self.checkpoint_saved()

    async def checkpoint_saved(self) -> None:
        """No step so far will be repeated."""
        waiting, self._waiting = self._waiting, []
        for step, attempts in waiting:
            if await self._delete(attempts):
                await self._tear_down(step)
            else:
                self._left_over.add(step)

    async def run_done(self) -> None:
        """No write can arrive any more: tear down what was left over."""
        for step in sorted(self._left_over):
            await self._tear_down(step)

    async def started(self, abandoned: Sequence[str], uncleaned: Sequence[int]) -> None:
        """Give up what an earlier start left: attempts, and steps that it did not clean."""
        for partition in self.run.stale:
            await self._delete_partition(partition)
        await self._delete(abandoned)
        if not self.keep_captures:
            self._left_over |= set(uncleaned)

    async def _delete(self, attempts: Sequence[str]) -> bool:
        """Delete attempts; False where one of them, or a call of one, has to stay."""
        limit = asyncio.Semaphore(_PARALLEL)

        async def delete(attempt_id: str) -> bool:
            async with limit:
                try:
                    return not (await self.client.delete_attempt(attempt_id)).kept_pending
                except (ControlError, TransportFailure) as error:
                    logger.warning("attempt %s was not deleted: %s", attempt_id, error)
                    return False

        return all(await asyncio.gather(*(delete(attempt_id) for attempt_id in attempts)))

    async def _tear_down(self, step: int) -> None:
        if await self._delete_partition(self.run.partition(step)):
            self._left_over.discard(step)
            journal.mark_cleaned(self.run.rollouts(step))
        else:
            self._left_over.add(step)

    async def _delete_partition(self, partition: str) -> bool:
        try:
            await self.client.delete_partition(partition)
        except (ControlError, TransportFailure) as error:
            logger.warning("partition %s was not removed: %s", partition, error)
            return False
        return True
