"""Digests of a Hugging Face model directory, for the handshake.

Guarantees: the server and the trainer compute the same digests from the same files; weights do not
count, so a directory of newer weights of the same model has equal digests. Fields that say only
who wrote a file (`transformers_version`, `_name_or_path`) do not count either.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from forest_schema.digests import digest_bytes

MODEL_DOMAIN = b"forest/model/v1\0"
TOKENIZER_DOMAIN = b"forest/tokenizer/v1\0"
TEMPLATE_DOMAIN = b"forest/template/v1\0"
PROCESSOR_DOMAIN = b"forest/processor/v1\0"

_WRITER_FIELDS = frozenset({"transformers_version", "_name_or_path"})
_SLOW_TOKENIZER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class ModelDigests(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a model's shape, vocabulary, template and media processing."""

    model: str
    """Of `config.json`."""
    tokenizer: str
    """Of `tokenizer.json`, else of the slow tokenizer's files."""
    template: str
    """Of the chat template's text."""
    processor: str | None
    """Of the processor's configuration; None for a text model."""


def model_digests(
    directory: Path, *, tokenizer: Path | None = None, chat_template: str | None = None
) -> ModelDigests:
    """Digests of the model directory.

    `tokenizer` is the tokenizer's own directory, where there is one; `chat_template` the
    template's text where it replaces the directory's. Raises `FileNotFoundError` naming what a
    model directory must have.
    """
    config = directory / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: not a model directory")
    tokenizer = tokenizer or directory
    template = _template(tokenizer) if chat_template is None else chat_template
    return ModelDigests(
        model=digest_bytes(MODEL_DOMAIN, _canonical(config)),
        tokenizer=digest_bytes(TOKENIZER_DOMAIN, *_tokenizer_parts(tokenizer)),
        template=digest_bytes(TEMPLATE_DOMAIN, template.encode()),
        processor=_processor(directory),
    )


def _tokenizer_parts(directory: Path) -> list[bytes]:
    fast = directory / "tokenizer.json"
    if fast.is_file():
        return [fast.read_bytes()]
    found = [directory / name for name in _SLOW_TOKENIZER_FILES]
    parts = [path.read_bytes() for path in found if path.is_file()]
    if not parts:
        raise FileNotFoundError(
            f"{directory} has neither tokenizer.json nor {', '.join(_SLOW_TOKENIZER_FILES)}"
        )
    return parts


def _template(directory: Path) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    value: Any = None
    if config.is_file():
        value = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def _processor(directory: Path) -> str | None:
    parts = [_canonical(path) for name in _PROCESSOR_FILES if (path := directory / name).is_file()]
    return digest_bytes(PROCESSOR_DOMAIN, *parts) if parts else None


def _canonical(path: Path) -> bytes:
    value = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in _WRITER_FIELDS}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
