"""Who wrote an intent, and what becomes of it when that process is gone.

Guarantees: an intent is lost exactly when the ledger handle that wrote it was shut down or its
process (boot id, pid, start time) no longer runs.
"""

import sqlite3
from collections.abc import Sequence

from forest_schema import Reason

from vllm_forest_renderer.process import ProcessIdentity


def register_owner(connection: sqlite3.Connection, identity: ProcessIdentity) -> int:
    """Id of a new ledger handle of the process `identity`."""
    cursor = connection.execute(
        "INSERT INTO owners (boot_id, pid, start_ticks) VALUES (?, ?, ?)",
        (identity.boot_id, identity.pid, identity.start_ticks),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def end_owner(connection: sqlite3.Connection, owner: int) -> None:
    """Note that a handle was shut down: what it left pending is lost."""
    connection.execute("UPDATE owners SET ended = 1 WHERE id = ?", (owner,))


def owner_lives(connection: sqlite3.Connection, owner: int) -> bool:
    """Whether the handle `owner` may still act."""
    row = connection.execute(
        "SELECT boot_id, pid, start_ticks, ended FROM owners WHERE id = ?", (owner,)
    ).fetchone()
    if row is None or row[3]:
        return False
    return ProcessIdentity(boot_id=row[0], pid=row[1], start_ticks=row[2]).is_alive()


def lost_owners(connection: sqlite3.Connection) -> list[int]:
    """Handles that are gone and left calls pending."""
    owners = connection.execute("SELECT DISTINCT owner FROM calls WHERE state = 'intent'")
    return [owner for (owner,) in owners.fetchall() if not owner_lives(connection, owner)]


def fail_calls(connection: sqlite3.Connection, lost: Sequence[int]) -> int:
    """Record `process_lost` for every pending call of the handles `lost`; returns how many."""
    failed = 0
    for owner in lost:
        failed += connection.execute(
            "UPDATE calls SET state = 'failed', failure_reason = ?, "
            "failure_detail = 'the process that served the call is gone' "
            "WHERE owner = ? AND state = 'intent'",
            (Reason.PROCESS_LOST, owner),
        ).rowcount
    return failed
