"""Histories of recent Chat requests, so that the next request is read from where it goes on.

Guarantees: what comes out is what `normalize_chat` gives for the same messages. Only a request that
begins with all remembered messages of its attempt, value by value, is read in part. Messages
that hold numbers are never remembered: Python calls `1`, `1.0` and `true` equal.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forest_schema.items import ItemError, SourceHistory, extend, normalize_chat

_CAPACITY = 64 << 20
"""Characters of remembered messages."""


class _Known(NamedTuple):
    messages: Sequence[Mapping[str, Any]]
    history: SourceHistory
    characters: int


class KnownHistories:
    """The newest request's messages of each attempt, least recently used attempts forgotten."""

    def __init__(self, *, capacity: int = _CAPACITY) -> None:
        """`capacity` bounds the characters that are kept."""
        self._capacity = capacity
        self._held = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def normalize(self, attempt_id: str, messages: Sequence[Mapping[str, Any]]) -> SourceHistory:
        """`normalize_chat(messages)`. Keeps `messages`: nobody may change them afterwards.

        Raises `ItemError`.
        """
        known = self._known.pop(attempt_id, None)
        if known is not None:
            self._held -= known.characters
        if known is None or messages[: len(known.messages)] != known.messages:
            history = normalize_chat(messages)
            known = _Known((), history, 0)
        else:
            try:
                history = extend(known.history, messages[len(known.messages) :], api="chat")
            except ItemError:
                history = normalize_chat(messages)  # names the message by its place
        try:
            added = sum(map(_characters, messages[len(known.messages) :]))
        except _HoldsNumber:
            return history
        self._known[attempt_id] = _Known(messages, history, known.characters + added)
        self._held += known.characters + added
        while self._held > self._capacity:
            _, forgotten = self._known.popitem(last=False)
            self._held -= forgotten.characters
        return history


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
