"""From files of a run to reports.

Guarantees: token-free and read-only; rows are rebuilt from the receipt and the saved selection by
the same code that trains, so that what is shown is what runs.
"""

from pathlib import Path

import msgspec
from forest_schema import CallRecord, Reason, Receipt, SchemaError, decode_receipt

from megatron_forest_trainer.controller.archive import (
    DECISIONS_FILE,
    ROLLOUT_SUFFIX,
    RolloutSnapshot,
    StepDecisions,
    read_decisions,
    read_rollout,
)
from megatron_forest_trainer.core.filters import Decision
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.types import RowPlan


class InspectError(ValueError):
    """The path holds nothing that can be shown."""


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """One captured call."""

    call_id: str
    order: int
    parent_call_id: str | None
    root_reason: str | None
    prev_len: int
    prompt_delta_len: int
    generated_len: int
    cum_len: int
    images: int
    """Images that the call added to its prompt."""
    status: str
    finish_reason: str | None
    weight_versions: tuple[str, ...]
    selected: bool
    scored: bool
    """The reward was given for this call's response."""
    why_not: str | None
    """Why it was not selected; None for a selected call."""


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    """A generation inside a row."""

    call_id: str
    start: int
    end: int
    owned: bool


class RowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One training row."""

    row_id: str
    length: int
    owned_tokens: int
    calls: tuple[str, ...]
    spans: tuple[SpanReport, ...]
    mult_prob_error: float | None
    """Mean multiplicative probability error of its owned tokens; None before training."""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted call without a capture."""

    call_id: str
    reason: str
    detail: str


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one logical rollout. None where the files do not say."""

    rollout_id: str
    group_id: str
    attempt_id: str
    step: int | None = None
    task_position: int | None = None
    reward: float | None = None
    advantage: float | None = None
    trains: bool | None = None
    votes: bool | None = None
    reason: Reason | None = None
    """Why it does not train."""
    detail: str = ""
    calls: tuple[CallReport, ...]
    rows: tuple[RowReport, ...]
    failures: tuple[FailureReport, ...]
    pending: tuple[str, ...]


def load_reports(
    path: Path, *, step: int | None = None, rollout: str | None = None
) -> list[RolloutReport]:
    """Reports of a run's folder, a step's folder, a rollout's file or a bare receipt.

    `step` and `rollout` (a part of the id) choose among them. Raises `InspectError`.
    """
    files = _files(path)
    reports = []
    decisions: dict[Path, StepDecisions | None] = {}
    for file in files:
        if rollout is not None and rollout not in file.name:
            continue
        try:
            if file.name.endswith(ROLLOUT_SUFFIX):
                snapshot = read_rollout(file)
                if step is not None and snapshot.step != step:
                    continue
                folder = file.parent
                if folder not in decisions:
                    decisions[folder] = read_decisions(folder)
                reports.append(report_snapshot(snapshot, decisions[folder]))
            else:
                reports.append(report_receipt(decode_receipt(file.read_bytes())))
        except (SchemaError, msgspec.MsgspecError) as error:
            raise InspectError(f"{file}: {error}") from error
    if not reports:
        raise InspectError(
            f"{path}: no rollout matches; there are {len(files)} files of rollouts, "
            f"{files[0].name} to {files[-1].name}"
        )
    return reports


def report_snapshot(snapshot: RolloutSnapshot, decisions: StepDecisions | None) -> RolloutReport:
    """The report of an archived rollout, with what its step decided where it was trained."""
    key = f"{snapshot.group_id}/{snapshot.rollout_id}"
    decision: Decision | None = decisions.decisions.get(key) if decisions else None
    by_id = {record.call_id: record for record in snapshot.receipt.calls}
    rows: tuple[RowPlan, ...] = ()
    if snapshot.reason is None:
        rows = build_rows(
            [by_id[call_id] for call_id in snapshot.selected],
            group_id=snapshot.group_id,
            rollout_id=snapshot.rollout_id,
        )
    return RolloutReport(
        rollout_id=snapshot.rollout_id,
        group_id=snapshot.group_id,
        attempt_id=snapshot.receipt.attempt_id,
        step=snapshot.step,
        task_position=snapshot.task_position,
        reward=snapshot.reward,
        advantage=decisions.advantages.get(key) if decisions else None,
        trains=decision.trains if decision else None,
        votes=decision.votes if decision else None,
        reason=decision.reason if decision else snapshot.reason,
        detail=snapshot.detail,
        calls=tuple(
            _call(record, set(snapshot.selected), snapshot.terminal_response_id, known=True)
            for record in snapshot.receipt.calls
        ),
        rows=tuple(_row(row, decisions) for row in rows),
        failures=_failures(snapshot.receipt),
        pending=snapshot.receipt.pending,
    )


def report_receipt(receipt: Receipt) -> RolloutReport:
    """The report of a receipt by itself: calls without a selection."""
    return RolloutReport(
        rollout_id=receipt.rollout_id,
        group_id=receipt.group_id,
        attempt_id=receipt.attempt_id,
        calls=tuple(_call(record, set(), None, known=False) for record in receipt.calls),
        rows=(),
        failures=_failures(receipt),
        pending=receipt.pending,
    )


def _files(path: Path) -> list[Path]:
    if path.name == DECISIONS_FILE:
        raise InspectError(f"{path} holds a step's decisions: give its folder {path.parent}")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InspectError(f"{path} does not exist")
    found = sorted(path.glob(f"*{ROLLOUT_SUFFIX}"))
    found = found or sorted(path.glob(f"rollouts/*/*{ROLLOUT_SUFFIX}"))
    if not found:
        raise InspectError(f"{path} holds no rollouts: give a run's folder, a step's or a file")
    return found


def _call(
    record: CallRecord, selected: set[str], terminal: str | None, *, known: bool
) -> CallReport:
    is_selected = record.call_id in selected
    if is_selected:
        why_not = None
    elif not known:
        why_not = "a receipt does not say what was selected"
    elif not selected:
        why_not = "nothing was selected"
    else:
        why_not = "not in the selection"
    return CallReport(
        call_id=record.call_id,
        order=record.order,
        parent_call_id=record.parent_call_id,
        root_reason=record.root_reason,
        prev_len=record.prev_len,
        prompt_delta_len=record.prompt_delta_len,
        generated_len=record.generated_len,
        cum_len=record.cum_len,
        images=len(record.media),
        status=record.status,
        finish_reason=record.finish_reason,
        weight_versions=tuple(dict.fromkeys(span.version for span in record.weight_spans)),
        selected=is_selected,
        scored=terminal is not None and record.output.response_id == terminal,
        why_not=why_not,
    )


def _row(row: RowPlan, decisions: StepDecisions | None) -> RowReport:
    error = decisions.row_errors.get(row.row_id) if decisions else None
    return RowReport(
        row_id=row.row_id,
        length=row.length,
        owned_tokens=row.owned_tokens,
        calls=tuple(record.call_id for record in row.path),
        spans=tuple(
            SpanReport(call_id=span.call_id, start=span.start, end=span.end, owned=span.owned)
            for span in row.spans
        ),
        mult_prob_error=error.mult_prob_error if error else None,
    )


def _failures(receipt: Receipt) -> tuple[FailureReport, ...]:
    return tuple(
        FailureReport(call_id=failure.call_id, reason=failure.reason, detail=failure.detail)
        for failure in receipt.failures
    )
