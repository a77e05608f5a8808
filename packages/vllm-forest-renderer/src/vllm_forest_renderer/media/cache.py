"""Stored media tensors within reach: hot in memory, read from the store when cold.

Guarantees: what comes out is what was committed (a hot item was committed by this process, a cold
one is verified by its delta's digest); missing or damaged evidence is an error. Equal content is
held once, whichever calls have it. Arrays are shared: callers must not change them.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from forest_schema.media import MediaError, occurrence_tensors
from forest_schema.reasons import Reason
from forest_schema.shards import ShardError
from numpy.typing import NDArray

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.retained import Captured
from vllm_forest_renderer.store.protocol import DeltaSink

Tensors = Mapping[str, NDArray[Any]]


class MediaCache:
    """Least recently used tensors by the digest of their content.

    Bounded by their own bytes; images of one call can be views of one larger batch.
    """

    def __init__(self, sink: DeltaSink, *, capacity_bytes: int) -> None:
        self._sink = sink
        self._capacity = capacity_bytes
        self._held = 0
        self._tensors: OrderedDict[str, Tensors] = OrderedDict()

    def put(self, blob: str, tensors: Tensors) -> None:
        """Keep the tensors of a committed call."""
        if blob in self._tensors:
            self._tensors.move_to_end(blob)
            return
        self._tensors[blob] = tensors
        self._held += _size(tensors)
        while self._held > self._capacity:
            _, dropped = self._tensors.popitem(last=False)
            self._held -= _size(dropped)

    async def tensors(self, captured: Sequence[Captured]) -> list[Tensors]:
        """Tensors of each occurrence. Raises `ForestError` (`missing_parent_evidence`)."""
        found: dict[str, Tensors] = {}
        for old in captured:
            blob = old.occurrence.blob
            if blob in self._tensors:
                found[blob] = self._tensors[blob]
            elif blob not in found:
                found |= await self._stored(old)
        for blob, tensors in found.items():
            self.put(blob, tensors)
        return [found[old.occurrence.blob] for old in captured]

    async def _stored(self, old: Captured) -> dict[str, Tensors]:
        """Tensors of the call's delta, by blob."""
        try:
            delta = await self._sink.get(old.record.delta)
            return {
                occurrence.blob: occurrence_tensors(occurrence, delta)
                for occurrence in old.record.media
            }
        except (ShardError, MediaError) as error:
            raise ForestError(
                Reason.MISSING_PARENT_EVIDENCE,
                f"call {old.record.call_id} cannot be continued: {error}",
                param="messages",
            ) from error


def _size(tensors: Tensors) -> int:
    return sum(array.nbytes for array in tensors.values())
