"""Versions of everything that crosses between the server and the trainer.

Guarantees: a message or file says its major version and the features a reader must know; a reader
refuses an unknown major version or an unknown required feature by name, and keeps optional fields
that it does not know (msgspec ignores them, files carry them through).
"""

from collections.abc import Iterable

import msgspec

CAPTURE_SCHEMA = 3
"""Major version of capture records, receipts and shards."""

SNAPSHOT_SCHEMA = 5
"""Major version of rollout snapshots and training checkpoints in forest mode."""

NORMALIZATION_VERSION = 1
"""Version of the source-item normalisation in `forest_schema.items`."""

DIGEST_VERSION = 1
"""Version of the digest formats in `forest_schema.digests`."""

REQUIRED_FEATURES = ("replay_summary", "weight_spans")
"""Features that a reader of this package's own records must know."""

OPTIONAL_FEATURES = ("media", "routes")
"""Features that a record or shard requires only where a delta has such tensors: the part of the
tensor's name before the first dot."""

KNOWN_FEATURES = frozenset((*REQUIRED_FEATURES, *OPTIONAL_FEATURES))
"""Features that this package understands when a message lists them as required."""


def features_of(tensors: Iterable[str]) -> tuple[str, ...]:
    """Features that a reader of deltas with tensors of these names must know."""
    kinds = {name.partition(".")[0] for name in tensors}
    return (*REQUIRED_FEATURES, *(name for name in OPTIONAL_FEATURES if name in kinds))


class SchemaError(ValueError):
    """A message or file that this version of the schema cannot read exactly."""


class _Header(msgspec.Struct):
    schema: int
    required_features: tuple[str, ...] = ()


def check_version(
    schema: int,
    required_features: Iterable[str],
    *,
    what: str,
    expected: int = CAPTURE_SCHEMA,
) -> None:
    """Refuse a version or a required feature that this package does not know.

    `what` names the message in the error. Raises `SchemaError`.
    """
    if schema != expected:
        raise SchemaError(
            f"{what}: schema version {schema} is not supported; this forest-schema reads version "
            f"{expected} only. Upgrade vllm-forest-renderer and megatron-forest-trainer together."
        )
    unknown = sorted(set(required_features) - KNOWN_FEATURES)
    if unknown:
        raise SchemaError(
            f"{what}: requires the unknown feature(s) {', '.join(unknown)}; this forest-schema "
            f"knows {', '.join(sorted(KNOWN_FEATURES))}."
        )


def check_message_version(data: bytes, *, what: str, expected: int = CAPTURE_SCHEMA) -> None:
    """`check_version` on an encoded JSON message, before its body is decoded.

    Raises `SchemaError` for a message without a readable version too.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"{what}: no readable schema version: {error}") from error
    check_version(header.schema, header.required_features, what=what, expected=expected)
