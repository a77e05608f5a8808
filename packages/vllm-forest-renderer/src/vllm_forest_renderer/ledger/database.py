"""The ledger's SQLite file: location, schema, durability.

Guarantees: a file opened here lies on a local file system, has exactly this schema version and
the features it needs, and commits with WAL and `synchronous=FULL`, so that a returned commit
survives a power cut. Another version is refused by name, nothing is migrated.
"""

import contextlib
import functools
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from forest_schema import CAPTURE_SCHEMA, SchemaError
from forest_schema.version import REQUIRED_FEATURES, check_version

from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.store.files import fsync_folder

_OPENING_SECONDS = 30.0
"""Longest wait for a process that creates or recovers the file."""
_APPLICATION_ID = 0x464F5253  # "FORS"

_NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre",
    "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3",
    "smbfs", "vboxsf", "wekafs",
})  # fmt: skip

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- Every ledger handle that ever wrote here (`ended` marks an orderly shutdown).
CREATE TABLE owners (
  id INTEGER PRIMARY KEY,
  boot_id TEXT NOT NULL,
  pid INTEGER NOT NULL,
  start_ticks INTEGER NOT NULL,
  ended INTEGER NOT NULL DEFAULT 0
);

-- state: open -> closing -> sealing -> closed -> deleted (a deleted row is a tombstone).
-- successor: the attempt that took over the calls, for a tombstone that was restored.
CREATE TABLE attempts (
  attempt_id TEXT PRIMARY KEY,
  rollout_id TEXT NOT NULL,
  group_id TEXT NOT NULL,
  partition TEXT NOT NULL,
  metadata BLOB NOT NULL,
  state TEXT NOT NULL DEFAULT 'open'
    CHECK (state IN ('open', 'closing', 'sealing', 'closed', 'deleted')),
  sealer INTEGER,
  next_order INTEGER NOT NULL DEFAULT 0,
  version INTEGER NOT NULL DEFAULT 0,
  successor TEXT
) WITHOUT ROWID;
CREATE INDEX attempts_by_partition ON attempts (partition);

-- state: intent -> committed | failed. A failure recorded after the commit sets failure_reason
-- and leaves the state. `version` is the attempt's version after the commit.
CREATE TABLE calls (
  call_id TEXT NOT NULL UNIQUE,
  attempt_id TEXT NOT NULL,
  capture_order INTEGER NOT NULL,
  owner INTEGER NOT NULL,
  api TEXT NOT NULL,
  model TEXT NOT NULL,
  started_at REAL NOT NULL,
  state TEXT NOT NULL DEFAULT 'intent' CHECK (state IN ('intent', 'committed', 'failed')),
  version INTEGER,
  status TEXT,
  cum_len INTEGER,
  chain_digest TEXT,
  record BLOB,
  failure_reason TEXT,
  failure_detail TEXT,
  UNIQUE (attempt_id, capture_order)
);
CREATE INDEX pending_calls ON calls (owner) WHERE state = 'intent';

