"""From the images of rows to what a vision tower takes.

Guarantees: every placeholder token of a row's prompts gets one embedding of its own image, in the
layout of its microbatch; patches are normalised as the engine did it, in float32, whatever type
they were captured in. A row that the model cannot see exactly (no pixels for a placeholder token,
another geometry, a model without a tower) raises `IntegrityError`; nothing is cut or filled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from forest_schema import MediaOccurrence, Reason
from forest_schema.media import BFLOAT16, PixelNormalization
from numpy.typing import NDArray

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.media import PIXELS, RowMedia, embedded_positions
from megatron_forest_trainer.core.rope import rope_positions
from megatron_forest_trainer.core.types import Row
from megatron_forest_trainer.data.layout import Layout
from megatron_forest_trainer.model.hf_config import VisionShape


@dataclass(frozen=True, slots=True)
class MediaBatch:
    """The images of one microbatch, and where their embeddings stand on this rank."""

    pixels: torch.Tensor
    """float32 `[p, v]`: normalised patches of all distinct images behind each other."""
    grids: torch.Tensor
    """int64 `[n, 3]`: patches of each of them in time, height and width."""
    target: torch.Tensor
    """int64 `[m]`: positions in the flattened `[b, s]` that embeddings take."""
    source: torch.Tensor
    """int64 `[m]`: the embedding of each, counted over the distinct images in their order."""


def check_images(row: Row, vision: VisionShape | None) -> None:
    """Refuse a row that the model cannot see exactly. Raises `IntegrityError`."""
    occurrences = row.media.occurrences if row.media is not None else ()
    if vision is None:
        if occurrences:
            raise IntegrityError(
                Reason.CONFIGURATION,
                f"row {row.plan.row_id} has {len(occurrences)} images and the model of "
                "policy.model_name reads text only",
            )
        return
    seen_T = np.zeros(len(row.tokens_T), np.bool_)
    for number, occurrence in enumerate(occurrences):
        problem = _misfit(occurrence, row, vision)
        if problem is not None:
            raise IntegrityError(
                Reason.DIGEST_MISMATCH, f"row {row.plan.row_id}, image {number}: {problem}"
            )
        seen_T[occurrence.offset : occurrence.end] = True
    # A model may generate the placeholder's id; it then is an ordinary token.
    for span in row.plan.spans:
        seen_T[span.start : span.end] = True
    blind_N = np.flatnonzero(~seen_T & (row.tokens_T == vision.image_token_id))
    if len(blind_N):
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"row {row.plan.row_id}: {len(blind_N)} image tokens without pixels, the first at "
            f"position {blind_N[0]}",
        )


def _misfit(occurrence: MediaOccurrence, row: Row, vision: VisionShape) -> str | None:
    """What keeps the tower's embeddings of `occurrence` from fitting its place in the row."""
    time, rows, columns = occurrence.grid
    merge = vision.merge_size
    if occurrence.modality != "image" or time != 1 or rows % merge or columns % merge:
        return (
            f"{occurrence.modality} of {occurrence.grid} patches, where the model takes images "
            f"with sides that are multiples of {merge}"
        )
    tokens = rows * columns // merge**2
    if occurrence.embed_spans != ((0, tokens),) or occurrence.length != tokens:
        return (
            f"embeddings at {occurrence.embed_spans} of {occurrence.length} tokens, where its "
            f"grid gives {tokens}"
        )
    found = row.tokens_T[occurrence.offset : occurrence.end]
    if len(found) != tokens or (found != vision.image_token_id).any():
        return (
            f"the tokens at [{occurrence.offset}, {occurrence.end}) are not the model's image "
            f"token {vision.image_token_id}"
        )
    shapes = {tensor.name: tensor.shape for tensor in occurrence.tensors}
    if shapes.get(PIXELS) != (rows * columns, vision.patch_values):
        return (
            f"{PIXELS} is {shapes.get(PIXELS)}, where the model takes "
            f"{(rows * columns, vision.patch_values)}"
        )
    return None


def positions_3T(row: Row, vision: VisionShape) -> NDArray[np.int64]:
    """Rotary positions of a row's tokens in time, height and width."""
    occurrences = row.media.occurrences if row.media is not None else ()
    images = [(occurrence.offset, occurrence.grid) for occurrence in occurrences]
    return rope_positions(len(row.tokens_T), images, vision.merge_size)


PlacedImage = tuple[MediaOccurrence, Mapping[str, NDArray[Any]], NDArray[np.int64]]
"""An image with its tensors, and the positions of its embeddings in the whole microbatch: -1 for
one that has its place from another row."""


def placed_images(rows: Sequence[RowMedia | None], layout: Layout) -> list[PlacedImage]:
    """The images of a microbatch's rows, in row and path order."""
    return [
        (occurrence, tensors, start + embedded_positions(occurrence))
        for start, media in zip(layout.slots[:-1], rows, strict=True)
        if media is not None
        for occurrence, tensors in zip(media.occurrences, media.tensors, strict=True)
    ]


def media_batch(
    images: Sequence[PlacedImage], layout: Layout, device: torch.device | str
) -> MediaBatch | None:
    """A microbatch's images; None where it has none.

    An image that is shown several times runs through the tower once.
    """
    if not images:
        return None
    first: dict[tuple[str, PixelNormalization | None], int] = {}
    pixels, grids, sources = [], [], []
    embeddings = 0
    for occurrence, tensors, positions in images:
        content = (occurrence.blob, occurrence.normalization)
        if content not in first:
            first[content] = embeddings
            embeddings += len(positions)
            pixels.append(normalized_pixels(occurrence, tensors))
            grids.append(occurrence.grid)
        sources.append(first[content] + np.arange(len(positions)))
    place_M = np.concatenate([positions for _, _, positions in images])
    target_M = np.where(place_M < 0, -1, layout.local_index[place_M])
    here_M = target_M >= 0
    return MediaBatch(
        pixels=torch.from_numpy(np.concatenate(pixels)).to(device),
        grids=torch.tensor(grids, dtype=torch.int64, device=device),
        target=torch.from_numpy(target_M[here_M]).to(device),
        source=torch.from_numpy(np.concatenate(sources)[here_M]).to(device),
    )


def normalized_pixels(
    occurrence: MediaOccurrence, tensors: Mapping[str, NDArray[Any]]
) -> NDArray[np.float32]:
    """Patches `[p, v]` as the vision tower takes them.

    `value * rescale_factor / std[channel] - mean[channel] / std[channel]` in float32, in the order
    of operations of vLLM's own normalisation on the device.
    """
    stored = tensors[PIXELS]
    if {tensor.name: tensor.dtype for tensor in occurrence.tensors}[PIXELS] == BFLOAT16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    recorded = occurrence.normalization
    if recorded is None:
        return stored.astype(np.float32)
    mean, std = (np.asarray(values, np.float32) for values in (recorded.mean, recorded.std))
    # torch divides a number by a tensor as a product with the reciprocal.
    weight, bias = np.float32(recorded.rescale_factor) * (np.float32(1) / std), -mean / std
    channels = stored.reshape(len(stored), len(std), -1)
    return (channels * weight[:, None] + bias[:, None]).reshape(stored.shape)
