"""Where the media of a spliced prompt go.

Guarantees: a retained occurrence lies at its captured offset, a new one where the tail has it, in
prompt order across modalities; embedding masks are carried unchanged. Pure.

What vLLM's processor is given for a continuation is one unexpanded placeholder per retained item,
in captured order, followed by the tokens of the tail. So every item is processed and expanded as
ever, and no token of the history, which may contain anything, is searched for placeholders. The
parent's tokens are read before, because they say where the tail begins; they are spliced in, and
retained items compared and moved, after everything was processed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forest_schema.reasons import Reason

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.items import MediaItem
from vllm_forest_renderer.media.retained import Captured


@dataclass(frozen=True, slots=True)
class Placed:
    """A spliced prompt with its media."""

    tail: list[int]
    """Expanded tokens behind the parent's history."""
    placeholders: dict[str, list[Any]]
    """vLLM's ranges by modality, in the coordinates of the spliced prompt."""
    added: list[MediaItem]
    """Items of the tail, in the coordinates of the spliced prompt."""


def place(
    rendered: Sequence[int],
    items: Sequence[MediaItem],
    captured: Sequence[Captured],
    placeholders: Mapping[str, Sequence[Any]],
    history_len: int,
) -> Placed:
    """Move what was processed behind `history_len` captured tokens.

    `rendered` are the expanded stand-ins of `captured` and the tail; `items` lie in them.
    Raises `ForestError` where the stand-ins did not expand to exactly the first items.
    """
    kept = items[: len(captured)]
    cut = sum(item.described.length for item in kept)
    if kept and kept[-1].described.end != cut:
        raise ForestError(
            Reason.UNSUPPORTED_ITEM,
            "messages: the placeholder of an item did not expand to its range alone",
            param="messages",
        )
    shift = history_len - cut
    moved = {modality: list(places) for modality, places in placeholders.items()}
    for item, old in zip(kept, captured, strict=True):
        _move(moved, item, old.occurrence.offset)
    added = [item.moved(shift) for item in items[len(captured) :]]
    for item in added:
        _move(moved, item, item.described.offset)
    return Placed(list(rendered[cut:]), moved, added)


def _move(placeholders: dict[str, list[Any]], item: MediaItem, offset: int) -> None:
    places = placeholders[item.described.modality]
    places[item.index] = dataclasses.replace(places[item.index], offset=offset)
