"""From the entries of a request or an output to source items, one reader per API.

Guarantees: every entry becomes part of exactly one item, or is refused by name; tool calls are
numbered in order of appearance, and an output refers to its call by that number.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forest_schema.items.canonical import (
    ITEM_DOMAIN,
    MAPPING,
    SEQUENCE,
    ItemError,
    canonical_content,
    canonical_value,
    fingerprint,
    images,
    normalize_arguments,
    reasoning_fingerprint,
    required_string,
)
from forest_schema.items.history import SourceItem
from forest_schema.reasons import Reason

_MESSAGE_FIELDS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "id"}
)
_BOOKKEEPING_FIELDS = frozenset({"type", "status", "annotations", "phase"})
"""Fields that SDK objects carry and that no template sees."""


@dataclass
class _Turn:
    """Parts of an assistant turn while it is being read."""

    parts: list[Any] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    native_ids: list[str] = field(default_factory=list)
    extras: list[Any] = field(default_factory=list)

    def item(self) -> SourceItem:
        parts = self.parts
        contents = [part[1] for part in parts if part[0] == "content"]
        if not contents:
            parts = [["content", None], *parts]
        strict_print = loose_print = fingerprint(ITEM_DOMAIN, ["assistant", parts, self.extras])
        has_calls = len(parts) > max(1, len(contents))
        if has_calls and any(not content and content is not None for content in contents):
            loose = [
                ["content", None] if part[0] == "content" and not part[1] else part
                for part in parts
            ]
            loose_print = fingerprint(ITEM_DOMAIN, ["assistant", loose, self.extras])
        return SourceItem(
            role="assistant",
            fingerprint=strict_print,
            equivalence_fingerprint=loose_print,
            reasoning_fingerprint=reasoning_fingerprint("\n".join(self.reasoning)),
            native_ids=tuple(self.native_ids),
            media=tuple(identity for content in contents for identity in images(content)),
        )


def _plain(role: str, value: list[Any], content: Any, native_id: Any = None) -> SourceItem:
    mark = fingerprint(ITEM_DOMAIN, [role, value])
    ids = (native_id,) if isinstance(native_id, str) else ()
    return SourceItem(role, mark, mark, native_ids=ids, media=images(content))


def _extras(message: Mapping[str, Any], known: frozenset[str]) -> list[Any]:
    """Unknown non-null fields, so that they are never collapsed."""
    if known.issuperset(message):
        return []
    return [
        [key, canonical_value(message[key])]
        for key in sorted(message)
        if key not in known and key not in _BOOKKEEPING_FIELDS and message[key] is not None
    ]


class Reader(abc.ABC):
    """Numbers tool calls by order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.count = 0

    @abc.abstractmethod
    def read(self, source: Any) -> list[SourceItem]:
        """Items of a request's or an output's entries."""

    def number(self, native_id: Any, param: str) -> int:
        """Number of a tool call that appears, from 1. Raises `ItemError`."""
        if not isinstance(native_id, str):
            raise ItemError(Reason.MALFORMED_REQUEST, param, "must be a string")
        self.count += 1
        # A repeated id names the newest call, as it does for the template.
        self.numbers[native_id] = self.count
        return self.count

    def reference(self, native_id: Any, param: str) -> Any:
        """Number of the call that an output belongs to, or its id where there is none."""
        if not isinstance(native_id, str):
            raise ItemError(Reason.MALFORMED_REQUEST, param, "must be a string")
        return self.numbers.get(native_id, f"unpaired:{native_id}")


def reader_of(api: str) -> Reader:
    """A fresh reader for `chat` or `responses`."""
    return ChatReader() if api == "chat" else ResponsesReader()


class ChatReader(Reader):
    """Reads Chat Completions messages."""

    def read(self, source: Any) -> list[SourceItem]:
        """One item per message. Raises `ItemError`."""
        if isinstance(source, str) or not isinstance(source, SEQUENCE):
            raise ItemError(Reason.MALFORMED_REQUEST, "messages", "must be a list")
        return [self._message(m, f"messages[{i}]") for i, m in enumerate(source)]

    def _message(self, message: Mapping[str, Any], param: str) -> SourceItem:
        if not isinstance(message, MAPPING):
            raise ItemError(Reason.MALFORMED_REQUEST, param, "must be an object")
        role = message.get("role")
        extras = _extras(message, _MESSAGE_FIELDS)
        if role == "assistant":
            return self._assistant(message, extras, param)
        content = canonical_content(message.get("content"), f"{param}.content")
        if role in ("system", "developer", "user"):
            return _plain(role, [content, extras], content, message.get("id"))
        if role == "tool":
            paired = self.reference(message.get("tool_call_id"), f"{param}.tool_call_id")
            return _plain("tool", [paired, content, extras], content)
        raise ItemError(
            Reason.UNSUPPORTED_ITEM, f"{param}.role", f"message role {role!r} is not captured"
        )

    def _assistant(self, message: Mapping[str, Any], extras: list[Any], param: str) -> SourceItem:
        turn = _Turn(extras=extras)
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:
            if not isinstance(reasoning, str):
                raise ItemError(Reason.MALFORMED_REQUEST, f"{param}.reasoning", "must be a string")
            turn.reasoning.append(reasoning)
        if isinstance(message.get("id"), str):
            turn.native_ids.append(message["id"])
        turn.parts.append(
            ["content", canonical_content(message.get("content"), f"{param}.content")]
        )
        for i, call in enumerate(message.get("tool_calls") or ()):
            where = f"{param}.tool_calls[{i}]"
            function = call.get("function") if isinstance(call, MAPPING) else None
            if not isinstance(function, MAPPING) or call.get("type", "function") != "function":
                raise ItemError(Reason.UNSUPPORTED_ITEM, where, "must be a function call")
            number = self.number(call.get("id"), f"{where}.id")
            turn.native_ids.append(call["id"])
            turn.parts.append(_call(function, number, where))
        return turn.item()


