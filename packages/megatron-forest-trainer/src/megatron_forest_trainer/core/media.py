"""Captured images: what a call must prove of them, and what a row carries.

Guarantees: a descriptor's offsets are used only after it was authenticated; every embedding of an
image has its own placeholder token among the new prompt tokens of the call that added the image,
and no placeholder token of a prompt is without one; sizes in pixels, patches and tensor rows agree.
Whatever does not fit raises `forest_schema.media.MediaError`. Pixels are not looked at.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from forest_schema import CallRecord, MediaOccurrence
from forest_schema.media import (
    MEDIA,
    MediaError,
    authenticate,
    occurrence_tensors,
    tensor_name,
)
from numpy.typing import NDArray

PIXELS = "pixel_values"
"""Tensor of an image's patches, one flattened patch per line."""
GRID = "image_grid_thw"
"""Tensor with the patches of an image in time, height and width."""


@dataclass(frozen=True, slots=True)
class RowMedia:
    """Images of a row in path order; they differ in size, so each keeps its own arrays."""

    occurrences: tuple[MediaOccurrence, ...]
    """Offsets are positions in the row."""
    tensors: tuple[Mapping[str, NDArray[Any]], ...]
    """The processor's outputs of each occurrence by name, as they are stored."""


def row_media(
    calls: Sequence[tuple[Sequence[MediaOccurrence], Mapping[str, NDArray[Any]]]],
) -> RowMedia | None:
    """The images of a path, from each call's (descriptors, delta); None without images.

    Raises `MediaError` where a delta lacks what a descriptor names.
    """
    found = [
        (occurrence, occurrence_tensors(occurrence, delta))
        for occurrences, delta in calls
        for occurrence in occurrences
    ]
    if not found:
        return None
    occurrences, tensors = zip(*found, strict=True)
    return RowMedia(occurrences, tensors)


def check_call_media(
    record: CallRecord,
    tokens: NDArray[np.int32],
    delta: Mapping[str, NDArray[Any]],
    placeholders: Collection[int],
) -> None:
    """Prove the descriptors of `record` against its own commitment, tokens and tensors.

    `tokens` `[delta_len]` are the call's own; `placeholders` are the ids that stand for an
    embedding anywhere in the rollout. Raises `MediaError`, naming what does not fit.
    """
    authenticate(record.media, record.media_digest)
    if bool(record.media) != (MEDIA in record.required_features):
        raise MediaError(
            f"{len(record.media)} images, but the record's required features are "
            f"{', '.join(record.required_features)}"
        )
    named = {
        tensor_name(occurrence.blob, tensor.name)
        for occurrence in record.media
        for tensor in occurrence.tensors
    }
    stored = {name for name in delta if name.startswith(f"{MEDIA}.")}
    if named != stored:
        raise MediaError(
            f"the descriptors name {len(named)} tensors and the delta holds {len(stored)}; "
            f"only one of them has {', '.join(sorted(named ^ stored))}"
        )
    position = record.prev_len
    for occurrence in record.media:
        if not position <= occurrence.offset <= occurrence.end <= record.prompt_len:
            raise MediaError(
                f"{occurrence.modality} at [{occurrence.offset}, {occurrence.end}) is not inside "
                f"what is left of the new prompt tokens, [{position}, {record.prompt_len})"
            )
        position = occurrence.end
        _check_occurrence(occurrence, occurrence_tensors(occurrence, delta))
    if placeholders:
        _check_placeholders(record, tokens[: record.prompt_delta_len], placeholders)


def embedded_positions(occurrence: MediaOccurrence) -> NDArray[np.int64]:
    """Positions of the served prompt that the occurrence's embeddings take, in their order."""
    spans = [np.arange(start, end) for start, end in occurrence.embed_spans]
    return occurrence.offset + np.concatenate(spans, dtype=np.int64)


def _check_occurrence(occurrence: MediaOccurrence, tensors: Mapping[str, NDArray[Any]]) -> None:
    """One occurrence agrees with itself."""
    if occurrence.modality != "image":
        raise MediaError(f"modality {occurrence.modality!r}; only images are trained on")
    time, rows, columns = occurrence.grid
    if (occurrence.frames, time) != (1, 1):
        raise MediaError(f"an image with {occurrence.frames} frames and a grid of {time} in time")
    if min(rows, columns) < 1 or min(occurrence.height, occurrence.width) < 1:
        raise MediaError(
            f"an image of {occurrence.height} x {occurrence.width} pixels in {rows} x {columns} "
            "patches"
        )
    if occurrence.height * columns != occurrence.width * rows or occurrence.height % rows:
        raise MediaError(
            f"{occurrence.height} x {occurrence.width} pixels are not {rows} x {columns} square "
            "patches"
        )
    bounds = [0, *(bound for span in occurrence.embed_spans for bound in span), occurrence.length]
    if not occurrence.embed_spans or any(start > end for start, end in pairwise(bounds)):
        raise MediaError(
            f"embedding spans {occurrence.embed_spans} are not in order inside "
            f"{occurrence.length} placeholder tokens"
        )
    if any(start == end for start, end in occurrence.embed_spans):
        raise MediaError(f"embedding spans {occurrence.embed_spans} hold an empty one")
    if PIXELS not in tensors or tensors[PIXELS].shape[:1] != (rows * columns,):
        shape = tensors[PIXELS].shape if PIXELS in tensors else "none"
        raise MediaError(f"{PIXELS} is {shape}, the grid has {rows * columns} patches")
    if GRID in tensors and tuple(tensors[GRID].ravel().tolist()) != occurrence.grid:
        raise MediaError(
            f"{GRID} is {tensors[GRID].tolist()}, the descriptor's grid {list(occurrence.grid)}"
        )


def _check_placeholders(
    record: CallRecord, prompt: NDArray[np.int32], placeholders: Collection[int]
) -> None:
    """Placeholder tokens of the new prompt tokens are where the descriptors say, and only there."""
    wanted = np.full(len(prompt), -1, np.int64)
    for occurrence in record.media:
        at = embedded_positions(occurrence) - record.prev_len
        wanted[at] = occurrence.placeholder_token_id
    found = np.where(np.isin(prompt, list(placeholders)), prompt, -1)
    if (wanted != found).any():
        first = int(np.argmax(wanted != found))
        raise MediaError(
            f"token {prompt[first]} at position {record.prev_len + first}, where the descriptors "
            + (f"have placeholder {wanted[first]}" if wanted[first] >= 0 else "have no image")
        )
