"""Digest formats: pinned by golden vectors, sensitive to everything they cover."""

import numpy as np
import pytest
from forest_schema import digests
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# Golden values: computed once with xxhash 3.5 (XXH3 128-bit, seed 0) over the layouts that
# forest_schema.digests documents. They change only together with DIGEST_VERSION.
GOLDEN_TOKENS = {
    (): "a0cc681164487bc1353acbeb753ec945",
    (1, 2, 3): "43870b918ec78bb7827629a2ce96d62a",
}

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@pytest.mark.requirement("C13")
def test_golden_token_digests():
    assert {ids: digests.token_digest(ids) for ids in GOLDEN_TOKENS} == GOLDEN_TOKENS


@pytest.mark.requirement("C13")
def test_golden_chain_and_delta_digests():
    assert digests.chain_digest(digests.EMPTY_CHAIN, [5, 6]) == "c01276f3252fd49302407de3693dd003"
    delta = {"tokens": np.array([1, 2], np.int32), "logprobs": np.array([-0.5], np.float32)}
    assert digests.delta_digest(delta) == "56b28c8cf4974453c01c50a4ba386d2a"


def test_layout_is_domain_then_length_then_little_endian_int32():
    import xxhash

    raw = b"forest/tokens/v1\0" + (8).to_bytes(8, "little") + b"\x01\0\0\0\xff\0\0\0"
    assert digests.token_digest([1, 255]) == xxhash.xxh3_128_hexdigest(raw)


@given(tokens, tokens)
def test_token_digest_tells_sequences_apart(a, b):
    assert (digests.token_digest(a) == digests.token_digest(b)) == (a == b)


@given(tokens)
def test_token_digest_does_not_depend_on_the_container(ids):
    assert digests.token_digest(ids) == digests.token_digest(np.array(ids, np.int64))


@given(st.lists(tokens, min_size=1, max_size=5))
def test_chain_commits_to_every_ancestor(deltas):
    def chain(parts):
        value = digests.EMPTY_CHAIN
        for part in parts:
            value = digests.chain_digest(value, part)
        return value

    whole = chain(deltas)
    for index in range(len(deltas)):
        changed = list(deltas)
        changed[index] = [*deltas[index], 7]
        assert chain(changed) != whole


@given(hnp.arrays(np.float32, st.integers(0, 8)))
def test_delta_digest_covers_name_dtype_shape_and_bytes(array):
    base = digests.delta_digest({"a": array})
    assert digests.delta_digest({"a": array.copy()}) == base
    assert digests.delta_digest({"b": array}) != base
    assert digests.delta_digest({"a": array[None]}) != base
    assert digests.delta_digest({"a": array.view(np.int32)}) != base
    if array.size:
        flipped = array.copy().view(np.uint8)
        flipped[0] ^= 1
        assert digests.delta_digest({"a": flipped.view(np.float32)}) != base


def test_delta_digest_ignores_the_order_of_names_and_memory_layout():
    a, b = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones(2, np.float32)
    expected = digests.delta_digest({"a": a, "b": b})
    assert digests.delta_digest({"b": b, "a": np.asfortranarray(a)}) == expected
    assert digests.delta_digest({"a": a.astype(">i4"), "b": b}) == expected
