"""What a run keeps of its rollouts: receipts, results, selections, and what was decided.

Guarantees: a rollout's file is written whole when the rollout is finalised, a group's when all its
siblings are; both carry the snapshot schema, the forest mode, and, for a group, the row multiple
and the exact ids of its rows and padding rows. Files of another schema, mode or multiple are
refused by name. Reading a rollout back gives the same selection and the same row ids, or raises.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from forest_schema import SNAPSHOT_SCHEMA, Reason, Receipt
from forest_schema.version import check_message_version

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.filters import Decision
from megatron_forest_trainer.core.metrics import TokenErrors
from megatron_forest_trainer.core.padding import padding_ids
from megatron_forest_trainer.core.selection import Selection
from megatron_forest_trainer.core.types import DeltaReader, Finalized
from megatron_forest_trainer.durable import write_whole
from megatron_forest_trainer.finalize import finalize_selection

DECISIONS_FILE = "decisions.json"
GROUP_SUFFIX = ".group.json"
ROLLOUT_SUFFIX = ".rollout.json"


class SnapshotRefused(ValueError):
    """A snapshot that this run cannot continue from."""


class RolloutSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A finalised rollout: its receipt, what the harness returned, and what was selected."""

    schema: int = SNAPSHOT_SCHEMA
    forest_training: bool
    step: int
    group_id: str
    rollout_id: str
    task_position: int
    receipt: Receipt
    result: dict[str, Any]
    reward: float
    selected: tuple[str, ...]
    """Call ids in selection order; empty where nothing could be selected."""
    terminal_response_id: str | None
    reason: Reason | None
    """Why the rollout is masked; None for a verified one."""
    detail: str
    row_ids: tuple[str, ...]


class GroupSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A complete prompt group, as it was laid out."""

    schema: int = SNAPSHOT_SCHEMA
    forest_training: bool
    row_multiple: int
    step: int
    group_id: str
    task_position: int
    rollout_ids: tuple[str, ...]
    row_ids: tuple[str, ...]
    padding_row_ids: tuple[str, ...]


class StepDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a step's rollouts."""

    schema: int = SNAPSHOT_SCHEMA
    step: int
    weight_version: str
    """Weights that the step started from."""
    decisions: dict[str, Decision]
    """By `{group_id}/{rollout_id}`."""
    advantages: dict[str, float]
    """By `{group_id}/{rollout_id}`."""
    row_errors: dict[str, TokenErrors]
    """Row id -> error between engine and trainer; a sum that is not finite, which JSON cannot
    hold, is the largest float."""


_ROLLOUT = msgspec.json.Decoder(RolloutSnapshot)
_GROUP = msgspec.json.Decoder(GroupSnapshot)
_DECISIONS = msgspec.json.Decoder(StepDecisions)


def rollout_file(folder: Path, rollout_id: str) -> Path:
    """Where a rollout of the step in `folder` is kept."""
    return folder / f"{rollout_id}{ROLLOUT_SUFFIX}"


def group_file(folder: Path, group_id: str) -> Path:
    """Where a complete group of the step in `folder` is kept."""
    return folder / f"{group_id}{GROUP_SUFFIX}"


def save_rollout(
    folder: Path,
    receipt: Receipt,
    result: dict[str, Any],
    reward: float,
    finalized: Finalized,
    *,
    step: int,
    task_position: int,
    forest_training: bool,
) -> None:
    """Write a finalised rollout. Raises `TypeError` for a result that is not JSON."""
    snapshot = RolloutSnapshot(
        forest_training=forest_training,
        step=step,
        group_id=receipt.group_id,
        rollout_id=receipt.rollout_id,
        task_position=task_position,
        receipt=receipt,
        result=result,
        reward=reward,
        selected=finalized.selected,
        terminal_response_id=finalized.terminal_response_id,
        reason=finalized.reason,
        detail=finalized.detail,
        row_ids=tuple(row.row_id for row in finalized.rows),
    )
    write_whole(rollout_file(folder, receipt.rollout_id), msgspec.json.encode(snapshot))


def save_group(
    folder: Path,
    rollouts: Sequence[Finalized],
    *,
    step: int,
    group_id: str,
    task_position: int,
    row_multiple: int,
    forest_training: bool,
) -> None:
    """Write a complete group with the exact ids of its rows and padding rows.

    Raises `IntegrityError` where the group was saved before with others.
    """
    row_ids = tuple(row.row_id for rollout in rollouts for row in rollout.rows)
    snapshot = GroupSnapshot(
        forest_training=forest_training,
        row_multiple=row_multiple,
        step=step,
        group_id=group_id,
        task_position=task_position,
        rollout_ids=tuple(rollout.rollout_id for rollout in rollouts),
        row_ids=row_ids,
        padding_row_ids=padding_ids(group_id, len(row_ids), row_multiple),
    )
    path, data = group_file(folder, group_id), msgspec.json.encode(snapshot)
    if path.exists() and path.read_bytes() != data:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"group {group_id}: its rows or padding rows are not those that were saved in {path}",
        )
    write_whole(path, data)


