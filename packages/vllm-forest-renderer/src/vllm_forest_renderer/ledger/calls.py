"""Transactions on calls: admit, commit, fail, read.

Guarantees: a call's state goes intent -> committed or intent -> failed and never back; a record
enters only where its attempt still admits it, its coordinates continue those of a committed
parent of the same attempt, and its delta is the acknowledged one. Nothing here holds a token.
"""

import secrets
import sqlite3
from typing import NamedTuple

import msgspec
from forest_schema import CallRecord, CaptureState, CompletionStatus, FailureRecord, Reason, Receipt
from forest_schema.digests import EMPTY_CHAIN, extend_chain

from vllm_forest_renderer.errors import CoordinateError
from vllm_forest_renderer.ledger.attempts import (
    ENCODER,
    RECORD_DECODER,
    AttemptRow,
    closed_error,
    read_attempt,
)
from vllm_forest_renderer.store.protocol import Acknowledgement

_DETAIL_LIMIT = 500
"""Characters of a failure's detail: metadata per call stays constant."""


class Intent(NamedTuple):
    """An admitted call."""

    call_id: str
    order: int
    started_at: float
    """Unix seconds."""
    partition: str
    """Where the call's delta goes."""


def record_intent(
    connection: sqlite3.Connection,
    attempt_id: str,
    *,
    owner: int,
    api: str,
    model: str,
    started_at: float,
) -> Intent:
    """Admit a call. Raises `AttemptError`."""
    row = connection.execute(
        "UPDATE attempts SET next_order = next_order + 1 "
        "WHERE attempt_id = ? AND state = 'open' RETURNING next_order, partition",
        (attempt_id,),
    ).fetchone()
    if row is None:
        raise closed_error(read_attempt(connection, attempt_id))
    intent = Intent(f"call_{secrets.token_hex(16)}", row[0] - 1, started_at, row[1])
    connection.execute(
        "INSERT INTO calls (call_id, attempt_id, capture_order, owner, api, model, started_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (intent.call_id, attempt_id, intent.order, owner, api, model, started_at),
    )
    return intent


def commit_call(
    connection: sqlite3.Connection, record: CallRecord, acknowledgement: Acknowledgement
) -> None:
    """Complete an admitted call.

    Raises `AttemptError` for a capture that comes after its attempt was sealed and
    `CoordinateError` for one that comes after its failure was recorded or does not fit: the delta
    stays isolated in the store until the partition goes.
    """
    attempt = read_attempt(connection, record.attempt_id)
    call = connection.execute(
        "SELECT state, capture_order, api, record, failure_reason FROM calls "
        "WHERE call_id = ? AND attempt_id = ?",
        (record.call_id, record.attempt_id),
    ).fetchone()
    if call is None:
        raise (
            closed_error(attempt)
            if attempt.state == "deleted"
            else CoordinateError(f"call {record.call_id}: no intent of this attempt")
        )
    state, order, api, stored, failure = call
    encoded = ENCODER.encode(record)
    if state == CaptureState.COMMITTED:
        if stored == encoded:
            return
        raise CoordinateError(f"call {record.call_id}: committed already, with another record")
    if state == CaptureState.FAILED:
        raise CoordinateError(f"call {record.call_id}: its failure ({failure}) is recorded")
    if attempt.state not in ("open", "closing"):
        raise closed_error(attempt)
    if (record.order, record.api) != (order, api):
        raise CoordinateError(
            f"call {record.call_id}: order {record.order} and API {record.api} where the intent "
            f"has {order} and {api}"
        )
    _check_coordinates(connection, attempt, record, acknowledgement)
    version = attempt.version + 1
    connection.execute(
        "UPDATE attempts SET version = ? WHERE attempt_id = ?", (version, record.attempt_id)
    )
    connection.execute(
        "UPDATE calls SET state = 'committed', version = ?, status = ?, cum_len = ?, "
        "chain_digest = ?, record = ? WHERE call_id = ?",
        (
            version,
            record.status,
            record.cum_len,
            record.chain_digest,
            encoded,
            record.call_id,
        ),
    )


def _check_coordinates(
    connection: sqlite3.Connection,
    attempt: AttemptRow,
    record: CallRecord,
    acknowledgement: Acknowledgement,
) -> None:
    call = f"call {record.call_id}"
    if record.capture_key != record.attempt_id or record.source_capture_key is not None:
        raise CoordinateError(f"{call}: capture_key must be its own attempt's id")
    if acknowledgement.ref != record.delta or record.delta.key != record.call_id:
        raise CoordinateError(f"{call}: delta is not the acknowledged one of this call")
    if record.delta.partition != attempt.partition:
        raise CoordinateError(
            f"{call}: delta lies in partition {record.delta.partition}, the attempt in "
            f"{attempt.partition}"
        )
    stored = (acknowledgement.delta_len, acknowledgement.generated_len)
    if (record.delta_len, record.generated_len) != stored:
        raise CoordinateError(
            f"{call}: delta_len {record.delta_len} and generated_len {record.generated_len} where "
            f"the stored delta has {stored[0]} and {stored[1]}"
        )
    prev_len, chain = 0, EMPTY_CHAIN
    if record.parent_call_id is not None:
        prev_len, chain = _parent_coordinates(connection, record)
    if record.prev_len != prev_len:
        raise CoordinateError(
            f"{call}: prev_len {record.prev_len} where the parent's cum_len is {prev_len}"
        )
    expected = extend_chain(chain, acknowledgement.token_digest)
    if record.chain_digest != expected:
        raise CoordinateError(
            f"{call}: chain_digest {record.chain_digest} where the parent and the delta give "
            f"{expected}"
        )


