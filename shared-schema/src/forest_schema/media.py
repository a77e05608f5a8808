"""Images (and later other media) of a captured call: descriptors, commitment, tensor names.

Guarantees: a descriptor says where an occurrence lies in the served prompt, what it is, and which
tensors of the delta hold it; the descriptors of a call are committed to by one digest, checked
(`authenticate`) before any offset is used; a tensor keeps the processor's own dtype. Descriptors
hold no pixels and no tokens but the placeholder's id.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from forest_schema.digests import digest_bytes

MEDIA = "media"
"""First part of a media tensor's name, and the feature that a reader of such a delta must know."""

BFLOAT16 = "bfloat16"
"""`MediaTensor.dtype` of a tensor that numpy cannot name: stored as the uint16 of its bits."""

_DESCRIPTORS_DOMAIN = b"forest/media/v1\0"
_BLOB_DOMAIN = b"forest/media-blob/v1\0"


class MediaError(ValueError):
    """Descriptors that are not the committed ones, or that contradict themselves."""


class PixelNormalization(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's vision tower did to the stored values first, in float32:
    `value * rescale_factor / std[channel] - mean[channel] / std[channel]`.

    The last dimension of a patch is channel-major: `[channels, temporal patch, height, width]`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float


class MediaTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One processor output of an occurrence."""

    name: str
    """The processor's own name, e.g. `pixel_values`, `image_grid_thw`."""
    dtype: str
    """numpy's name of the dtype that the processor gave, or `bfloat16`."""
    shape: tuple[int, ...]


class MediaOccurrence(msgspec.Struct, frozen=True, kw_only=True):
    """One image at one place of the served prompt."""

    modality: str
    """`image`."""
    identity: str
    """Source identity, as in the fingerprints (`items.image_identity`)."""
    offset: int
    """Position of the first placeholder token in the whole served prompt."""
    length: int
    """Placeholder tokens."""
    embed_spans: tuple[tuple[int, int], ...]
    """Ordered `[start, end)`, relative to `offset`, of the tokens that embeddings replace."""
    placeholder_token_id: int
    """Id of every token inside the embed spans."""
    grid: tuple[int, int, int]
    """Patches as (time, height, width), before the tower merges neighbours."""
    height: int
    """Pixels that were cut into patches (after the processor's resizing)."""
    width: int
    frames: int = 1
    """Frames of a video; 1 for an image."""
    blob: str
    """`blob_digest` of the tensors; occurrences of one delta with one content share it."""
    tensors: tuple[MediaTensor, ...]
    """Tensors of the delta under `tensor_name(blob, tensor.name)`, sorted by name."""
    normalization: PixelNormalization | None = None
    """None: the pixel tensor is what the vision tower takes."""

    @property
    def end(self) -> int:
        """Position behind the last placeholder token."""
        return self.offset + self.length

    @property
    def embed_count(self) -> int:
        """Embeddings that the vision tower gives for this occurrence."""
        return sum(end - start for start, end in self.embed_spans)


def tensor_name(blob: str, name: str) -> str:
    """Name of a media tensor inside its delta."""
    return f"{MEDIA}.{blob}.{name}"


def occurrence_tensors(
    occurrence: MediaOccurrence, delta: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The occurrence's tensors out of its delta, by the processor's names.

    bfloat16 comes as the uint16 of its bits. Raises `MediaError` where one is missing or has
    another dtype or shape than the descriptor says.
    """
    found = {}
    for tensor in occurrence.tensors:
        array = delta.get(tensor_name(occurrence.blob, tensor.name))
        if array is None:
            raise MediaError(f"{occurrence.modality} {occurrence.blob}: no tensor {tensor.name}")
        stored = np.dtype("uint16") if tensor.dtype == BFLOAT16 else np.dtype(tensor.dtype)
        if array.dtype != stored or array.shape != tensor.shape:
            raise MediaError(
                f"{occurrence.modality} {occurrence.blob}: {tensor.name} is "
                f"{array.dtype}{list(array.shape)}, its descriptor says "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        found[tensor.name] = array
    return found


def blob_digest(tensors: Sequence[MediaTensor], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Digest of an item's processor outputs: names, dtypes, shapes and little-endian bytes.

    `arrays` holds each tensor as it is stored, by the processor's name. Identifies content and
    detects damage; no protection against an adversary.
    """
    parts: list[Any] = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        array = np.ascontiguousarray(arrays[tensor.name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        parts.append(f"{tensor.name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}".encode())
        parts.append(memoryview(array.reshape(-1)).cast("B") if array.size else b"")  # type: ignore[arg-type]
    return digest_bytes(_BLOB_DOMAIN, *parts)


def media_digest(occurrences: Sequence[MediaOccurrence]) -> str:
    """Commitment over a call's descriptors, in their order: canonical JSON of every field."""
    return digest_bytes(_DESCRIPTORS_DOMAIN, msgspec.json.encode(occurrences, order="sorted"))


def authenticate(occurrences: Sequence[MediaOccurrence], committed: str | None) -> None:
    """Raise `MediaError` unless `occurrences` are what `committed` (None: no media) commits to."""
    found = media_digest(occurrences) if occurrences else None
    if found != committed:
        raise MediaError(f"media descriptors have the digest {found}, committed was {committed}")
