"""Delta store in safetensors shards on a file system.

Guarantees: `put` returns after the shard that holds the delta is flushed together with its
folder; puts of one partition that overlap share a shard; reads are memory-mapped and verified by
digest; a shard's file goes when every delta in it was deleted. Several processes of one host may
use one directory: each writes its own shards, any of them reads and deletes all.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from forest_schema import CAPTURE_SCHEMA, Reason, TensorRef
from forest_schema.digests import delta_digest, token_digest
from forest_schema.shards import LOGPROBS, TOKENS, Delta, ShardError, shard_parts
from forest_schema.version import REQUIRED_FEATURES, check_message_version

from vllm_forest_renderer import metrics
from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.group_commit import GroupCommitter, Outcome, Raised
from vllm_forest_renderer.names import check_key, check_partition, check_shard
from vllm_forest_renderer.process import ProcessIdentity
from vllm_forest_renderer.store.files import (
    create_once,
    make_folder,
    new_shard_name,
    refusing,
    remove_folder,
    remove_leftovers,
    shard_file,
    write_shard,
)
from vllm_forest_renderer.store.protocol import Acknowledgement
from vllm_forest_renderer.store.shard_index import ShardIndex

_MAX_BATCH = 64
"""Deltas in one group-committed shard."""
_RECENT = 4096
"""Acknowledgements kept in memory until their call is committed."""

T = TypeVar("T")


class _StoreHeader(msgspec.Struct, kw_only=True):
    """Content of `store.json`."""

    schema: int
    required_features: tuple[str, ...]
    store: str


class _Put(NamedTuple):
    partition: str
    key: str
    delta: Delta


class SafetensorsSink:
    """`DeltaSink` over `<directory>/<partition>/<shard>.safetensors`."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        """Open or create the store in the directory `location`.

        Raises `StoreUnavailable` where it cannot be written, `SchemaError` for a store of another
        schema version.
        """
        self._root = Path(location).resolve()
        self._owner = ProcessIdentity.current()
        with refusing("store directory"):
            make_folder(self._root)
            self._store_id = _open_header(self._root, self._owner)
            remove_leftovers(self._root)
        self._index = ShardIndex(self._root)
        self._recent: dict[TensorRef, Acknowledgement] = {}
        self._writer: GroupCommitter[_Put] = GroupCommitter(
            self._commit, name="forest-store-writer", max_batch=_MAX_BATCH, metrics=metrics.STORE
        )
        # Reads and seals never wait behind deletions, which nobody waits for.
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="forest-store-read")
        self._sealers = ThreadPoolExecutor(2, thread_name_prefix="forest-store-seal")
        self._removers = ThreadPoolExecutor(1, thread_name_prefix="forest-store-remove")

    @property
    def store_id(self) -> str:
        """Id of this store, from `store.json`."""
        return self._store_id

    @property
    def directory(self) -> Path:
        """The store's directory."""
        return self._root

    async def prepare(self, partition: str) -> None:
        """Create the partition's folder durably."""
        await self._run(self._readers, make_folder, self._folder(partition))

    async def put(self, partition: str, key: str, delta: Delta) -> TensorRef:
        """Store `delta`: int32 `tokens` `[delta_len]`, float32 `logprobs` `[generated_len]`, more.

        Raises `ValueError` where one of these two is missing or has another type or shape.
        """
        check_partition(partition)
        check_key(key)
        _check_delta(key, delta)
        acknowledgement: Acknowledgement = await asyncio.wrap_future(
            self._writer.submit(_Put(partition, key, delta))
        )
        return acknowledgement.ref

    async def get(self, ref: TensorRef) -> Delta:
        """Read-only views into the mapped shard."""
        return await self._run(self._readers, self._index.read, ref)

    async def acknowledgement(self, ref: TensorRef) -> Acknowledgement:
        """From memory for a recent `put`, else from the verified shard."""
        recent = self._recent.get(ref)
        if recent is not None:
            return recent
        return await self._run(self._readers, self._acknowledge, ref)

    async def list(self, partition: str) -> tuple[TensorRef, ...]:
        """From the headers of the partition's shards."""
        return await self._run(self._readers, self._index.list, check_partition(partition))

    async def seal(self, partition: str, refs: Sequence[TensorRef]) -> tuple[TensorRef, ...]:
        """Copy the deltas into one shard of their own, unless they have one."""
        return await self._run(self._sealers, self._seal, check_partition(partition), tuple(refs))

    async def delete(self, refs: Sequence[TensorRef]) -> int:
        """Drop deltas; a shard without any left is removed."""
        return await self._run(self._removers, self._index.delete, tuple(refs))

    async def drop_partition(self, partition: str) -> int:
        """Remove the partition's folder."""
        removed = await self._run(self._removers, remove_folder, self._folder(partition))
        self._index.forget_partition(partition)
        return removed

    async def shutdown(self) -> None:
        """Write what was submitted, then stop the threads."""
        await asyncio.to_thread(self._stop)

    def shard_path(self, partition: str, shard: str) -> Path | None:
        """File of a finished shard; None where there is none."""
        path = shard_file(self._folder(partition), check_shard(shard))
        return path if path.is_file() else None

    def _folder(self, partition: str) -> Path:
        return self._root / check_partition(partition)

    def _stop(self) -> None:
        self._writer.stop()
        for pool in (self._readers, self._sealers, self._removers):
            pool.shutdown()

    async def _run(
        self, pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object
    ) -> T:
        try:
            future = pool.submit(function, *arguments)
        except RuntimeError as error:
            raise StoreUnavailable("the delta store is shut down") from error
        with refusing("delta store"):
            return await asyncio.wrap_future(future)

    def _commit(self, batch: Sequence[_Put]) -> Sequence[Outcome]:
        outcomes: dict[int, Outcome] = {}
        partitions: dict[str, list[tuple[int, _Put]]] = {}
        for position, put in enumerate(batch):
            partitions.setdefault(put.partition, []).append((position, put))
        for partition, members in partitions.items():
            outcomes.update(self._commit_partition(partition, members))
        return [outcomes[position] for position in range(len(batch))]

    def _commit_partition(
        self, partition: str, members: Sequence[tuple[int, _Put]]
    ) -> dict[int, Outcome]:
        # The same key twice in one batch (a repeated put) needs two shards.
        again: list[tuple[int, _Put]] = []
        deltas: dict[str, Delta] = {}
        positions: dict[int, str] = {}
        for position, put in members:
            if put.key in deltas:
                again.append((position, put))
            else:
                deltas[put.key] = put.delta
                positions[position] = put.key
        outcomes: dict[int, Outcome]
        try:
            with refusing(f"partition {partition}"):
                stored = self._write(partition, deltas, kind="put")
        except StoreUnavailable as error:
            outcomes = dict.fromkeys(positions, Raised(error))
        else:
            self._remember(stored.values())
            outcomes = {position: stored[key] for position, key in positions.items()}
        if again:
            outcomes.update(self._commit_partition(partition, again))
        return outcomes

    def _write(
        self, partition: str, deltas: dict[str, Delta], *, kind: str
    ) -> dict[str, Acknowledgement]:
        """One durable shard of `deltas`. Raises `OSError`."""
        shard = new_shard_name(self._owner)
        digests = {key: delta_digest(delta) for key, delta in deltas.items()}
        parts = shard_parts(deltas, store=self._store_id, partition=partition, digests=digests)
        write_shard(self._folder(partition), shard, parts)
        metrics.STORE_BYTES.labels(kind).inc(sum(map(len, parts)))
        stored = {}
        for key, delta in deltas.items():
            ref = TensorRef(
                store=self._store_id,
                partition=partition,
                shard=shard,
                key=key,
                digest=digests[key],
            )
            stored[key] = _acknowledgement(ref, delta)
        return stored

    def _remember(self, acknowledgements: Iterable[Acknowledgement]) -> None:
        for acknowledgement in acknowledgements:
            if len(self._recent) >= _RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[acknowledgement.ref] = acknowledgement

    def _acknowledge(self, ref: TensorRef) -> Acknowledgement:
        return _acknowledgement(ref, self._index.read(ref))

    def _seal(self, partition: str, refs: tuple[TensorRef, ...]) -> tuple[TensorRef, ...]:
        shards = {ref.shard for ref in refs}
        if not refs or (
            len(shards) == 1
            and self._index.keys(partition, refs[0].shard) == {ref.key for ref in refs}
        ):
            return refs
        deltas = {ref.key: self._index.read(ref) for ref in refs}
        stored = self._write(partition, deltas, kind="seal")
        return tuple(stored[ref.key].ref for ref in refs)


