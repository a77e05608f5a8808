"""Transactions on attempts: open, close, seal, delete.

Guarantees: an attempt's state goes open -> closing -> sealing -> closed -> deleted and never
back, a deleted row stays as a tombstone; at most one living handle seals an attempt; references
to deltas are swapped together with closing, and a reference that falls out of use becomes garbage
in the same transaction, so the store never holds what nobody remembers.
"""

import secrets
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from forest_schema import CallRecord, Reason, TensorRef
from forest_schema.control import OpenAttempt

from vllm_forest_renderer.errors import AttemptError
from vllm_forest_renderer.ledger.owners import owner_lives

ENCODER = msgspec.json.Encoder()
RECORD_DECODER = msgspec.json.Decoder(CallRecord)


class AttemptRow(NamedTuple):
    """State of an attempt."""

    attempt_id: str
    rollout_id: str
    group_id: str
    partition: str
    metadata: bytes
    state: str
    sealer: int | None
    version: int
    successor: str | None
    """The attempt that took over the calls, for a tombstone that was restored."""


class SealPlan(NamedTuple):
    """What is left to do for an attempt that closes."""

    closed: bool
    """Everything is done already; `refs` is empty."""
    resumed: bool
    """An earlier sealing did not finish, and may have left copies in the store."""
    refs: tuple[TensorRef, ...]
    """Deltas of the committed calls in capture order."""


class Deletion(NamedTuple):
    """What a deletion took out of the ledger."""

    partition: str
    resumed: bool
    """A sealing had not finished, and may have left copies in the store."""
    removed: tuple[TensorRef, ...]
    """Deltas of the committed calls, garbage from here on; their keys are the calls."""
    kept_pending: tuple[str, ...]
    """Pending calls, and failed ones without a committed capture."""


def read_attempt(connection: sqlite3.Connection, attempt_id: str) -> AttemptRow:
    """The attempt's row, tombstones included. Raises `AttemptError` (`attempt_unknown`)."""
    row = connection.execute(
        "SELECT attempt_id, rollout_id, group_id, partition, metadata, state, sealer, version, "
        "successor FROM attempts WHERE attempt_id = ?",
        (attempt_id,),
    ).fetchone()
    if row is None:
        raise AttemptError(
            Reason.ATTEMPT_UNKNOWN, "attempt: this server opened no such attempt", param="attempt"
        )
    return AttemptRow(*row)


def closed_error(attempt: AttemptRow) -> AttemptError:
    """The refusal of an attempt that is not open."""
    what = (
        f"it is {attempt.state}; open another one"
        if attempt.successor is None
        # Its id is a right that a client of this attempt need not have.
        else "it was restored into another attempt; use that one"
    )
    return AttemptError(Reason.ATTEMPT_CLOSED, f"attempt: {what}", param="attempt")


def new_attempt_id() -> str:
    """An id that nobody can guess."""
    return f"att_{secrets.token_hex(16)}"


def committed_deltas(connection: sqlite3.Connection, attempt_id: str) -> tuple[TensorRef, ...]:
    """Deltas of the attempt's committed calls in capture order."""
    rows = connection.execute(
        "SELECT record FROM calls WHERE attempt_id = ? AND state = 'committed' "
        "ORDER BY capture_order",
        (attempt_id,),
    )
    return tuple(RECORD_DECODER.decode(record).delta for (record,) in rows)


def open_attempt(connection: sqlite3.Connection, body: OpenAttempt) -> str:
    """A fresh attempt id for the rollout that `body` names."""
    attempt_id = new_attempt_id()
    connection.execute(
        "INSERT INTO attempts (attempt_id, rollout_id, group_id, partition, metadata) "
        "VALUES (?, ?, ?, ?, ?)",
        (
            attempt_id,
            body.rollout_id,
            body.group_id,
            body.partition,
            ENCODER.encode(body.metadata),
        ),
    )
    return attempt_id


def begin_close(connection: sqlite3.Connection, attempt_id: str) -> AttemptRow:
    """Refuse later intents; returns the attempt after that. Raises `AttemptError`."""
    connection.execute(
        "UPDATE attempts SET state = 'closing' WHERE attempt_id = ? AND state = 'open'",
        (attempt_id,),
    )
    attempt = read_attempt(connection, attempt_id)
    if attempt.state == "deleted":
        raise closed_error(attempt)
    return attempt


