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

from megatron_forest_trainer.controller.client import ControlClient, ControlError, TransportFailure

logger = logging.getLogger(__name__)

_PARALLEL = 16


@dataclass
class Cleaner:
    """Cleans up after the steps of one run."""

    client: ControlClient
    keep_captures: bool
    wait_for_checkpoint: bool
    """Keep a step's captures until `checkpoint_saved`."""
    _waiting: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    _left_over: set[str] = field(default_factory=set)

    async def step_done(self, partition: str, attempts: Sequence[str]) -> None:
        """The step was trained and recorded."""
        if self.keep_captures:
            return
        self._waiting.append((partition, tuple(attempts)))
        if not self.wait_for_checkpoint:
            await self.checkpoint_saved()

    async def checkpoint_saved(self) -> None:
        """No step so far will be repeated."""
        waiting, self._waiting = self._waiting, []
        for partition, attempts in waiting:
            await self._clean(partition, attempts)

    async def run_done(self) -> None:
        """No write can arrive any more: tear down what was left over."""
        for partition in sorted(self._left_over):
            await self._tear_down(partition)

    async def _clean(self, partition: str, attempts: Sequence[str]) -> None:
        limit = asyncio.Semaphore(_PARALLEL)

        async def delete(attempt_id: str) -> bool:
            async with limit:
                try:
                    return not (await self.client.delete_attempt(attempt_id)).kept_pending
                except (ControlError, TransportFailure) as error:
                    logger.warning("attempt %s was not deleted: %s", attempt_id, error)
                    return False

        clean = await asyncio.gather(*(delete(attempt_id) for attempt_id in attempts))
        if all(clean):
            await self._tear_down(partition)
        else:
            self._left_over.add(partition)

    async def _tear_down(self, partition: str) -> None:
        try:
            await self.client.delete_partition(partition)
            self._left_over.discard(partition)
        except (ControlError, TransportFailure) as error:
            logger.warning("partition %s was not removed: %s", partition, error)
            self._left_over.add(partition)
