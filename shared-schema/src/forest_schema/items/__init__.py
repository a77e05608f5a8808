"""Normalisation of Chat messages and Responses items into source items (version 1).

Guarantees: two histories get equal fingerprints exactly when they say the same thing to the
model: item order, roles, content parts, image identities, reasoning, tool names and tool-argument
*values* count; tool-call ids (renumbered by order, so that a call and its output stay paired),
key order, white space and escapes inside tool arguments do not. Nothing unknown is collapsed:
unknown item kinds and content parts are refused, unknown message fields enter the fingerprint.

One item is one message, one tool output, or one assistant turn. In Responses inputs consecutive
reasoning, assistant message and function-call items form one turn, as vLLM converts them. Reasoning
is kept beside an item's fingerprint, because a client may send it back or leave it out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forest_schema.digests import source_digest
from forest_schema.items.canonical import ItemError, image_identity, normalize_arguments
from forest_schema.items.history import EMPTY_HISTORY, SourceHistory, SourceItem
from forest_schema.items.readers import (
    ChatReader,
    Reader,
    ResponsesReader,
    is_turn_part,
    reader_of,
)
from forest_schema.reasons import Reason
from forest_schema.records import OutputEvidence

__all__ = [
    "ItemError",
    "SourceHistory",
    "SourceItem",
    "extend",
    "generated_turn",
    "image_identity",
    "joins",
    "normalize_arguments",
    "normalize_chat",
    "normalize_responses",
    "output_evidence",
    "pieces",
]


def normalize_chat(messages: Sequence[Mapping[str, Any]]) -> SourceHistory:
    """Source history of a Chat Completions `messages` list. Raises `ItemError`."""
    reader = ChatReader()
    return _chained(EMPTY_HISTORY, reader.read(messages), reader)


def normalize_responses(
    request_input: str | Sequence[Mapping[str, Any]], instructions: str | None = None
) -> SourceHistory:
    """Source history of a Responses `input` with its `instructions`. Raises `ItemError`."""
    reader = ResponsesReader()
    return _chained(EMPTY_HISTORY, reader.read(request_input, instructions), reader)


def extend(
    history: SourceHistory, output: Sequence[Mapping[str, Any]], *, api: str
) -> SourceHistory:
    """`history` with the entries `output` behind it, as the next request would show them.

    `output` may be a generated turn: one assistant message (`api` is `chat`) or the items of a
    response (`responses`). Only the new entries are read. Raises `ItemError`.
    """
    reader = reader_of(api)
    reader.numbers.update(history.call_numbers)
    reader.count = history.call_count
    return _chained(history, reader.read(output), reader)


def joins(entry: Mapping[str, Any], *, api: str) -> bool:
    """Whether an entry may belong to the same item as the entry before it."""
    return api == "responses" and is_turn_part(entry)


def pieces(
    entries: Sequence[Mapping[str, Any]], *, api: str, size: int
) -> Iterator[Sequence[Mapping[str, Any]]]:
    """`entries` in runs of `size` and what belongs to the last one's turn.

    `extend` by one run after the other gives what `extend` by all of them gives.
    """
    start = 0
    while start < len(entries):
        stop = start + size
        while stop < len(entries) and joins(entries[stop], api=api):
            stop += 1
        yield entries[start:stop]
        start = stop


def _chained(
    history: SourceHistory, items: Sequence[SourceItem], reader: "Reader"
) -> SourceHistory:
    strict, loose = [history.digests[-1]], [history.equivalence_digests[-1]]
    for item in items:
        digest = source_digest(strict[-1], item.fingerprint)
        same = strict[-1] == loose[-1] and item.fingerprint == item.equivalence_fingerprint
        loose.append(digest if same else source_digest(loose[-1], item.equivalence_fingerprint))
        strict.append(digest)
    return SourceHistory(
        (*history.items, *items),
        (*history.digests, *strict[1:]),
        (*history.equivalence_digests, *loose[1:]),
        reader.numbers,
        reader.count,
    )


def generated_turn(output: Sequence[Mapping[str, Any]], *, api: str) -> SourceItem:
    """One generation by itself, as the trainer recognises it in what a harness returns.

    `output` is the one assistant message of a Chat choice, or the items of a Responses response.
    Tool calls are numbered from 1 inside the turn, whatever came before it. Raises `ItemError`
    for anything but one assistant turn.
    """
    items = reader_of(api).read(output)
    if len(items) != 1 or items[0].role != "assistant":
        raise ItemError(Reason.MALFORMED_REQUEST, "output", "must be one assistant turn")
    return items[0]


def output_evidence(
    response_id: str, output: Sequence[Mapping[str, Any]], *, api: str
) -> OutputEvidence:
    """What a call record keeps to recognise its generation by (see `generated_turn`)."""
    turn = generated_turn(output, api=api)
    return OutputEvidence(
        response_id=response_id,
        item_ids=turn.native_ids,
        fingerprint=turn.equivalence_fingerprint,
        reasoning_fingerprint=turn.reasoning_fingerprint,
    )
