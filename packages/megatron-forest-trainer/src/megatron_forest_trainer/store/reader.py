"""Opening captured tensors through the addresses of a receipt.

Guarantees: a tensor is handed out only when store, partition, key and digest are the ones that the
receipt names, whatever carries the bytes; anything else raises `ShardError`, never a mask. Arrays
are read-only views of the mapped file, or of the bytes that came over HTTP.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

import httpx
from forest_schema import Reason, TensorRef
from forest_schema.control import CONTROL_PREFIX, CONTROL_TOKEN_HEADER
from forest_schema.shards import (
    SHARD_SUFFIX,
    ByteSource,
    MappedFile,
    ShardError,
    ShardReader,
)
from numpy.typing import NDArray

from megatron_forest_trainer.store.http_source import HttpShard

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_OPEN_SHARDS = 256
"""Shards kept open; the least recently read is let go."""


class StoreReader(Protocol):
    """A store of captured tensors, open for reading."""

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        """The tensors of one delta, verified. Raises `ShardError`."""
        ...

    def close(self) -> None:
        """Let go of files and connections; arrays that were handed out stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _OpenShard:
    """A shard with the deltas that were verified since it was opened.

    A finished shard never changes, so one verification holds as long as it stays open.
    """

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._verified: dict[TensorRef, Mapping[str, NDArray[Any]]] = {}

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        """The tensors that `ref` addresses, verified."""
        found = self._verified.get(ref)
        if found is None:
            found = self._verified[ref] = MappingProxyType(self._reader.read(ref))
        return found


class _ShardCache:
    """Open shards by (partition, shard). Safe to read from several threads."""

    def __init__(self, open_source: Callable[[str, str], ByteSource]) -> None:
        self._open_source = open_source
        self._shards: OrderedDict[tuple[str, str], _OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        """The tensors that `ref` addresses, verified."""
        return self._shard(ref.partition, ref.shard).read(ref)

    def _shard(self, partition: str, shard: str) -> _OpenShard:
        key = (partition, shard)
        with self._lock:
            found = self._shards.get(key)
            if found is not None:
                self._shards.move_to_end(key)
                return found
        for name in key:
            if not _NAME.fullmatch(name):
                raise ShardError(Reason.FOREIGN_SHARD, f"{name!r} is no name of a shard")
        opened = _OpenShard(ShardReader(self._open_source(partition, shard), shard=shard))
        with self._lock:
            self._shards[key] = opened
            while len(self._shards) > _OPEN_SHARDS:
                self._shards.popitem(last=False)
        return opened

    def clear(self) -> None:
        """Let go of every open shard."""
        with self._lock:
            self._shards.clear()


class _Closing:
    """Context manager around `close`."""

    def close(self) -> None:
        """Let go of everything; overridden."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class FolderReader(_Closing):
    """A store on a file system that this process shares: `{root}/{partition}/{shard}`."""

    def __init__(self, root: Path | str) -> None:
        """`root` is the store's folder. Raises `ShardError` where there is none."""
        self._root = Path(root)
        if not self._root.is_dir():
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"the delta store {self._root} is no folder here; set server.store_path to the "
                "store's folder, or to null to read over HTTP",
            )
        self._shards = _ShardCache(self._open)

    def _open(self, partition: str, shard: str) -> ByteSource:
        path = self._root / partition / f"{shard}{SHARD_SUFFIX}"
        try:
            return MappedFile(path)
        except OSError as error:
            raise ShardError(
                Reason.UNREADABLE_SHARD, f"shard {partition}/{shard}: {error.strerror}"
            ) from error

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        """The tensors of one delta, verified. Raises `ShardError`."""
        return self._shards.read(ref)

    def close(self) -> None:
        """Unmap the shards once their arrays are gone."""
        self._shards.clear()


class HttpReader(_Closing):
    """A store behind the server's control routes."""

    def __init__(
        self,
        url: str,
        control_token: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """`url` is the server's root; `api_key` its `--api-key`, None where it has none."""
        self._client = httpx.Client(
            base_url=url.rstrip("/"),
            headers={
                "Authorization": f"Bearer {api_key or control_token}",
                CONTROL_TOKEN_HEADER: control_token,
            },
            timeout=timeout_s,
        )
        self._shards = _ShardCache(self._open)

    def _open(self, partition: str, shard: str) -> ByteSource:
        path = f"{CONTROL_PREFIX}/shards/{partition}/{shard}"
        return HttpShard(self._client, path, shard=f"{partition}/{shard}")

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        """The tensors of one delta, verified. Raises `ShardError`."""
        return self._shards.read(ref)

    def close(self) -> None:
        """Drop cached bytes and close the connections."""
        self._shards.clear()
        self._client.close()


def open_reader(
    *,
    store_path: Path | str | None = None,
    url: str | None = None,
    control_token: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 60.0,
) -> StoreReader:
    """The store in the folder `store_path`, or else behind the server at `url`.

    Raises `ValueError` where neither is given.
    """
    if store_path is not None:
        return FolderReader(store_path)
    if url is None or control_token is None:
        raise ValueError(
            "a store is opened by server.store_path, or by server.url with its control token"
        )
    return HttpReader(url, control_token, api_key=api_key, timeout_s=timeout_s)
