"""Continuing a run after it ended, however it ended.

Guarantees: a run continues from its newest complete checkpoint, or from its initial weights;
finished rollouts of later steps are used again exactly when every weight version that generated
them is part of the continued history, so that nothing is trained twice in it and nothing usable is
lost; one that was masked and that the configuration would mask no longer runs again; groups take
the tasks that they had taken; attempts that cannot be used again are deleted. A checkpoint of
another schema, forest mode, row multiple or run is refused before anything starts.
"""

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from forest_schema import SNAPSHOT_SCHEMA, Reason
from forest_schema.version import check_message_version

from megatron_forest_trainer.controller import archive, journal
from megatron_forest_trainer.controller.archive import RolloutSnapshot, SnapshotRefused
from megatron_forest_trainer.controller.rollouts import Rollout
from megatron_forest_trainer.controller.run_dir import (
    RunDirectory,
    prune_steps,
    steps_in,
    version_step,
    weight_version,
)
from megatron_forest_trainer.core.types import DeltaReader
from megatron_forest_trainer.durable import write_whole
from megatron_forest_trainer.finalize import OnEvidenceError

logger = logging.getLogger(__name__)

CONTROLLER_FILE = "controller.json"
LEARNER_FOLDER = "learner"


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds beside the learner's state."""

    schema: int = SNAPSHOT_SCHEMA
    run_id: str
    step: int
    """Optimizer steps that are complete."""
    forest_training: bool
    row_multiple: int
    dropped_groups: int
    """Groups that these steps lost, for the drop budget."""
    next_position: int
    """First task that no group of these steps took."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of a run below one folder, newest last."""

    folder: Path
    keep: int | None
    """Newest checkpoints that stay; None keeps all."""

    def learner(self, step: int) -> Path:
        """Folder of the learner's state."""
        return self.folder / weight_version(step) / LEARNER_FOLDER

    def prepare(self, step: int) -> Path:
        """The learner's folder of a checkpoint that is about to be written, made free."""
        shutil.rmtree(self.folder / weight_version(step), ignore_errors=True)
        return self.learner(step)

    def complete(self, state: ControllerState) -> None:
        """The learner's state is written: make the checkpoint count, and prune old ones."""
        folder = self.folder / weight_version(state.step)
        write_whole(folder / CONTROLLER_FILE, msgspec.json.encode(state))
        if self.keep is not None:
            prune_steps(self.folder, keep=self.keep)

    def newest(self) -> ControllerState | None:
        """State of the newest complete checkpoint. Raises `SchemaError` for another schema."""
        for step in reversed(steps_in(self.folder)):
            path = self.folder / weight_version(step) / CONTROLLER_FILE
            if path.is_file():
                data = path.read_bytes()
                check_message_version(
                    data, what=f"checkpoint {path.parent}", expected=SNAPSHOT_SCHEMA
                )
                return msgspec.json.decode(data, type=ControllerState)
        return None


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where a run continues."""

    step: int = 0
    """Optimizer steps that are complete."""
    dropped_groups: int = 0
    next_position: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    """Group id -> task, for groups that began after the checkpoint."""
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """Rollout id -> finished rollout to use again."""
    abandoned: tuple[str, ...] = ()
    """Attempts to delete."""
    uncleaned: tuple[int, ...] = ()
    """Complete steps whose captures are still on the server."""


def check_state(
    state: ControllerState, run: RunDirectory, *, forest_training: bool, row_multiple: int
) -> None:
    """Refuse a checkpoint that this run cannot continue from. Raises `SnapshotRefused`."""
    if state.run_id != run.run_id:
        raise SnapshotRefused(
            f"the checkpoint is of run {state.run_id}, logger.log_dir holds run {run.run_id}; name "
            "the folders of one run"
        )
    archive.check_mode(
        f"the checkpoint after step {state.step}",
        saved_forest=state.forest_training,
        saved_multiple=state.row_multiple,
        forest_training=forest_training,
        row_multiple=row_multiple,
    )


def recover(
    run: RunDirectory,
    state: ControllerState | None,
    reader: DeltaReader,
    *,
    forest_training: bool,
    row_multiple: int,
    require_routes: bool,
    on_evidence_error: OnEvidenceError,
) -> Recovered:
    """What to continue with after the steps of `state` (None: from the initial weights).

    Blocking. Files of rollouts that cannot be used again are removed. Raises `SnapshotRefused`,
    and integrity errors for a finished rollout whose captures are damaged.
    """
    completed = state.step if state else 0
    positions: dict[str, int] = {}
    rollouts: dict[str, Rollout] = {}
    abandoned: list[str] = []
    begun = run.begun_steps()
    for folder in (run.rollouts(step) for step in begun if step > completed):
        positions |= journal.positions(folder)
        used: set[str] = set()
        for snapshot in archive.read_rollouts(folder):
            path = archive.rollout_file(folder, snapshot.rollout_id)
            if not _usable(snapshot, completed):
                path.unlink()
                continue
            archive.check_mode(
                f"rollout {snapshot.rollout_id}",
                saved_forest=snapshot.forest_training,
                forest_training=forest_training,
            )
            lifted = _lifted_by(snapshot, require_routes, on_evidence_error)
            if lifted is not None:
                logger.info(
                    "rollout %s was masked (%s) and runs again: %s no longer masks it",
                    snapshot.rollout_id,
                    snapshot.reason,
                    lifted,
                )
                path.unlink()
                continue
            if require_routes:
                archive.check_routes(snapshot)
            used.add(snapshot.receipt.attempt_id)
            rollouts[snapshot.rollout_id] = Rollout(
                rollout_id=snapshot.rollout_id,
                receipt=snapshot.receipt,
                result=snapshot.result,
                reward=snapshot.reward,
                finalized=archive.replay(snapshot, reader),
            )
        for group in archive.read_groups(folder):
            if not all(rollout_id in rollouts for rollout_id in group.rollout_ids):
                archive.group_file(folder, group.group_id).unlink()
                continue
            archive.check_mode(
                f"group {group.group_id}",
                saved_forest=group.forest_training,
                saved_multiple=group.row_multiple,
                forest_training=forest_training,
                row_multiple=row_multiple,
            )
        abandoned += [a for a in journal.attempts(folder) if a not in used]
        (folder / archive.DECISIONS_FILE).unlink(missing_ok=True)
    logger.info(
        "continuing after step %d: %d finished rollouts are used again, %d attempts are given up",
        completed,
        len(rollouts),
        len(abandoned),
    )
    return Recovered(
        step=completed,
        dropped_groups=state.dropped_groups if state else 0,
        next_position=max(
            [state.next_position if state else 0, *(p + 1 for p in positions.values())]
        ),
        positions=positions,
        rollouts=rollouts,
        abandoned=tuple(abandoned),
        uncleaned=tuple(
            step
            for step in begun
            if step <= completed and not journal.is_cleaned(run.rollouts(step))
        ),
    )


def _usable(snapshot: RolloutSnapshot, completed: int) -> bool:
    """Only weights of the continued history generated it."""
    versions = {span.version for call in snapshot.receipt.calls for span in call.weight_spans}
    steps = [version_step(version) for version in versions]
    return all(step is not None and step <= completed for step in steps)


def _lifted_by(
    snapshot: RolloutSnapshot, require_routes: bool, on_evidence_error: OnEvidenceError
) -> str | None:
    """The key that masked the rollout and would not today; None for any other rollout."""
    if snapshot.reason is Reason.MISSING_ROUTES and not require_routes:
        return "policy.router_replay.on_missing_routes"
    if snapshot.reason is Reason.EVIDENCE_ERROR and on_evidence_error == "raise":
        return "token_capture.on_evidence_error"
    return None
