"""The transaction that moves captured calls into a fresh attempt.

Guarantees: every delta has exactly one owning call before and after, so nothing has to be copied
and no shard goes while a call refers to it; only committed calls move, each with its parent; the
old attempt is a tombstone that names its successor, and keeps its pending and failed calls.
"""

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from forest_schema import CallRecord, Reason, TensorRef

from vllm_forest_renderer.errors import AttemptError, ForestError
from vllm_forest_renderer.ledger.attempts import (
    ENCODER,
    RECORD_DECODER,
    add_garbage,
    closed_error,
    new_attempt_id,
    read_attempt,
)


class Restoration(NamedTuple):
    """What a restoration did."""

    attempt_id: str
    """The attempt that goes on."""
    left: tuple[TensorRef, ...]
    """Deltas of committed calls that did not go on: garbage from here on."""


def restore_attempt(
    connection: sqlite3.Connection, attempt_id: str, call_ids: Sequence[str] | None
) -> Restoration | None:
    """Move the committed calls `call_ids` (None: all), each with its order, into a fresh attempt.

    None where a closing has begun: it must end first, since it swaps references. Raises
    `AttemptError` for a tombstone, `ForestError` (`malformed_request`) for a call that is not
    committed here or whose parent stays behind.
    """
    attempt = read_attempt(connection, attempt_id)
    if attempt.successor is not None:
        raise AttemptError(
            Reason.ATTEMPT_CLOSED,
            f"attempt: it was restored already, as {attempt.successor}; use that one",
            param="attempt",
        )
    if attempt.state == "deleted":
        raise closed_error(attempt)
    if attempt.state in ("closing", "sealing"):
        return None
    rows = connection.execute(
        "SELECT record FROM calls WHERE attempt_id = ? AND state = 'committed' ORDER BY version",
        (attempt_id,),
    )
    committed = {
        record.call_id: record for record in (RECORD_DECODER.decode(data) for (data,) in rows)
    }
    kept = _kept(committed, call_ids)
    left = tuple(record.delta for call_id, record in committed.items() if call_id not in kept)
    successor = new_attempt_id()
    connection.execute(
        "INSERT INTO attempts "
        "(attempt_id, rollout_id, group_id, partition, metadata, next_order, version) "
        "SELECT ?, rollout_id, group_id, partition, metadata, next_order, ? "
        "FROM attempts WHERE attempt_id = ?",
        (successor, len(kept), attempt_id),
    )
    # In commit order: the attempt's version counts its commits.
    moved = (record for call_id, record in committed.items() if call_id in kept)
    for version, record in enumerate(moved, 1):
        restored = msgspec.structs.replace(
            record,
            attempt_id=successor,
            capture_key=successor,
            source_capture_key=record.source_capture_key or record.capture_key,
        )
        connection.execute(
            "UPDATE calls SET attempt_id = ?, version = ?, record = ? WHERE call_id = ?",
            (successor, version, ENCODER.encode(restored), record.call_id),
        )
    add_garbage(connection, left)
    connection.execute(
        "DELETE FROM calls WHERE attempt_id = ? AND state = 'committed'", (attempt_id,)
    )
    connection.execute(
        "UPDATE attempts SET state = 'deleted', metadata = '{}', successor = ? "
        "WHERE attempt_id = ?",
        (successor, attempt_id),
    )
    return Restoration(successor, left)


def _kept(committed: dict[str, CallRecord], call_ids: Sequence[str] | None) -> set[str]:
    if call_ids is None:
        return set(committed)
    kept = set(call_ids)
    for call_id in call_ids:
        record = committed.get(call_id)
        if record is None:
            raise ForestError(
                Reason.MALFORMED_REQUEST,
                f"calls: {call_id} is no committed call of this attempt; leave it out",
                param="calls",
            )
        if record.parent_call_id is not None and record.parent_call_id not in kept:
            raise ForestError(
                Reason.MALFORMED_REQUEST,
                f"calls: the parent {record.parent_call_id} of {call_id} is missing; name it too",
                param="calls",
            )
    return kept
