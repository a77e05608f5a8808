"""Names that come from clients or become file names.

Guarantees: what passes as a file name is a single path component without a leading dot, so no name
can leave the store directory or collide with the store's own files; a label is short and printable.
"""

import re

from forest_schema import Reason

from vllm_forest_renderer.errors import AttemptError, ForestError

_ATTEMPT = re.compile(r"att_[0-9a-f]{32}")
_PARTITION = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_SHARD = re.compile(r"[A-Za-z0-9_-]{1,128}")
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_LONGEST_LABEL = 256
_RESERVED_PARTITIONS = ("store.json", "ledger.sqlite")


def check_attempt_id(attempt_id: str) -> str:
    """`attempt_id` itself. Raises `AttemptError` (`attempt_unknown`) for another shape."""
    if not _ATTEMPT.fullmatch(attempt_id):
        raise AttemptError(
            Reason.ATTEMPT_UNKNOWN,
            "attempt: not an id that this server made; open an attempt first",
            param="attempt",
        )
    return attempt_id


def check_label(label: str, param: str) -> str:
    """`label` itself, a name that is recorded and shown. Raises `ForestError`
    (`malformed_request`).
    """
    if not 0 < len(label) <= _LONGEST_LABEL or not label.isprintable():
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            f"{param}: use 1 to {_LONGEST_LABEL} printable characters",
            param=param,
        )
    return label


def check_partition(partition: str) -> str:
    """`partition` itself. Raises `ForestError` (`malformed_request`)."""
    if not _PARTITION.fullmatch(partition) or partition.startswith(_RESERVED_PARTITIONS):
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            "partition: use 1 to 128 letters, digits, dots, dashes and underscores, not starting "
            f"with a dot nor with {' or '.join(_RESERVED_PARTITIONS)}",
            param="partition",
        )
    return partition


def check_shard(shard: str) -> str:
    """`shard` itself. Raises `ForestError` (`malformed_request`)."""
    if not _SHARD.fullmatch(shard):
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            "shard: use 1 to 128 letters, digits, dashes and underscores",
            param="shard",
        )
    return shard


def check_key(key: str) -> str:
    """`key` itself. Raises `ForestError` (`malformed_request`)."""
    if not _KEY.fullmatch(key):
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            "key: use 1 to 128 letters, digits, dashes and underscores",
            param="key",
        )
    return key
