"""Layout of a shard: one safetensors file with the deltas of several calls.

Guarantees: tensor names are `{key}/{name}`; `tokens` is int32 `[delta_len]`, `logprobs` float32
`[generated_len]`, optional features bring tensors of their own; the file's metadata carries the
schema version, the required features, the store, the partition and the digest of every delta; a
delta is handed out only when its digest matches the address it was asked by. A torn, foreign or
damaged file raises `ShardError`, it is never read in part.
"""

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forest_schema.digests import delta_digest
from forest_schema.reasons import Reason
from forest_schema.records import TensorRef
from forest_schema.version import CAPTURE_SCHEMA, check_version, features_of

TOKENS = "tokens"
LOGPROBS = "logprobs"

SHARD_SUFFIX = ".safetensors"

Delta = Mapping[str, NDArray[Any]]
"""Tensors of one call by name."""

_DTYPES = {
    name: np.dtype(code)
    for name, code in (
        ("BOOL", "?"), ("U8", "u1"), ("I8", "i1"), ("U16", "<u2"), ("I16", "<i2"), ("F16", "<f2"),
        ("U32", "<u4"), ("I32", "<i4"), ("F32", "<f4"), ("U64", "<u8"), ("I64", "<i8"),
        ("F64", "<f8"),
    )
}  # fmt: skip

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
"""What a damaged header raises when it is taken apart."""

_MAX_HEADER = 100 << 20


class ShardError(ValueError):
    """A shard or a delta that cannot be trusted. `reason` is a `Reason`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ByteSource(Protocol):
    """Random access to a shard's bytes: a mapped file, or HTTP range reads."""

    def size(self) -> int:
        """Length of the shard in bytes."""
        ...

    def read(self, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes from `offset`."""
        ...


class MappedFile:
    """Read-only memory map of a local shard file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length == 0:
                raise ShardError(Reason.UNREADABLE_SHARD, f"shard {path.name} is empty")
            self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def size(self) -> int:
        """Length of the file in bytes."""
        return len(self._map)

    def read(self, offset: int, length: int) -> memoryview:
        """A view of the mapped bytes."""
        return self._map[offset : offset + length]


def encode_shard(
    deltas: Mapping[str, Delta],
    *,
    store: str,
    partition: str,
    digests: Mapping[str, str] | None = None,
) -> bytes:
    """A shard file's bytes for `deltas` (key -> tensors).

    `digests` are the deltas' digests where the caller knows them; None computes them.
    """
    return b"".join(shard_parts(deltas, store=store, partition=partition, digests=digests))


def shard_parts(
    deltas: Mapping[str, Delta],
    *,
    store: str,
    partition: str,
    digests: Mapping[str, str] | None = None,
) -> list[bytes | memoryview]:
    """`encode_shard` as consecutive parts, the tensors' own memory among them: nothing is copied.

    The arrays must not change while the parts are in use.
    """
    if digests is None:
        digests = {key: delta_digest(delta) for key, delta in deltas.items()}
    metadata = {
        "forest_schema": str(CAPTURE_SCHEMA),
        "required_features": json.dumps(
            features_of(name for delta in deltas.values() for name in delta)
        ),
        "store": store,
        "partition": partition,
        "digests": json.dumps(dict(digests)),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    parts: list[bytes | memoryview] = [b"", b""]
    offset = 0
    tensors = [
        (f"{key}/{name}", np.asarray(array, array.dtype.newbyteorder("<"), order="C"))
        for key, delta in deltas.items()
        for name, array in delta.items()
    ]
    # The widest element types come first, so every tensor is aligned in the mapped file.
    for name, array in sorted(tensors, key=lambda tensor: (-tensor[1].dtype.itemsize, tensor[0])):
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
        if array.nbytes:
            parts.append(memoryview(array.reshape(-1)).cast("B"))  # type: ignore[arg-type]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    parts[:2] = [len(encoded).to_bytes(8, "little"), encoded]
    return parts


class ShardReader:
    """Deltas of one shard, read through a `ByteSource`."""

    def __init__(self, source: ByteSource, *, shard: str) -> None:
        """Parse the header. Raises `ShardError` and `SchemaError`."""
        self._source = source
        self._shard = shard
        try:
            self._data_start, header = self._header()
            metadata = header.pop("__metadata__")
            version = int(metadata["forest_schema"])
            features = json.loads(metadata["required_features"])
            self.store: str = metadata["store"]
            self.partition: str = metadata["partition"]
            self.digests: dict[str, str] = json.loads(metadata["digests"])
        except ShardError:
            raise
        except _MALFORMED as error:
            raise ShardError(
                Reason.UNREADABLE_SHARD, f"shard {shard}: unreadable header: {error!r}"
            ) from error
        check_version(version, features, what=f"shard {shard}")
        if not isinstance(self.digests, dict):
            raise ShardError(Reason.UNREADABLE_SHARD, f"shard {shard}: unreadable digests")
        self._tensors: dict[str, dict[str, Any]] = {}
        for full_name, info in header.items():
            key, _, name = full_name.rpartition("/")
            self._tensors.setdefault(key, {})[name] = info

    def _header(self) -> tuple[int, dict[str, Any]]:
        size = self._source.size()
        if size < 8:
            raise ShardError(Reason.UNREADABLE_SHARD, f"shard {self._shard}: {size} bytes only")
        length = int.from_bytes(self._source.read(0, 8), "little")
        if length > min(_MAX_HEADER, size - 8):
            raise ShardError(Reason.UNREADABLE_SHARD, f"shard {self._shard}: torn header")
        header = json.loads(bytes(self._source.read(8, length)))
        end = max(
            (info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"),
            default=0,
        )
        if 8 + length + end != size:
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"shard {self._shard}: {size} bytes where the header promises {8 + length + end}",
            )
        return 8 + length, header

    def read(self, ref: TensorRef) -> dict[str, NDArray[Any]]:
        """Tensors of the delta that `ref` addresses, as read-only views where the source maps.

        Raises `ShardError`: `foreign_shard` where store, partition or key do not belong here,
        `digest_mismatch` where the bytes are not what was committed.
        """
        if (self.store, self.partition) != (ref.store, ref.partition):
            raise ShardError(
                Reason.FOREIGN_SHARD,
                f"shard {self._shard} belongs to {self.store}/{self.partition}, "
                f"not to {ref.store}/{ref.partition}",
            )
        tensors = self.read_unverified(ref.key)
        found = delta_digest(tensors)
        if found != ref.digest:
            raise ShardError(
                Reason.DIGEST_MISMATCH,
                f"shard {self._shard}, delta {ref.key}: digest {found} where {ref.digest} was "
                "committed",
            )
        return tensors

    def read_unverified(self, key: str) -> dict[str, NDArray[Any]]:
        """Tensors of `key` without comparing their digest."""
        infos = self._tensors.get(key)
        if infos is None:
            raise ShardError(Reason.FOREIGN_SHARD, f"shard {self._shard} holds no delta {key}")
        try:
            return {name: self._tensor(info) for name, info in infos.items()}
        except _MALFORMED as error:
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"shard {self._shard}, delta {key}: unreadable tensor: {error!r}",
            ) from error

    def _tensor(self, info: dict[str, Any]) -> NDArray[Any]:
        start, end = info["data_offsets"]
        data = self._source.read(self._data_start + start, end - start)
        return np.frombuffer(data, dtype=_DTYPES[info["dtype"]]).reshape(info["shape"])