-- Deltas that no call refers to any more and that the store may still hold.
CREATE TABLE garbage (
  store TEXT NOT NULL,
  partition TEXT NOT NULL,
  shard TEXT NOT NULL,
  key TEXT NOT NULL,
  digest TEXT NOT NULL,
  PRIMARY KEY (partition, shard, key)
) WITHOUT ROWID;
"""


def open_database(path: Path, *, store_id: str) -> sqlite3.Connection:
    """A read-write connection in autocommit mode; the file is created where it is missing.

    It does not wait for other writers: `LedgerWriter` does.
    Raises `StoreUnavailable` for a network file system or a disk that refuses, `SchemaError` for
    a file of another version, kind or store.
    """
    check_local(path.parent)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connect(path, timeout_s=_OPENING_SECONDS)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("PRAGMA schema_version").fetchone() == (0,):
            _create(connection, store_id)
        _check(connection, path, store_id)
        connection.execute("COMMIT")
        connection.execute("PRAGMA busy_timeout = 0")
        fsync_folder(path.parent)
    except (sqlite3.DatabaseError, OSError) as error:
        raise StoreUnavailable(f"ledger {path}: {error}") from error
    return connection


class LedgerReader:
    """A read-only connection to a file that `open_database` accepted, one user at a time."""

    def __init__(self, path: Path) -> None:
        self._connection = _connect(path, timeout_s=_OPENING_SECONDS)
        self._connection.execute("PRAGMA query_only = ON")
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """The ledger as of one commit. Raises `StoreUnavailable` where the disk refuses."""
        with self._lock:
            try:
                self._connection.execute("BEGIN")
                try:
                    yield self._connection
                finally:
                    self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreUnavailable(f"ledger: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()


def check_local(folder: Path) -> None:
    """Refuse a folder on a network file system, naming it. Raises `StoreUnavailable`.

    SQLite's write-ahead log needs memory shared between processes, and a network file system
    does not promise what its flush returns.
    """
    kind = file_system(folder.resolve())
    if kind in _NETWORK_FILE_SYSTEMS or kind == "fuse" or kind.startswith("fuse."):
        raise StoreUnavailable(
            f"ledger folder {folder} is on the network file system {kind}; put the ledger on a "
            "local disk (the shards may stay where they are)"
        )


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that `folder` (absolute, resolved) is on."""
    best, kind = -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, mount_point, mount_type, *_ = line.split(" ")
        point = Path(mount_point.encode().decode("unicode_escape"))
        # The longest mount point wins, and of equals the one mounted last.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), mount_type
    return kind


def _connect(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)


def _create_tables(connection: sqlite3.Connection) -> None:
    # Not `executescript`, which would commit what came before.
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            connection.execute(statement)


def _columns(connection: sqlite3.Connection) -> set[str]:
    """`TABLE.COLUMN` of every column."""
    return {
        f"{table}.{column}"
        for table, column in connection.execute(
            "SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c "
            "WHERE m.type = 'table'"
        )
    }


@functools.cache
def _expected_columns() -> set[str]:
    with contextlib.closing(_connect(Path(":memory:"), timeout_s=0)) as fresh:
        _create_tables(fresh)
        return _columns(fresh)


def _create(connection: sqlite3.Connection, store_id: str) -> None:
    _create_tables(connection)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.executemany(
        "INSERT INTO meta VALUES (?, ?)",
        [
            ("schema", str(CAPTURE_SCHEMA)),
            ("required_features", json.dumps(REQUIRED_FEATURES)),
            ("store", store_id),
        ],
    )


def _check(connection: sqlite3.Connection, path: Path, store_id: str) -> None:
    what = f"ledger {path}"
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    if "meta" not in tables:
        raise SchemaError(f"{what}: not a capture ledger; name another file")
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    try:
        schema = int(meta["schema"])
        features = json.loads(meta["required_features"])
    except (KeyError, ValueError) as error:
        raise SchemaError(f"{what}: no readable schema version: {error!r}") from error
    check_version(schema, features, what=what)
    missing = sorted(set(REQUIRED_FEATURES) - set(features))
    if missing:
        raise SchemaError(
            f"{what}: schema version {schema} without the feature(s) {', '.join(missing)}; "
            "ledgers that persisted ReplayContext.items are not read. Start with an empty store "
            "directory."
        )
    if absent := sorted(_expected_columns() - _columns(connection)):
        raise SchemaError(
            f"{what}: made by a development version, without {', '.join(absent)}. Set state_dir to "
            "an empty directory; what was captured here stays readable in its store by the "
            "version that wrote it."
        )
    if meta.get("store") != store_id:
        raise SchemaError(
            f"{what}: belongs to the store {meta.get('store')}, not to {store_id}; a ledger and "
            "its store directory move together"
        )
