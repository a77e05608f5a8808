"""A run's book: the journal of what began, verification, and the archive of what finished.

Guarantees: blocking, one rollout at a time per call, safe from several threads; a rollout is
archived only after it was verified, and before its group is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forest_schema import Receipt

from megatron_forest_trainer.controller import archive, journal
from megatron_forest_trainer.controller.run_dir import RunDirectory
from megatron_forest_trainer.core.selection import SelectionPolicy
from megatron_forest_trainer.core.types import DeltaReader, Finalized
from megatron_forest_trainer.finalize import OnEvidenceError, finalize_rollout


@dataclass(frozen=True, slots=True)
class Book:
    """Writes down, verifies and archives the rollouts of a run."""

    run: RunDirectory
    reader: DeltaReader
    policy: SelectionPolicy
    forest_training: bool
    on_evidence_error: OnEvidenceError
    row_multiple: int
    require_routes: bool = False
    """Mask a rollout that has a call without routed experts."""

    def begun(self, group_id: str, *, step: int, position: int) -> None:
        """Write down that a group took the task at `position`."""
        journal.append(self._folder(step), journal.GroupBegun(group_id, position))

    def opened(self, rollout_id: str, attempt_id: str, *, step: int) -> None:
        """Write down that a rollout opened an attempt."""
        journal.append(self._folder(step), journal.AttemptOpened(rollout_id, attempt_id))

    def rollout(
        self, receipt: Receipt, result: dict[str, Any], reward: float, *, step: int, position: int
    ) -> Finalized:
        """Verify and archive one rollout. Integrity errors raise."""
        finalized = finalize_rollout(
            receipt,
            result,
            self.reader,
            self.policy,
            forest_training=self.forest_training,
            require_routes=self.require_routes,
            on_evidence_error=self.on_evidence_error,
        )
        archive.save_rollout(
            self._folder(step),
            receipt,
            result,
            reward,
            finalized,
            step=step,
            task_position=position,
            forest_training=self.forest_training,
        )
        return finalized

    def group(
        self, group_id: str, rollouts: Sequence[Finalized], *, step: int, position: int
    ) -> None:
        """Archive a complete group."""
        archive.save_group(
            self._folder(step),
            rollouts,
            step=step,
            group_id=group_id,
            task_position=position,
            row_multiple=self.row_multiple,
            forest_training=self.forest_training,
        )

    def _folder(self, step: int) -> Path:
        return self.run.rollouts(step)