def save_decisions(
    folder: Path,
    *,
    step: int,
    weight_version: str,
    decisions: Mapping[str, Decision],
    advantages: Mapping[str, float],
    row_errors: Mapping[str, TokenErrors],
) -> None:
    """Write what became of the step's rollouts."""
    made = StepDecisions(
        step=step,
        weight_version=weight_version,
        decisions=dict(decisions),
        advantages=dict(advantages),
        row_errors={row_id: _finite(error) for row_id, error in row_errors.items()},
    )
    write_whole(folder / DECISIONS_FILE, msgspec.json.encode(made))


def _finite(error: TokenErrors) -> TokenErrors:
    wrong = {
        name: sys.float_info.max
        for name in error.__struct_fields__
        if not math.isfinite(getattr(error, name))
    }
    return msgspec.structs.replace(error, **wrong)


def read_rollout(path: Path) -> RolloutSnapshot:
    """A rollout's file. Raises `SchemaError` for another schema, naming it."""
    data = path.read_bytes()
    check_message_version(data, what=f"rollout {path.name}", expected=SNAPSHOT_SCHEMA)
    return _ROLLOUT.decode(data)


def read_rollouts(folder: Path) -> list[RolloutSnapshot]:
    """All rollouts of a step's folder, by id."""
    return [read_rollout(path) for path in sorted(folder.glob(f"*{ROLLOUT_SUFFIX}"))]


def read_groups(folder: Path) -> list[GroupSnapshot]:
    """All complete groups of a step's folder, by id."""
    groups = []
    for path in sorted(folder.glob(f"*{GROUP_SUFFIX}")):
        data = path.read_bytes()
        check_message_version(data, what=f"group {path.name}", expected=SNAPSHOT_SCHEMA)
        groups.append(_GROUP.decode(data))
    return groups


def read_decisions(folder: Path) -> StepDecisions | None:
    """What became of a step's rollouts; None before the step was trained."""
    path = folder / DECISIONS_FILE
    if not path.is_file():
        return None
    data = path.read_bytes()
    check_message_version(data, what=f"{folder.name}/{path.name}", expected=SNAPSHOT_SCHEMA)
    return _DECISIONS.decode(data)


def check_mode(
    what: str,
    *,
    saved_forest: bool,
    forest_training: bool,
    saved_multiple: int | None = None,
    row_multiple: int | None = None,
) -> None:
    """Refuse what was saved in another forest mode or with another execution row multiple.

    Raises `SnapshotRefused`.
    """
    if saved_forest != forest_training:
        raise SnapshotRefused(
            f"{what} was saved with token_capture.forest_training: {str(saved_forest).lower()}; "
            "resume with the same value"
        )
    if saved_multiple != row_multiple:
        raise SnapshotRefused(
            f"{what} was saved with prompt groups padded to a multiple of {saved_multiple} rows, "
            f"this run pads to {row_multiple}; resume with the same number of data-parallel ranks, "
            "the same microbatch sizes and the same policy.sequence_packing and "
            "policy.forest_execution"
        )


def check_routes(snapshot: RolloutSnapshot) -> None:
    """Refuse a verified rollout with a selected call that has no routed experts.

    Raises `SnapshotRefused`.
    """
    if snapshot.reason is not None:
        return
    for record in snapshot.receipt.calls:
        if record.call_id in snapshot.selected and record.routes is None:
            raise SnapshotRefused(
                f"rollout {snapshot.rollout_id}: call {record.call_id} has no routed experts, and "
                "policy.router_replay.on_missing_routes is mask; continue with the setting that "
                "the run began with, or with live"
            )


def replay(snapshot: RolloutSnapshot, reader: DeltaReader) -> Finalized:
    """The rollout as it was finalised, verified again from its tensors.

    The saved selection counts, whatever a policy would say today. Raises `IntegrityError` where
    the rows are not the saved ones.
    """
    if snapshot.reason is not None:
        return Finalized(
            group_id=snapshot.group_id,
            rollout_id=snapshot.rollout_id,
            attempt_id=snapshot.receipt.attempt_id,
            reason=snapshot.reason,
            detail=snapshot.detail,
            selected=snapshot.selected,
            terminal_response_id=snapshot.terminal_response_id,
        )
    by_id = {record.call_id: record for record in snapshot.receipt.calls}
    selection = Selection(
        tuple(by_id[call_id] for call_id in snapshot.selected), snapshot.terminal_response_id
    )
    finalized = finalize_selection(
        snapshot.receipt, selection, reader, forest_training=snapshot.forest_training
    )
    row_ids = tuple(row.row_id for row in finalized.rows)
    if row_ids != snapshot.row_ids:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"rollout {snapshot.rollout_id}: rows {', '.join(row_ids)} where "
            f"{', '.join(snapshot.row_ids)} were saved",
        )
    return finalized
