"""Digests of tokens, deltas and source histories.

Guarantees: xxh3_128 over little-endian bytes behind a domain tag, so that equal bytes of two
kinds never share a digest; the hex strings are pinned by golden vectors and change only with
`DIGEST_VERSION`. They detect damage and mix-ups, not an adversary.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

TOKENS_DOMAIN = b"forest/tokens/v1\0"
DELTA_DOMAIN = b"forest/delta/v1\0"
CHAIN_DOMAIN = b"forest/chain/v1\0"
SOURCE_DOMAIN = b"forest/source/v1\0"
OPTIONS_DOMAIN = b"forest/options/v1\0"

_LITTLE = sys.byteorder == "little"

EMPTY_CHAIN = "0" * 32
"""The chain digest in front of a root."""


def digest_bytes(domain: bytes, *parts: bytes) -> str:
    """Hex xxh3_128 of `domain` and the parts, each part preceded by its length (u64 LE)."""
    hasher = xxhash.xxh3_128(domain)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def as_token_array(tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """Token ids as a contiguous little-endian int32 array `[n]`."""
    return np.ascontiguousarray(tokens, dtype="<i4")


def token_digest(tokens: Sequence[int] | NDArray[np.integer]) -> str:
    """Digest of a token sequence `[n]`."""
    return digest_bytes(TOKENS_DOMAIN, memoryview(as_token_array(tokens)).cast("B"))  # type: ignore[arg-type]


def chain_digest(parent_chain: str, delta_tokens: Sequence[int] | NDArray[np.integer]) -> str:
    """Digest of a whole token history, from the parent's chain digest and the new tokens `[n]`.

    `parent_chain` is `EMPTY_CHAIN` for a root. A child's chain therefore commits to every token
    of every ancestor without reading them.
    """
    return extend_chain(parent_chain, token_digest(delta_tokens))


def extend_chain(parent_chain: str, delta_token_digest: str) -> str:
    """`chain_digest` from the `token_digest` of the new tokens."""
    return digest_bytes(
        CHAIN_DOMAIN, parent_chain.encode("ascii"), delta_token_digest.encode("ascii")
    )


def delta_digest(tensors: Mapping[str, NDArray[np.generic]]) -> str:
    """Digest of a delta: each tensor's name, dtype, shape and little-endian bytes, by name."""
    # `digest_bytes` without its copies and lists: this runs for every delta that is read.
    hasher = xxhash.xxh3_128(DELTA_DOMAIN)
    for name in sorted(tensors):
        array = tensors[name]
        shape = ",".join(map(str, array.shape))
        if not (_LITTLE and array.dtype.isnative and array.flags.c_contiguous):
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        label = f"{name}|{array.dtype.kind}{array.dtype.itemsize}|{shape}".encode()
        length, size = len(label).to_bytes(8, "little"), array.nbytes.to_bytes(8, "little")
        hasher.update(b"".join((length, label, size)))
        hasher.update(array.data)
    return hasher.hexdigest()


def source_digest(parent_digest: str, item_fingerprint: str) -> str:
    """Chained digest of a source history, extended by one item. Starts from `EMPTY_CHAIN`."""
    # `digest_bytes` in one piece: this runs once per item of every request.
    parent, item = parent_digest.encode("ascii"), item_fingerprint.encode("ascii")
    return xxhash.xxh3_128_hexdigest(
        b"".join(
            (
                SOURCE_DOMAIN,
                len(parent).to_bytes(8, "little"),
                parent,
                len(item).to_bytes(8, "little"),
                item,
            )
        )
    )


def options_digest(canonical_json: bytes) -> str:
    """Digest of the effective render options, given as canonical JSON."""
    return digest_bytes(OPTIONS_DOMAIN, canonical_json)
