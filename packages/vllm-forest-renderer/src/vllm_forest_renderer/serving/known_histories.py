"""Histories of recent requests, so that the next request is read from where it goes on.

Guarantees: what comes out is what `normalize_chat` or `normalize_responses` gives for the same
entries, and the event loop is handed back after every `_AT_ONCE` that are read. Only a request that
begins with all remembered entries of its attempt, value by value, is read in part. Entries that
hold numbers are never remembered: Python calls `1`, `1.0` and `true` equal.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forest_schema.items import (
    ItemError,
    SourceHistory,
    extend,
    joins,
    normalize_chat,
    normalize_responses,
    pieces,
)

_CAPACITY = 256 << 20
"""Bytes of remembered requests, about."""
_AT_ONCE = 128
"""Entries that are read in one step of the event loop: a millisecond, unless they are long."""
_COMPARED_AT_ONCE = 2048
_ITEM_BYTES = 1024
"""Of a source item and its digests, about."""


class _Known(NamedTuple):
    instructions: str | None
    entries: Sequence[Mapping[str, Any]]
    history: SourceHistory
    size: int
    """Bytes, about."""


class KnownHistories:
    """The newest request's entries of each attempt, least recently used attempts forgotten."""

    def __init__(self, api: str, *, capacity: int = _CAPACITY) -> None:
        """`api` is `chat` or `responses`; `capacity` bounds the bytes that are kept, about."""
        self._api = api
        self._capacity = capacity
        self._held = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def normalize(
        self,
        attempt_id: str,
        entries: Sequence[Mapping[str, Any]],
        instructions: str | None = None,
    ) -> SourceHistory:
        """Source history of a request. Keeps `entries`: nobody may change them afterwards.

        Raises `ItemError`.
        """
        known = self._known.get(attempt_id)
        if known is None or not await self._continues(known, entries, instructions):
            known = _Known(instructions, (), self._whole((), instructions), _size(instructions))
        history, added, size = known.history, entries[len(known.entries) :], known.size
        remember = True
        try:
            for piece in pieces(added, api=self._api, size=_AT_ONCE):
                history = extend(history, piece, api=self._api)
                try:
                    size += sum(map(_size, piece)) + _ITEM_BYTES * len(piece)
                except _HoldsNumber:
                    remember = False
                await asyncio.sleep(0)
        except ItemError:
            self._whole(entries, instructions)  # its refusal names the entry by its place
            raise
        if remember:
            self._remember(attempt_id, _Known(instructions, entries, history, size))
        return history

    async def _continues(
        self, known: _Known, entries: Sequence[Mapping[str, Any]], instructions: str | None
    ) -> bool:
        """Whether a request begins with all of a remembered one, and no turn spans its end."""
        count = len(known.entries)
        if known.instructions != instructions or len(entries) < count:
            return False
        for start in range(0, count, _COMPARED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            stop = min(start + _COMPARED_AT_ONCE, count)
            if entries[start:stop] != known.entries[start:stop]:
                return False
        return len(entries) == count or not joins(entries[count], api=self._api)

    def _whole(
        self, entries: Sequence[Mapping[str, Any]], instructions: str | None
    ) -> SourceHistory:
        if self._api == "chat":
            return normalize_chat(entries)
        return normalize_responses(entries, instructions)

    def _remember(self, attempt_id: str, known: _Known) -> None:
        before = self._known.pop(attempt_id, None)
        self._known[attempt_id] = known
        self._held += known.size - (before.size if before is not None else 0)
        while self._held > self._capacity:
            _, forgotten = self._known.popitem(last=False)
            self._held -= forgotten.size


class _HoldsNumber(Exception):
    """The value, or one inside, may equal a value of another type."""


def _size(value: Any) -> int:
    """Bytes of a decoded JSON value, about. Raises `_HoldsNumber`."""
    kind = type(value)
    if kind is str:
        return 64 + len(value)
    if value is None:
        return 0
    if kind is dict:
        return 232 + sum(map(len, value)) + sum(map(_size, value.values()))
    if kind is list:
        return 56 + sum(map(_size, value))
    raise _HoldsNumber
