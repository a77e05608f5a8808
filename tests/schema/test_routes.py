"""Routes: rows fit the tokens and join without gap, or the record is refused."""

import json

import msgspec
import numpy as np
import pytest
from forest_schema import RouteInfo, decode_call
from forest_schema.routes import ROUTES, route_dtype
from forest_schema.shards import encode_shard
from forest_schema.version import REQUIRED_FEATURES, features_of
from hypothesis import given
from hypothesis import strategies as st

from tests.support.forests import Forest


def info(**changes):
    return RouteInfo(**{"first": 0, "rows": 4, "layers": 2, "top_k": 2, "experts": 8, **changes})


def rows(count=4):
    return {ROUTES: np.zeros((count, 2, 2), dtype=np.uint8)}


def make_record(**changes):
    """A call of three prompt and two generated tokens, without routes."""
    return msgspec.structs.replace(Forest().call(prompt=3, generated=2, call_id="c1"), **changes)


@pytest.mark.requirement("F11", "XR1")
def test_a_call_has_rows_from_its_parents_last_token_to_its_own_last_but_one():
    root = make_record(routes=info())  # five tokens: the last has no row
    child = make_record(parent_call_id="c0", prev_len=5, cum_len=10, routes=info(first=4, rows=5))
    assert child.routes.first == root.routes.end == root.cum_len - 1
    assert decode_call(msgspec.json.encode(child)) == child


@pytest.mark.requirement("XR1")
def test_a_placeholder_for_the_last_token_is_left_out():
    record = make_record(routes=info(rows=5, has_last=True))
    delta = rows(5)
    delta[ROUTES][:] = np.arange(5)[:, None, None] + [0, 1]
    assert record.routes.end == 4
    assert record.routes.read(delta, call_id="c1")[:, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize(
    "routes",
    [info(rows=3), info(rows=5), info(first=1, rows=3), info(rows=4, has_last=True)],
    ids=["too few", "too many", "late", "placeholder short"],
)
def test_rows_that_do_not_fit_the_tokens_are_refused(routes):
    with pytest.raises(ValueError, match=r"call c1: routes of tokens \[\d, \d\) .* \[0, 4\)"):
        make_record(routes=routes)


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": -1}, "are none"),
        ({"rows": -1}, "are none"),
        ({"rows": 0, "has_last": True}, "are none"),
        ({"layers": 0}, "are none"),
        ({"top_k": 9}, "top_k 9 exceeds the 8 experts"),
    ],
)
def test_impossible_descriptions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        info(**changes)


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({}, "are none where"),
        (rows(3), r"uint8\[3, 2, 2\] where the record says uint8\[4, 2, 2\]"),
        ({ROUTES: np.zeros((4, 2, 2), dtype=np.int64)}, "int64"),
        ({ROUTES: np.full((4, 2, 2), 8, dtype=np.uint8)}, "not 2 different experts of 8"),
    ],
    ids=["absent", "short", "wide", "unknown expert"],
)
def test_a_tensor_that_is_not_the_described_one_is_refused(delta, message):
    with pytest.raises(ValueError, match=message):
        info().read(delta, call_id="c1")


@st.composite
def reported(draw):
    """A description, and rows of which some have one place overwritten or are of a dense layer."""
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    described = info(
        first=draw(st.integers(0, 5)),
        rows=draw(st.integers(1, 4)),
        layers=layers,
        top_k=top_k,
        experts=draw(st.integers(top_k, top_k + 4)),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = random.random((described.rows, layers, described.experts))
    routes = scores.argsort()[..., :top_k].astype(np.uint8)
    for _ in range(draw(st.integers(0, 2))):
        place = tuple(draw(st.integers(0, size - 1)) for size in routes.shape)
        routes[place] = draw(st.integers(0, described.experts))
    routes[:, draw(st.lists(st.integers(0, layers - 1), max_size=1))] = 0
    return described, routes


def first_fault(described, routes):
    """(token, layer) of the first row that is no choice of experts; row by row."""
    for index, row in enumerate(routes):
        for layer, experts in enumerate(row.tolist()):
            if len(set(experts)) == len(experts) and max(experts) < described.experts:
                continue
            if routes[:, layer].any():
                return described.first + index, layer + 1
    return None


@pytest.mark.requirement("XR2")
@given(reported())
def test_every_row_names_different_experts_of_the_model(example):
    described, routes = example
    fault = first_fault(described, routes)
    if fault is None:
        assert described.read({ROUTES: routes}, call_id="c1") is not None
        return
    token, layer = fault
    with pytest.raises(ValueError, match=f"^call c1: token {token}, layer {layer}: "):
        described.read({ROUTES: routes}, call_id="c1")


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize(("experts", "expert"), [(256, 255), (257, 256), (65536, 65535)])
def test_the_last_expert_of_a_type_is_one_and_not_two(experts, expert):
    routes = np.array([[[0, expert]], [[expert, 1]]], route_dtype(experts))
    described = info(rows=2, layers=1, experts=experts)
    assert described.read({ROUTES: routes}, call_id="c1").tolist() == routes.tolist()
    routes[1, 0, 1] = expert
    with pytest.raises(ValueError, match=rf"token 1, layer 1: \[{expert}, {expert}\] are not 2"):
        described.read({ROUTES: routes}, call_id="c1")


@pytest.mark.requirement("C3")
@pytest.mark.parametrize(
    ("experts", "dtype"), [(1, "u1"), (256, "u1"), (257, "<u2"), (65536, "<u2")]
)
def test_the_type_is_as_small_as_the_experts_allow(experts, dtype):
    assert route_dtype(experts) == np.dtype(dtype)


def test_more_experts_than_the_type_counts_are_refused():
    with pytest.raises(ValueError, match="65537 experts"):
        route_dtype(65537)


@pytest.mark.requirement("C3", "C20")
def test_only_a_delta_with_routes_requires_them_of_its_reader():
    plain = {"tokens": np.zeros(5, np.int32), "logprobs": np.zeros(2, np.float32)}
    assert features_of(plain) == REQUIRED_FEATURES
    shard = encode_shard({"a": plain, "b": plain | rows()}, store="s", partition="p")
    header = json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])
    features = json.loads(header["__metadata__"]["required_features"])
    assert features == [*REQUIRED_FEATURES, "routes"]
