"""Histories of recent requests, so that the next request is read from where it goes on.

Guarantees: what comes out is what `normalize_chat` or `normalize_responses` gives for the same
entries, and the event loop is handed back after every `_AT_ONCE` of them. Only a request that
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
    normalize_chat,
    normalize_responses,
    pieces,
)

_CAPACITY = 64 << 20
"""Characters of remembered entries."""
_AT_ONCE = 128
"""Entries that are read in one step of the event loop: about half a millisecond."""


class _Known(NamedTuple):
    instructions: str | None
    entries: Sequence[Mapping[str, Any]]
    history: SourceHistory
    characters: int


class KnownHistories:
    """The newest request's entries of each attempt, least recently used attempts forgotten."""

    def __init__(self, api: str, *, capacity: int = _CAPACITY) -> None:
        """`api` is `chat` or `responses`; `capacity` bounds the characters that are kept."""
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
        if (
            known is None
            or known.instructions != instructions
            or entries[: len(known.entries)] != known.entries
        ):
            known = _Known(instructions, (), self._whole((), instructions), 0)
        history, added = known.history, entries[len(known.entries) :]
        try:
            for piece in pieces(added, api=self._api, size=_AT_ONCE):
                history = extend(history, piece, api=self._api)
                await asyncio.sleep(0)
        except ItemError:
            self._whole(entries, instructions)  # its refusal names the entry by its place
            raise
        try:
            characters = known.characters + sum(map(_characters, added))
        except _HoldsNumber:
            return history
        self._remember(attempt_id, _Known(instructions, entries, history, characters))
        return history

    def _whole(
        self, entries: Sequence[Mapping[str, Any]], instructions: str | None
    ) -> SourceHistory:
        if self._api == "chat":
            return normalize_chat(entries)
        return normalize_responses(entries, instructions)

    def _remember(self, attempt_id: str, known: _Known) -> None:
        before = self._known.pop(attempt_id, None)
        self._known[attempt_id] = known
        self._held += known.characters - (before.characters if before is not None else 0)
        while self._held > self._capacity:
            _, forgotten = self._known.popitem(last=False)
            self._held -= forgotten.characters


class _HoldsNumber(Exception):
    """The value, or one inside, may equal a value of another type."""


def _characters(value: Any) -> int:
    """Characters of all strings in a JSON value, keys aside. Raises `_HoldsNumber`."""
    if isinstance(value, str):
        return len(value)
    if value is None:
        return 0
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    raise _HoldsNumber
