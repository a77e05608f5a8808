"""Media that a continuation inherits: their descriptors, and the check that they are unchanged.

Guarantees: no captured offset is used before its descriptor was authenticated against the record's
commitment; a retained item passes only if every field but its place, every placeholder token and
every byte of its tensors are the captured ones. Pure: tensors come in from outside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from forest_schema.media import MediaError, MediaOccurrence, authenticate
from forest_schema.reasons import Reason
from forest_schema.records import CallRecord
from numpy.typing import NDArray

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.items import MediaItem
from vllm_forest_renderer.media.tensors import same_bytes

_OWN_FIELDS = ("offset", "blob")
"""Fields of a descriptor that say where an item lies and where its tensors are."""


@dataclass(frozen=True, slots=True)
class Captured:
    """An occurrence of an earlier call."""

    record: CallRecord
    occurrence: MediaOccurrence


def captured_media(parent: CallRecord, calls: Sequence[CallRecord]) -> list[Captured]:
    """Occurrences in the history of `parent`, in prompt order, authenticated.

    `calls` hold its ancestors. Raises `ForestError` (`missing_parent_evidence`).
    """
    by_id = {record.call_id: record for record in calls}
    chain = [parent]
    while (ancestor := chain[-1].parent_call_id) is not None:
        if ancestor not in by_id:
            raise _missing(chain[-1], "its parent is not in the ledger")
        chain.append(by_id[ancestor])
    found = []
    for record in reversed(chain):
        try:
            authenticate(record.media, record.media_digest)
        except MediaError as error:
            raise _missing(record, str(error)) from error
        end = record.prev_len
        for occurrence in record.media:
            if occurrence.offset < end or occurrence.end > record.prompt_len:
                raise _missing(record, "its media lie outside its prompt")
            end = occurrence.end
            found.append(Captured(record, occurrence))
    return found


def check_count(count: int, captured: Sequence[Captured]) -> None:
    """Refuse a request whose inherited messages have `count` media parts where others were
    captured. Raises `ForestError` (`media_mismatch`).
    """
    if count != len(captured):
        raise _mismatch(f"{count} media parts are sent again where {len(captured)} were captured")


def check_retained(
    items: Sequence[MediaItem],
    captured: Sequence[Captured],
    rendered: Sequence[int],
    history: Sequence[int],
    stored: Sequence[Mapping[str, NDArray[Any]]],
) -> None:
    """Compare what is sent again with what was captured, in prompt order.

    `rendered` are the tokens that `items` lie in, `history` the parent's, `stored` the tensors of
    each captured occurrence. Raises `ForestError` (`media_mismatch`) with what differs.
    """
    for number, (item, old, arrays) in enumerate(zip(items, captured, stored, strict=True)):
        found, kept = item.described, old.occurrence
        where = f"{kept.modality} {number + 1} of {len(captured)}"
        for field in found.__struct_fields__:
            now, before = getattr(found, field), getattr(kept, field)
            if field not in _OWN_FIELDS and now != before:
                shown = (
                    "" if field == "identity" else f" ({_shown(now)}, captured {_shown(before)})"
                )
                raise _mismatch(f"{where}: another {field}{shown}")
        if list(rendered[found.offset : found.end]) != list(history[kept.offset : kept.end]):
            raise _mismatch(f"{where}: other placeholder tokens")
        for tensor in kept.tensors:
            if not same_bytes(item.arrays[tensor.name], arrays[tensor.name]):
                raise _mismatch(
                    f"{where}: {tensor.name} has other values; the same URL or uuid stands for "
                    "other content"
                )


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _mismatch(what: str) -> ForestError:
    return ForestError(
        Reason.MEDIA_MISMATCH,
        f"messages: this request continues a captured call, but its media changed: {what}; send "
        "what was captured unchanged, or name the new content differently",
        param="messages",
    )


def _missing(record: CallRecord, what: str) -> ForestError:
    return ForestError(
        Reason.MISSING_PARENT_EVIDENCE,
        f"call {record.call_id} cannot be continued: {what}",
        param="messages",
    )
