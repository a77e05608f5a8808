"""Canonical values of what messages hold: contents, images, tool arguments, fingerprints.

Guarantees: two values have one canonical form exactly when they say the same to the model; a
content part that is not known is refused, never collapsed.
"""

import binascii
import decimal
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pybase64
import xxhash

from forest_schema.reasons import Reason

_ENCODER = msgspec.json.Encoder()

# The concrete types first: the check of an abstract one is some ten times slower.
MAPPING = (dict, Mapping)
SEQUENCE = (list, Sequence)

_REMEMBERED_LENGTH = 1024
"""Longest tool arguments, in characters, whose canonical form is remembered."""

ITEM_DOMAIN = b"forest/item/v1\0"
_REASONING_DOMAIN = b"forest/reasoning/v1\0"


class ItemError(ValueError):
    """A request or an output that the normalisation refuses.

    `reason` is a `Reason`; `param` names the field, e.g. `messages[2].content[0]`.
    """

    def __init__(self, reason: Reason, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.reason = reason
        self.param = param


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
    return ("json", canonical_value(arguments))


def _text_arguments(text: str) -> tuple[Any, ...]:
    try:
        return ("json", canonical_value(_ARGUMENTS.decode(text)))
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


def canonical_value(value: Any) -> tuple[Any, ...]:
    """A JSON value with its types; an object's keys are sorted. Raises `ValueError`."""
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
        return ("a", *map(canonical_value, value))
    if isinstance(value, MAPPING):
        return ("o", *((key, canonical_value(value[key])) for key in sorted(value)))
    raise ValueError(f"{type(value).__name__} is not a JSON value")


def fingerprint(domain: bytes, value: Any) -> str:
    """xxh3_128 of `value` as JSON behind the domain tag."""
    try:
        encoded = _ENCODER.encode(value)
    except UnicodeEncodeError:
        encoded = json.dumps(value).encode()
    return xxhash.xxh3_128_hexdigest(domain + encoded)


def reasoning_fingerprint(text: str | None) -> str | None:
    """Fingerprint of exposed reasoning; None where there is none."""
    return fingerprint(_REASONING_DOMAIN, text) if text else None


def image_identity(url: str, uuid: str | None = None) -> str:
    """Identity of an image: sha256 of a data URL's decoded bytes, else the uuid or the URL.

    Raises `ValueError` for a data URL that is not base64, which servers do not read.
    """
    if url[:5].lower() == "data:":
        head, _, payload = url.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URL must be data:<type>;base64,<data>")
        try:
            data = pybase64.b64decode(payload, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error
        return "sha256:" + hashlib.sha256(data).hexdigest()
    return f"uuid:{uuid}" if uuid else f"url:{url}"


def canonical_content(content: Any, param: str) -> Any:
    """Canonical content: None, a string, or a list of parts; one text part is its string."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, SEQUENCE):
        raise ItemError(Reason.MALFORMED_REQUEST, param, "must be null, a string or a list")
    parts = [_part(part, f"{param}[{i}]") for i, part in enumerate(content)]
    if len(parts) == 1 and parts[0][0] == "text":
        return parts[0][1]
    return parts


def _part(part: Any, param: str) -> list[Any]:
    if isinstance(part, str):
        return ["text", part]
    if not isinstance(part, MAPPING):
        raise ItemError(Reason.MALFORMED_REQUEST, param, "must be a content part")
    kind = part.get("type")
    try:
        if kind in ("text", "input_text", "output_text"):
            return ["text", required_string(part, "text", param)]
        if kind == "refusal":
            return ["refusal", required_string(part, "refusal", param)]
        if kind == "image_url":
            image = part.get("image_url")
            if isinstance(image, MAPPING):
                url, detail = required_string(image, "url", param), image.get("detail")
            else:
                url, detail = required_string(part, "image_url", param), None
            return ["image", image_identity(url, part.get("uuid")), detail or "auto"]
        if kind == "input_image":
            url = required_string(part, "image_url", param)
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


def required_string(value: Mapping[str, Any], key: str, param: str) -> str:
    """The string under `key`. Raises `ItemError`."""
    text = value.get(key)
    if not isinstance(text, str):
        raise ItemError(Reason.MALFORMED_REQUEST, f"{param}.{key}", "must be a string")
    return text


def images(content: Any) -> tuple[str, ...]:
    """Identities of the images in canonical content."""
    if not isinstance(content, list):
        return ()
    return tuple(part[1] for part in content if part[0] == "image")