def _call(function: Mapping[str, Any], number: int, param: str) -> list[Any]:
    name = required_string(function, "name", param)
    try:
        arguments = normalize_arguments(function.get("arguments"))
    except ValueError as error:
        raise ItemError(Reason.MALFORMED_REQUEST, f"{param}.arguments", str(error)) from error
    return ["call", number, name, arguments]


def is_turn_part(entry: Any) -> bool:
    """Whether an entry of a Responses input is part of an assistant turn."""
    return isinstance(entry, MAPPING) and (
        entry.get("type") in ("reasoning", "function_call") or entry.get("role") == "assistant"
    )


class ResponsesReader(Reader):
    """Reads Responses items."""

    def read(self, source: Any, instructions: str | None = None) -> list[SourceItem]:
        """One item per observation and per assistant turn. Raises `ItemError`."""
        items: list[SourceItem] = []
        if instructions:
            items.append(_plain("system", [instructions, []], instructions))
        if isinstance(source, str):
            items.append(_plain("user", [source, []], source))
            return items
        if not isinstance(source, SEQUENCE):
            raise ItemError(Reason.MALFORMED_REQUEST, "input", "must be a string or a list")
        turn: _Turn | None = None
        for i, entry in enumerate(source):
            param = f"input[{i}]"
            if not isinstance(entry, MAPPING):
                raise ItemError(Reason.MALFORMED_REQUEST, param, "must be an object")
            kind = entry.get("type") or ("message" if "role" in entry else None)
            if is_turn_part(entry):
                turn = turn or _Turn()
                self._turn_part(turn, entry, kind, param)
                continue
            if turn is not None:
                items.append(turn.item())
                turn = None
            items.append(self._observation(entry, kind, param))
        if turn is not None:
            items.append(turn.item())
        return items

    def _turn_part(
        self, turn: _Turn, entry: Mapping[str, Any], kind: str | None, param: str
    ) -> None:
        native = entry.get("id")
        if isinstance(native, str):
            turn.native_ids.append(native)
        if kind == "reasoning":
            text = _reasoning_text(entry, param)
            if text:
                turn.reasoning.append(text)
        elif kind == "function_call":
            number = self.number(entry.get("call_id"), f"{param}.call_id")
            turn.native_ids.append(entry["call_id"])
            turn.parts.append(_call(entry, number, param))
        elif kind == "message":
            turn.parts.append(
                ["content", canonical_content(entry.get("content"), f"{param}.content")]
            )
            turn.extras.extend(_extras(entry, frozenset({"role", "content", "id"})))
        else:
            raise ItemError(
                Reason.UNSUPPORTED_ITEM, f"{param}.type", f"item {kind!r} is not captured"
            )

    def _observation(self, entry: Mapping[str, Any], kind: str | None, param: str) -> SourceItem:
        if kind == "message" and entry.get("role") in ("system", "developer", "user"):
            content = canonical_content(entry.get("content"), f"{param}.content")
            extras = _extras(entry, frozenset({"role", "content", "id"}))
            return _plain(entry["role"], [content, extras], content, entry.get("id"))
        if kind == "function_call_output":
            paired = self.reference(entry.get("call_id"), f"{param}.call_id")
            output = canonical_content(entry.get("output"), f"{param}.output")
            return _plain("tool", [paired, output, []], output)
        raise ItemError(Reason.UNSUPPORTED_ITEM, f"{param}.type", f"item {kind!r} is not captured")


def _reasoning_text(entry: Mapping[str, Any], param: str) -> str:
    for key in ("content", "summary"):
        parts = entry.get(key) or ()
        if not isinstance(parts, SEQUENCE) or not all(isinstance(part, MAPPING) for part in parts):
            raise ItemError(Reason.MALFORMED_REQUEST, f"{param}.{key}", "must be a list of objects")
        if parts:
            return "\n".join(
                required_string(part, "text", f"{param}.{key}[{i}]") for i, part in enumerate(parts)
            )
    return ""