def begin_seal(connection: sqlite3.Connection, attempt_id: str, *, sealer: int) -> SealPlan | None:
    """Freeze the set of calls and take over the sealing.

    None where another living handle seals the attempt. Raises `AttemptError` for a deleted one.
    """
    attempt = read_attempt(connection, attempt_id)
    if attempt.state == "deleted":
        raise closed_error(attempt)
    if attempt.state == "closed":
        return SealPlan(closed=True, resumed=False, refs=())
    if attempt.sealer not in (None, sealer) and owner_lives(connection, attempt.sealer):
        return None
    connection.execute(
        "UPDATE attempts SET state = 'sealing', sealer = ? WHERE attempt_id = ?",
        (sealer, attempt_id),
    )
    refs = committed_deltas(connection, attempt_id)
    return SealPlan(closed=False, resumed=attempt.state == "sealing", refs=refs)


def release_seal(connection: sqlite3.Connection, attempt_id: str, *, sealer: int) -> None:
    """Give up a sealing that failed: another close may try."""
    connection.execute(
        "UPDATE attempts SET sealer = NULL WHERE attempt_id = ? AND state = 'sealing' "
        "AND sealer = ?",
        (attempt_id, sealer),
    )


def finish_seal(
    connection: sqlite3.Connection,
    attempt_id: str,
    replaced: Sequence[tuple[TensorRef, TensorRef]],
    *,
    sealer: int,
) -> None:
    """Swap every delta's reference and close the attempt. Raises `AttemptError`."""
    attempt = read_attempt(connection, attempt_id)
    if attempt.state != "sealing" or attempt.sealer != sealer:
        raise closed_error(attempt)
    for old, new in replaced:
        if old == new:
            continue
        (record,) = connection.execute(
            "SELECT record FROM calls WHERE call_id = ?", (old.key,)
        ).fetchone()
        sealed = msgspec.structs.replace(RECORD_DECODER.decode(record), delta=new)
        connection.execute(
            "UPDATE calls SET record = ? WHERE call_id = ?", (ENCODER.encode(sealed), old.key)
        )
        add_garbage(connection, [old])
    connection.execute(
        "UPDATE attempts SET state = 'closed', sealer = NULL WHERE attempt_id = ?", (attempt_id,)
    )


def delete_attempt(
    connection: sqlite3.Connection, attempt_id: str, *, deleter: int
) -> Deletion | None:
    """Turn the attempt into a tombstone and its committed deltas into garbage.

    Calls that are pending or failed without a committed capture stay: their writes may still
    arrive. None where another living handle seals the attempt. Raises `AttemptError`.
    """
    attempt = read_attempt(connection, attempt_id)
    if attempt.sealer not in (None, deleter) and owner_lives(connection, attempt.sealer):
        return None
    removed = committed_deltas(connection, attempt_id)
    add_garbage(connection, removed)
    connection.execute(
        "DELETE FROM calls WHERE attempt_id = ? AND state = 'committed'", (attempt_id,)
    )
    kept = connection.execute(
        "SELECT call_id FROM calls WHERE attempt_id = ? ORDER BY capture_order", (attempt_id,)
    ).fetchall()
    connection.execute(
        "UPDATE attempts SET state = 'deleted', sealer = NULL, metadata = '{}' "
        "WHERE attempt_id = ?",
        (attempt_id,),
    )
    return Deletion(
        partition=attempt.partition,
        resumed=attempt.state == "sealing",
        removed=removed,
        kept_pending=tuple(call_id for (call_id,) in kept),
    )


def delete_partition(connection: sqlite3.Connection, partition: str) -> int:
    """Turn every attempt of the partition into a tombstone; returns how many calls went."""
    connection.execute(
        "UPDATE attempts SET state = 'deleted', sealer = NULL, metadata = '{}' WHERE partition = ?",
        (partition,),
    )
    connection.execute("DELETE FROM garbage WHERE partition = ?", (partition,))
    return connection.execute(
        "DELETE FROM calls WHERE attempt_id IN "
        "(SELECT attempt_id FROM attempts WHERE partition = ?)",
        (partition,),
    ).rowcount


def add_garbage(connection: sqlite3.Connection, refs: Sequence[TensorRef]) -> None:
    """Note deltas that the store may give up."""
    connection.executemany(
        "INSERT OR IGNORE INTO garbage VALUES (?, ?, ?, ?, ?)",
        [(ref.store, ref.partition, ref.shard, ref.key, ref.digest) for ref in refs],
    )


def read_garbage(connection: sqlite3.Connection) -> tuple[TensorRef, ...]:
    """Deltas that the store may give up."""
    rows = connection.execute("SELECT store, partition, shard, key, digest FROM garbage")
    return tuple(
        TensorRef(store=store, partition=partition, shard=shard, key=key, digest=digest)
        for store, partition, shard, key, digest in rows
    )


def forget_garbage(connection: sqlite3.Connection, refs: Sequence[TensorRef]) -> None:
    """Note that the store gave these deltas up."""
    connection.executemany(
        "DELETE FROM garbage WHERE partition = ? AND shard = ? AND key = ?",
        [(ref.partition, ref.shard, ref.key) for ref in refs],
    )
