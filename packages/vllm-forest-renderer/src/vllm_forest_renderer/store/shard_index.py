"""Mapped shards of a store directory: read, list, delete by key.

Guarantees: a shard is read only through its verified header, a delta only against its digest; a
shard's file is removed when every delta in it was deleted, by whichever process deletes the last
one. Deleted keys of a shard that still holds others are noted beside it, and a note that a power
cut loses costs space until the partition goes, never data.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from forest_schema import Reason, TensorRef
from forest_schema.shards import SHARD_SUFFIX, Delta, MappedFile, ShardError, ShardReader

from vllm_forest_renderer.names import check_key, check_partition, check_shard
from vllm_forest_renderer.store.files import shard_file

_OPEN_SHARDS = 256
"""Mapped shards kept open."""


class ShardIndex:
    """Shards below `root`, thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[str, str], ShardReader] = OrderedDict()

    def read(self, ref: TensorRef) -> Delta:
        """The delta that `ref` addresses. Raises `ShardError`."""
        return self._reader(ref.partition, ref.shard).read(ref)

    def keys(self, partition: str, shard: str) -> set[str]:
        """Keys of all deltas ever stored in a shard. Raises `ShardError`."""
        return set(self._reader(partition, shard).digests)

    def list(self, partition: str) -> tuple[TensorRef, ...]:
        """References of the deltas in `partition` that are not deleted. Raises `ShardError`."""
        folder = self._root / partition
        refs = []
        names = os.listdir(folder) if folder.is_dir() else []
        for name in sorted(name for name in names if name.endswith(SHARD_SUFFIX)):
            shard = name.removesuffix(SHARD_SUFFIX)
            try:
                reader = self._reader(partition, shard)
            except ShardError:
                if not (folder / name).exists():
                    continue  # deleted since the folder was listed
                raise
            dropped = _read_dropped(_dropped_file(folder, shard))
            refs += [
                TensorRef(
                    store=reader.store, partition=partition, shard=shard, key=key, digest=digest
                )
                for key, digest in reader.digests.items()
                if key not in dropped
            ]
        return tuple(refs)

    def delete(self, refs: Sequence[TensorRef]) -> int:
        """Drop deltas; returns how many shards were removed. Raises `OSError`."""
        shards: dict[tuple[str, str], set[str]] = {}
        for ref in refs:
            place = (check_partition(ref.partition), check_shard(ref.shard))
            shards.setdefault(place, set()).add(check_key(ref.key))
        return sum(self._drop(*place, keys) for place, keys in shards.items())

    def forget_partition(self, partition: str) -> None:
        """Close the mapped shards of a partition that is gone."""
        with self._lock:
            for place in [place for place in self._readers if place[0] == partition]:
                del self._readers[place]

    def _drop(self, partition: str, shard: str, keys: set[str]) -> bool:
        folder = self._root / partition
        try:
            stored = self.keys(partition, shard)
        except ShardError as error:
            if error.reason is Reason.UNREADABLE_SHARD and not shard_file(folder, shard).exists():
                return False
            raise
        note = _dropped_file(folder, shard)
        if not keys >= stored:
            # Appends of several processes do not interleave, and each reads after its own: the
            # last one sees all.
            with note.open("a") as file:
                file.write("".join(f"{key}\n" for key in sorted(keys)))
            keys = keys | _read_dropped(note)
            if not keys >= stored:
                if not shard_file(folder, shard).exists():
                    note.unlink(missing_ok=True)  # another process removed the shard meanwhile
                return False
        with self._lock:
            self._readers.pop((partition, shard), None)
        try:
            shard_file(folder, shard).unlink()
        except FileNotFoundError:
            return False
        finally:
            note.unlink(missing_ok=True)
        return True

    def _reader(self, partition: str, shard: str) -> ShardReader:
        place = (check_partition(partition), check_shard(shard))
        with self._lock:
            reader = self._readers.get(place)
            if reader is not None:
                self._readers.move_to_end(place)
                return reader
        try:
            source = MappedFile(shard_file(self._root / partition, shard))
        except FileNotFoundError as error:
            raise ShardError(
                Reason.UNREADABLE_SHARD, f"partition {partition} holds no shard {shard}"
            ) from error
        reader = ShardReader(source, shard=shard)
        with self._lock:
            self._readers[place] = reader
            while len(self._readers) > _OPEN_SHARDS:
                self._readers.popitem(last=False)
        return reader


def _dropped_file(folder: Path, shard: str) -> Path:
    return folder / f".{shard}.dropped"


def _read_dropped(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except FileNotFoundError:
        return set()
