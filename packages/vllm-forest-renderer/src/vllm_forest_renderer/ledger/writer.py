"""The one thread that writes the ledger.

Guarantees: operations that are submitted while a commit runs share the next transaction; an
operation that raises takes only its own writes back; an operation's result is known only after
the transaction that holds it is durable, and a commit that the disk refuses fails all of them.
An operation that is submitted as `owed` is then repeated in front of every later transaction
until one succeeds.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from vllm_forest_renderer import metrics
from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.group_commit import GroupCommitter, Outcome, Raised

_MAX_BATCH = 256
"""Operations in one transaction."""
_BUSY_SECONDS = 10.0
_BUSY_PAUSE_SECONDS = 0.0005

T = TypeVar("T")

Operation = Callable[[sqlite3.Connection], Any]
"""Runs inside a transaction. What it raises takes its writes back."""


class _Submitted(NamedTuple):
    operation: Operation
    owed: bool


class LedgerWriter:
    """Group commits of operations on one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """`connection` is in autocommit mode and belongs to the writer from here on."""
        self._connection = connection
        self._owed: list[Operation] = []
        self._committer: GroupCommitter[_Submitted] = GroupCommitter(
            self._commit, name="forest-ledger-writer", max_batch=_MAX_BATCH, metrics=metrics.LEDGER
        )

    def submit(
        self, operation: Callable[[sqlite3.Connection], T], *, owed: bool = False
    ) -> "Future[T]":
        """A future that is resolved when the operation is durable.

        Raises `StoreUnavailable` after `stop`.
        """
        return self._committer.submit(_Submitted(operation, owed))

    def stop(self) -> None:
        """Commit what is queued and close the connection."""
        self._committer.stop()
        self._connection.close()

    def _commit(self, batch: Sequence[_Submitted]) -> Sequence[Outcome]:
        try:
            outcomes = self._transact([*self._owed, *(entry.operation for entry in batch)])
        except sqlite3.Error as error:
            self._owed += [entry.operation for entry in batch if entry.owed]
            raise StoreUnavailable(
                f"ledger: {error}; check that its folder is writable and has space, then try again"
            ) from error
        outcomes = outcomes[len(self._owed) :]
        self._owed.clear()
        return outcomes

    def _transact(self, operations: Sequence[Operation]) -> list[Outcome]:
        connection = self._connection
        self._begin()
        try:
            outcomes = [_run(connection, operation) for operation in operations]
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return outcomes

    def _begin(self) -> None:
        """Begin writing, waiting for other processes that do.

        SQLite's own wait backs off to 100 ms, many times the length of a transaction.
        """
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_PAUSE_SECONDS)


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
