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

import abc
import binascii
import decimal
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pybase64
import xxhash

from forest_schema.digests import EMPTY_CHAIN, source_digest
from forest_schema.reasons import Reason
from forest_schema.records import OutputEvidence

_ENCODER = msgspec.json.Encoder()

# The concrete types first: the check of an abstract one is some ten times slower.
_MAPPING = (dict, Mapping)
_SEQUENCE = (list, Sequence)

_REMEMBERED_LENGTH = 1024
"""Longest tool arguments, in characters, whose canonical form is remembered."""

_ITEM_DOMAIN = b"forest/item/v1\0"
_REASONING_DOMAIN = b"forest/reasoning/v1\0"

_MESSAGE_FIELDS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "id"}
)
_BOOKKEEPING_FIELDS = frozenset({"type", "status", "annotations", "phase"})
"""Fields that SDK objects carry and that no template sees."""


class ItemError(ValueError):
    """A request or an output that the normalisation refuses.

    `reason` is a `Reason`; `param` names the field, e.g. `messages[2].content[0]`.
    """

    def __init__(self, reason: Reason, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.reason = reason
        self.param = param


class SourceItem(msgspec.Struct, frozen=True):
    """One normalised item of a history."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    fingerprint: str
    """Content without reasoning; null and empty assistant content are told apart."""
    equivalence_fingerprint: str
    """The same with null and empty assistant content beside tool calls made equal."""
    reasoning_fingerprint: str | None = None
    """Exposed reasoning of an assistant turn; None where there is none."""
    native_ids: tuple[str, ...] = ()
    """Ids that the server gave (tool calls, Responses items), in order."""
    media: tuple[str, ...] = ()
    """Identities of its images, in order."""


@dataclass(frozen=True)
class SourceHistory:
    """A normalised history with its chained digests."""

    items: tuple[SourceItem, ...]
    digests: tuple[str, ...] = field(repr=False)
    """`digests[k]` covers the first k items; `[0]` is `EMPTY_CHAIN`."""
    equivalence_digests: tuple[str, ...] = field(repr=False)
    call_numbers: Mapping[str, int] = field(repr=False, default_factory=dict)
    """Tool-call id -> number of the newest call with this id; calls are numbered from 1."""
    call_count: int = 0

    def media(self, stop: int | None = None) -> tuple[str, ...]:
        """Identities of the images in items `[0, stop)`, in order."""
        return tuple(identity for item in self.items[:stop] for identity in item.media)

    def reasoning(self, start: int, stop: int) -> tuple[tuple[int, str], ...]:
        """(item index, fingerprint) of the reasoning in items `[start, stop)`."""
        return tuple(
            (index, item.reasoning_fingerprint)
            for index, item in enumerate(self.items[start:stop], start)
            if item.reasoning_fingerprint is not None
        )


_EMPTY_HISTORY = SourceHistory((), (EMPTY_CHAIN,), (EMPTY_CHAIN,))


def normalize_chat(messages: Sequence[Mapping[str, Any]]) -> SourceHistory:
    """Source history of a Chat Completions `messages` list. Raises `ItemError`."""
    reader = _ChatReader()
    return _chained(_EMPTY_HISTORY, reader.read(messages), reader)


def normalize_responses(
    request_input: str | Sequence[Mapping[str, Any]], instructions: str | None = None
) -> SourceHistory:
    """Source history of a Responses `input` with its `instructions`. Raises `ItemError`."""
    reader = _ResponsesReader()
    return _chained(_EMPTY_HISTORY, reader.read(request_input, instructions), reader)


def extend(
    history: SourceHistory, output: Sequence[Mapping[str, Any]], *, api: str
) -> SourceHistory:
    """`history` with the generated turn `output` behind it, as the next request would show it.

    `api` is `chat` (`output` holds one assistant message) or `responses` (`output` holds the
    response's items). Only the new items are read.
    """
    reader = _reader(api)
    reader.numbers.update(history.call_numbers)
    reader.count = history.call_count
    return _chained(history, reader.read(output), reader)


def _chained(
    history: SourceHistory, items: Sequence[SourceItem], reader: "_Reader"
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
    items = _reader(api).read(output)
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


def normalize_arguments(arguments: Any) -> tuple[Any, ...]:
    """Canonical form of a tool call's arguments: `("json", value)` or `("text", text)`.

    Equal exactly when the JSON values are equal: `1`, `1.0`, `true` and `"1"` are four values.
    None (absent) equals `"{}"`. Text that is not JSON, or that has a repeated key, is compared as
    exact text.
    """
    if arguments is None:
        return ("json", ("o",))
    if isinstance(arguments, str):
        if len(arguments) <= _REMEMBERED_LENGTH:
            return _remembered_text(arguments)
        return _text_arguments(arguments)
    return ("json", _canonical_value(arguments))


def _text_arguments(text: str) -> tuple[Any, ...]:
    try:
        return ("json", _canonical_value(_ARGUMENTS.decode(text)))
    except (ValueError, ArithmeticError, RecursionError):
        return ("text", text)


# Every request repeats the calls of its whole history.
_remembered_text = functools.lru_cache(maxsize=8192)(_text_arguments)


class _Number(str):
    """Text of a JSON number with a fraction or an exponent."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("repeated key")
    return value


_ARGUMENTS = json.JSONDecoder(
    parse_float=_Number, parse_constant=_refuse_constant, object_pairs_hook=_unique_pairs
)


def _canonical_value(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ("n",)
    if isinstance(value, bool):
        return ("b", value)
    if isinstance(value, int):
        return ("i", str(value))
    if isinstance(value, _Number | float):
        text = str(value) if isinstance(value, _Number) else repr(value)
        sign, digits, exponent = decimal.Decimal(text).as_tuple()
        kept = "".join(map(str, digits)).lstrip("0")
        stripped = kept.rstrip("0")
        if not isinstance(exponent, int):
            return ("f", text)
        return (
            "f",
            f"{'-' if sign else ''}{stripped or '0'}e"
            f"{exponent + len(kept) - len(stripped) if stripped else 0}",
        )
    if isinstance(value, str):
        return ("s", value)
    if isinstance(value, list | tuple):
        return ("a", *map(_canonical_value, value))
    if isinstance(value, _MAPPING):
        return ("o", *((key, _canonical_value(value[key])) for key in sorted(value)))
    raise ValueError(f"{type(value).__name__} is not a JSON value")


def _fingerprint(domain: bytes, value: Any) -> str:
    try:
        encoded = _ENCODER.encode(value)
    except UnicodeEncodeError:
        encoded = json.dumps(value).encode()
    return xxhash.xxh3_128_hexdigest(domain + encoded)


def _reasoning_fingerprint(text: str | None) -> str | None:
    return _fingerprint(_REASONING_DOMAIN, text) if text else None


def image_identity(url: str, uuid: str | None = None) -> str:
    """Identity of an image: sha256 of a data URL's decoded bytes, else the uuid or the URL."""
    if url.startswith("data:"):
        head, _, payload = url.partition(",")
        if head.endswith(";base64"):
            try:
                data = pybase64.b64decode(payload, validate=True)
            except binascii.Error as error:
                raise ValueError(f"not base64: {error}") from error
        else:
            data = payload.encode()
        return "sha256:" + hashlib.sha256(data).hexdigest()
    return f"uuid:{uuid}" if uuid else f"url:{url}"


def _content(content: Any, param: str) -> Any:
    """Canonical content: None, a string, or a list of parts; one text part is its string."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, _SEQUENCE):
        raise ItemError(Reason.MALFORMED_REQUEST, param, "must be null, a string or a list")
    parts = [_part(part, f"{param}[{i}]") for i, part in enumerate(content)]
    if len(parts) == 1 and parts[0][0] == "text":
        return parts[0][1]
    return parts


def _part(part: Any, param: str) -> list[Any]:
    if isinstance(part, str):
        return ["text", part]
    if not isinstance(part, _MAPPING):
        raise ItemError(Reason.MALFORMED_REQUEST, param, "must be a content part")
    kind = part.get("type")
    try:
        if kind in ("text", "input_text", "output_text"):
            return ["text", _string(part, "text", param)]
        if kind == "refusal":
            return ["refusal", _string(part, "refusal", param)]
        if kind == "image_url":
            image = part.get("image_url")
            if isinstance(image, _MAPPING):
                url, detail = _string(image, "url", param), image.get("detail")
            else:
                url, detail = _string(part, "image_url", param), None
            return ["image", image_identity(url, part.get("uuid")), detail or "auto"]
        if kind == "input_image":
            url = _string(part, "image_url", param)
            return ["image", image_identity(url, part.get("uuid")), part.get("detail") or "auto"]
    except ValueError as error:
        if isinstance(error, ItemError):
            raise
        raise ItemError(Reason.MALFORMED_REQUEST, param, str(error)) from error
    raise ItemError(
        Reason.UNSUPPORTED_ITEM,
        f"{param}.type",
        f"content part {kind!r} is not captured; use text or image parts",
    )


def _string(value: Mapping[str, Any], key: str, param: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise ItemError(Reason.MALFORMED_REQUEST, f"{param}.{key}", "must be a string")
    return text


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
        strict_print = loose_print = _fingerprint(_ITEM_DOMAIN, ["assistant", parts, self.extras])
        has_calls = len(parts) > max(1, len(contents))
        if has_calls and any(not content and content is not None for content in contents):
            loose = [
                ["content", None] if part[0] == "content" and not part[1] else part
                for part in parts
            ]
            loose_print = _fingerprint(_ITEM_DOMAIN, ["assistant", loose, self.extras])
        return SourceItem(
            role="assistant",
            fingerprint=strict_print,
            equivalence_fingerprint=loose_print,
            reasoning_fingerprint=_reasoning_fingerprint("\n".join(self.reasoning)),
            native_ids=tuple(self.native_ids),
            media=tuple(identity for content in contents for identity in _media(content)),
        )


def _plain(role: str, value: list[Any], content: Any, native_id: Any = None) -> SourceItem:
    mark = _fingerprint(_ITEM_DOMAIN, [role, value])
    ids = (native_id,) if isinstance(native_id, str) else ()
    return SourceItem(role, mark, mark, native_ids=ids, media=_media(content))


def _media(content: Any) -> tuple[str, ...]:
    """Identities of the images in canonical content."""
    if not isinstance(content, list):
        return ()
    return tuple(part[1] for part in content if part[0] == "image")


def _extras(message: Mapping[str, Any], known: frozenset[str]) -> list[Any]:
    """Unknown non-null fields, so that they are never collapsed."""
    if known.issuperset(message):
        return []
    return [
        [key, _canonical_value(message[key])]
        for key in sorted(message)
        if key not in known and key not in _BOOKKEEPING_FIELDS and message[key] is not None
    ]


class _Reader(abc.ABC):
    """Numbers tool calls by order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.count = 0

    @abc.abstractmethod
    def read(self, source: Any) -> list[SourceItem]:
        """Items of a request's or an output's entries."""

    def number(self, native_id: Any, param: str) -> int:
        if not isinstance(native_id, str):
            raise ItemError(Reason.MALFORMED_REQUEST, param, "must be a string")
        self.count += 1
        # A repeated id names the newest call, as it does for the template.
        self.numbers[native_id] = self.count
        return self.count

    def reference(self, native_id: Any, param: str) -> Any:
        if not isinstance(native_id, str):
            raise ItemError(Reason.MALFORMED_REQUEST, param, "must be a string")
        return self.numbers.get(native_id, f"unpaired:{native_id}")


def _reader(api: str) -> _Reader:
    return _ChatReader() if api == "chat" else _ResponsesReader()


class _ChatReader(_Reader):
    def read(self, source: Any) -> list[SourceItem]:
        if isinstance(source, str) or not isinstance(source, _SEQUENCE):
            raise ItemError(Reason.MALFORMED_REQUEST, "messages", "must be a list")
        return [self._message(m, f"messages[{i}]") for i, m in enumerate(source)]

    def _message(self, message: Mapping[str, Any], param: str) -> SourceItem:
        if not isinstance(message, _MAPPING):
            raise ItemError(Reason.MALFORMED_REQUEST, param, "must be an object")
        role = message.get("role")
        extras = _extras(message, _MESSAGE_FIELDS)
        if role == "assistant":
            return self._assistant(message, extras, param)
        content = _content(message.get("content"), f"{param}.content")
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
        turn.parts.append(["content", _content(message.get("content"), f"{param}.content")])
        for i, call in enumerate(message.get("tool_calls") or ()):
            where = f"{param}.tool_calls[{i}]"
            function = call.get("function") if isinstance(call, _MAPPING) else None
            if not isinstance(function, _MAPPING) or call.get("type", "function") != "function":
                raise ItemError(Reason.UNSUPPORTED_ITEM, where, "must be a function call")
            number = self.number(call.get("id"), f"{where}.id")
            turn.native_ids.append(call["id"])
            turn.parts.append(_call(function, number, where))
        return turn.item()


def _call(function: Mapping[str, Any], number: int, param: str) -> list[Any]:
    name = _string(function, "name", param)
    try:
        arguments = normalize_arguments(function.get("arguments"))
    except ValueError as error:
        raise ItemError(Reason.MALFORMED_REQUEST, f"{param}.arguments", str(error)) from error
    return ["call", number, name, arguments]


class _ResponsesReader(_Reader):
    def read(self, source: Any, instructions: str | None = None) -> list[SourceItem]:
        items: list[SourceItem] = []
        if instructions:
            items.append(_plain("system", [instructions, []], instructions))
        if isinstance(source, str):
            items.append(_plain("user", [source, []], source))
            return items
        if not isinstance(source, _SEQUENCE):
            raise ItemError(Reason.MALFORMED_REQUEST, "input", "must be a string or a list")
        turn: _Turn | None = None
        for i, entry in enumerate(source):
            param = f"input[{i}]"
            if not isinstance(entry, _MAPPING):
                raise ItemError(Reason.MALFORMED_REQUEST, param, "must be an object")
            kind = entry.get("type") or ("message" if "role" in entry else None)
            if kind in ("reasoning", "function_call") or entry.get("role") == "assistant":
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
            turn.parts.append(["content", _content(entry.get("content"), f"{param}.content")])
            turn.extras.extend(_extras(entry, frozenset({"role", "content", "id"})))
        else:
            raise ItemError(
                Reason.UNSUPPORTED_ITEM, f"{param}.type", f"item {kind!r} is not captured"
            )

    def _observation(self, entry: Mapping[str, Any], kind: str | None, param: str) -> SourceItem:
        if kind == "message" and entry.get("role") in ("system", "developer", "user"):
            content = _content(entry.get("content"), f"{param}.content")
            extras = _extras(entry, frozenset({"role", "content", "id"}))
            return _plain(entry["role"], [content, extras], content, entry.get("id"))
        if kind == "function_call_output":
            paired = self.reference(entry.get("call_id"), f"{param}.call_id")
            output = _content(entry.get("output"), f"{param}.output")
            return _plain("tool", [paired, output, []], output)
        raise ItemError(Reason.UNSUPPORTED_ITEM, f"{param}.type", f"item {kind!r} is not captured")


def _reasoning_text(entry: Mapping[str, Any], param: str) -> str:
    for key in ("content", "summary"):
        parts = entry.get(key) or ()
        if parts:
            return "\n".join(
                _string(part, "text", f"{param}.{key}[{i}]") for i, part in enumerate(parts)
            )
    return ""
