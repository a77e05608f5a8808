"""What a delta store must do.

Guarantees asked of every implementation: a `TensorRef` is handed out only for a delta that would
survive a power cut; a delta is immutable; what `get` returns has the digest that the reference
names; every method may be repeated with the same arguments after an error without harm. The
methods speak of keys and partitions, never of files, so a remote key-value tensor store fits.

An entry point of the group `vllm_forest_renderer.delta_sinks` is a callable that takes the
configured location (a folder or a URL) and returns a `DeltaSink`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
from forest_schema import TensorRef
from forest_schema.shards import Delta


class Acknowledgement(msgspec.Struct, frozen=True, kw_only=True):
    """What the store holds durably under one reference."""

    ref: TensorRef
    delta_len: int
    """Tokens of the delta."""
    generated_len: int
    """Log-probabilities of the delta: one per generated token."""
    token_digest: str
    """`digests.token_digest` of the delta's tokens."""


class DeltaSink(Protocol):
    """Durable store of deltas, addressed by partition and key.

    All methods raise `StoreUnavailable` where the storage refuses.
    """

    @property
    def store_id(self) -> str:
        """Id of this store, the same after every restart."""
        ...

    async def prepare(self, partition: str) -> None:
        """Make `partition` ready for `put`. Does nothing where it exists."""
        ...

    async def put(self, partition: str, key: str, delta: Delta) -> TensorRef:
        """Store `delta`; it is durable when this returns.

        The arrays must not change until then. Overlapping calls share the cost of a flush.
        Raises `StoreUnavailable` for a partition that was not prepared or was dropped.
        """
        ...

    async def get(self, ref: TensorRef) -> Delta:
        """The delta that `ref` addresses, its digest verified.

        Raises `forest_schema.shards.ShardError` for a delta that is absent, foreign or damaged.
        """
        ...

    async def acknowledgement(self, ref: TensorRef) -> Acknowledgement:
        """Lengths and token digest of what is stored under `ref`.

        Raises `forest_schema.shards.ShardError` as `get` does.
        """
        ...

    async def list(self, partition: str) -> tuple[TensorRef, ...]:
        """References of every delta in `partition` that is neither deleted nor being written."""
        ...

    async def seal(self, partition: str, refs: Sequence[TensorRef]) -> tuple[TensorRef, ...]:
        """Bring deltas that stay together close together, durably.

        Returns the references that replace `refs`, in their order; the old ones stay valid until
        `delete`. A store without such a layout returns `refs`.
        """
        ...

    async def delete(self, refs: Sequence[TensorRef]) -> int:
        """Give up deltas; absent ones are no error.

        Returns how many storage units (shards) became free and were removed.
        """
        ...

    async def drop_partition(self, partition: str) -> int:
        """Remove a partition with everything in it, acknowledged or not.

        Returns how many storage units (shards) were removed; 0 where nothing was there.
        """
        ...

    async def shutdown(self) -> None:
        """Finish what was submitted and release resources."""
        ...


@runtime_checkable
class ShardFiles(Protocol):
    """A delta store whose shards are local files that may be served over HTTP."""

    def shard_path(self, partition: str, shard: str) -> Path | None:
        """File of a finished shard; None where there is none."""
        ...