def _acknowledgement(ref: TensorRef, delta: Delta) -> Acknowledgement:
    return Acknowledgement(
        ref=ref,
        delta_len=len(delta[TOKENS]),
        generated_len=len(delta[LOGPROBS]),
        token_digest=token_digest(delta[TOKENS]),
    )


def _check_delta(key: str, delta: Delta) -> None:
    for name, dtype in ((TOKENS, np.int32), (LOGPROBS, np.float32)):
        array = delta.get(name)
        if array is None or array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"delta {key}: {name} must be a one-dimensional {dtype.__name__}")
    if len(delta[LOGPROBS]) > len(delta[TOKENS]):
        raise ValueError(
            f"delta {key}: {len(delta[LOGPROBS])} log-probabilities for {len(delta[TOKENS])} tokens"
        )


def _open_header(root: Path, owner: ProcessIdentity) -> str:
    """The store's id; `store.json` is created where it is missing."""
    path = root / "store.json"
    if not path.exists():
        header = {
            "schema": CAPTURE_SCHEMA,
            "required_features": REQUIRED_FEATURES,
            "store": f"store_{secrets.token_hex(8)}",
        }
        create_once(path, json.dumps(header).encode(), owner)
    data = path.read_bytes()
    check_message_version(data, what=f"store {root}")
    try:
        return msgspec.json.decode(data, type=_StoreHeader).store
    except msgspec.MsgspecError as error:
        raise ShardError(Reason.SCHEMA_NOT_KNOWN, f"store {root}: store.json: {error}") from error
