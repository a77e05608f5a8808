"""The one thread that writes the ledger.

Guarantees: operations that are submitted while a commit runs share the next transaction; an
operation that raises takes only its own writes back; an operation's result is known only after
the transaction that holds it is durable, and a commit that the disk refuses fails all of them.
"""

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm_forest_renderer import metrics
from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.group_commit import GroupCommitter, Outcome, Raised

_MAX_BATCH = 256
"""Operations in one transaction."""

T = TypeVar("T")

Operation = Callable[[sqlite3.Connection], Any]
"""Runs inside a transaction. What it raises takes its writes back."""


class LedgerWriter:
    """Group commits of operations on one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """`connection` is in autocommit mode and belongs to the writer from here on."""
        self._connection = connection
        self._committer: GroupCommitter[Operation] = GroupCommitter(
            self._commit, name="forest-ledger-writer", max_batch=_MAX_BATCH, metrics=metrics.LEDGER
        )

    def submit(self, operation: Callable[[sqlite3.Connection], T]) -> "Future[T]":
        """A future that is resolved when the operation is durable."""
        return self._committer.submit(operation)

    def stop(self) -> None:
        """Commit what is queued and close the connection."""
        self._committer.stop()
        self._connection.close()

    def _commit(self, batch: Sequence[Operation]) -> Sequence[Outcome]:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                outcomes = [_run(connection, operation) for operation in batch]
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreUnavailable(
                f"ledger: {error}; check that its folder is writable and has space, then try again"
            ) from error
        return outcomes


def _run(connection: sqlite3.Connection, operation: Operation) -> Outcome:
    connection.execute("SAVEPOINT operation")
    try:
        outcome = operation(connection)
    except sqlite3.Error:
        raise
    except Exception as error:
        connection.execute("ROLLBACK TO operation")
        outcome = Raised(error)
    connection.execute("RELEASE operation")
    return outcome