def _parent_coordinates(connection: sqlite3.Connection, record: CallRecord) -> tuple[int, str]:
    row = connection.execute(
        "SELECT state, status, capture_order, cum_len, chain_digest FROM calls "
        "WHERE call_id = ? AND attempt_id = ?",
        (record.parent_call_id, record.attempt_id),
    ).fetchone()
    what = f"call {record.call_id}: parent_call_id {record.parent_call_id}"
    if row is None:
        raise CoordinateError(f"{what} is no call of this attempt")
    state, status, order, cum_len, chain = row
    if state != CaptureState.COMMITTED:
        raise CoordinateError(f"{what} has state {state}; only committed calls are parents")
    if status == CompletionStatus.FAILED:
        raise CoordinateError(f"{what} has status failed; it cannot be a parent")
    if order >= record.order:
        raise CoordinateError(f"{what} was admitted later")
    return cum_len, chain


def record_failure(
    connection: sqlite3.Connection, attempt_id: str, call_id: str, reason: Reason, detail: str
) -> bool:
    """Record why an admitted call failed; False where the ledger has a failure of it already.

    Raises `AttemptError` and `CoordinateError`.
    """
    updated = connection.execute(
        "UPDATE calls SET state = CASE state WHEN 'intent' THEN 'failed' ELSE state END, "
        "failure_reason = ?, failure_detail = ? "
        "WHERE call_id = ? AND attempt_id = ? AND failure_reason IS NULL",
        (reason, detail[:_DETAIL_LIMIT], call_id, attempt_id),
    ).rowcount
    if updated:
        return True
    attempt = read_attempt(connection, attempt_id)
    known = connection.execute(
        "SELECT 1 FROM calls WHERE call_id = ? AND attempt_id = ?", (call_id, attempt_id)
    ).fetchone()
    if known is None:
        if attempt.state == "deleted":
            raise closed_error(attempt)
        raise CoordinateError(f"call {call_id}: no intent of this attempt")
    return False


def pending_calls(connection: sqlite3.Connection, attempt_id: str) -> int:
    """Admitted calls of the attempt that are neither committed nor failed."""
    row = connection.execute(
        "SELECT count(*) FROM calls WHERE attempt_id = ? AND state = 'intent'", (attempt_id,)
    ).fetchone()
    return int(row[0])


def committed_since(
    connection: sqlite3.Connection, attempt_id: str, version: int
) -> list[CallRecord]:
    """Records committed after the attempt's `version`, in commit order."""
    rows = connection.execute(
        "SELECT record FROM calls WHERE attempt_id = ? AND version > ? ORDER BY version",
        (attempt_id, version),
    )
    return [RECORD_DECODER.decode(record) for (record,) in rows]


def read_receipt(connection: sqlite3.Connection, attempt_id: str, *, store: str) -> Receipt:
    """Everything the attempt left behind. Raises `AttemptError`."""
    attempt = read_attempt(connection, attempt_id)
    if attempt.state == "deleted":
        raise closed_error(attempt)
    calls: list[CallRecord] = []
    failures: list[FailureRecord] = []
    pending: list[str] = []
    for call_id, order, state, record, reason, detail in connection.execute(
        "SELECT call_id, capture_order, state, record, failure_reason, failure_detail "
        "FROM calls WHERE attempt_id = ? ORDER BY capture_order",
        (attempt_id,),
    ):
        if state == CaptureState.COMMITTED:
            calls.append(RECORD_DECODER.decode(record))
        elif state == CaptureState.INTENT:
            pending.append(call_id)
        if reason is not None:
            failures.append(
                FailureRecord(
                    call_id=call_id,
                    order=order,
                    reason=reason,
                    detail=detail,
                    had_committed_capture=state == CaptureState.COMMITTED,
                )
            )
    return Receipt(
        store=store,
        partition=attempt.partition,
        attempt_id=attempt_id,
        rollout_id=attempt.rollout_id,
        group_id=attempt.group_id,
        closed=attempt.state == "closed",
        calls=tuple(calls),
        failures=tuple(failures),
        pending=tuple(pending),
        metadata=msgspec.json.decode(attempt.metadata),
    )
