"""Routes along a path: every token has the experts that computed it in this row's context."""

import msgspec
import numpy as np
import pytest
from forest_schema import Reason
from forest_schema.reasons import EFFECTS, Effect
from forest_schema.routes import ROUTES
from forest_schema.version import features_of
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.tree import shared_prefixes
from megatron_forest_trainer.finalize import finalize_rollout

from tests.support.forests import Forest

MIXTURE = (2, 2, 8)


def rows_of(forest, records=None):
    plans = build_rows(records or forest.calls, group_id="g0", rollout_id="r0")
    return [assemble(plan, forest.reader()) for plan in plans]


def slow_routes(forest, row):
    """Token by token: the row of the last call on the path that took the token in."""
    records = {call.call_id: call for call in forest.calls}
    layers, top_k, _ = MIXTURE
    found = np.full((row.plan.length, layers, top_k), -1)
    for position in range(row.plan.length):
        for part in row.plan.path:
            record = records[part.call_id]
            index = position - max(record.prev_len - 1, 0)
            taken_in = index >= 0 and position < record.cum_len - 1
            if record.routes is not None and taken_in:
                found[position] = forest.deltas[record.call_id][ROUTES][index]
    return found


@st.composite
def mixtures(draw):
    """Random forests of a mixture, some of whose calls have no routes."""
    forest = Forest(seed=draw(st.integers(0, 2**32 - 1)), mixture=MIXTURE)
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *forest.calls]))
        forest.call(
            parent,
            prompt=draw(st.integers(1 if parent is None else 0, 4)),
            generated=draw(st.integers(1, 4)),
            routed=draw(st.sampled_from([True, True, True, False])),
        )
    return forest


@pytest.mark.requirement("F11", "XR1")
@given(mixtures())
def test_rows_agree_with_the_token_by_token_oracle(forest):
    for row in rows_of(forest):
        expected = slow_routes(forest, row)
        assert row.plan.unrouted_tokens == (expected[:-1] == -1).all(axis=(1, 2)).sum()
        if row.routes_TLK is None:
            assert (expected == -1).all()
            continue
        assert row.routes_TLK.dtype == np.int32
        np.testing.assert_array_equal(row.routes_TLK, expected)
        assert (row.routes_TLK[-1] == -1).all()


def placeholder_parent():
    """Prompt [1, 2], generated [3] with a placeholder for its route; a child and its route."""
    forest = Forest(mixture=(1, 1, 8))
    first = forest.call(tokens=[1, 2, 3], prompt=2, generated=1, call_id="c1")
    delta = forest.deltas["c1"]
    delta[ROUTES] = np.array([[[4]], [[5]], [[7]]], np.uint8)
    forest.calls[0] = first = msgspec.structs.replace(
        first, routes=msgspec.structs.replace(first.routes, rows=3, has_last=True)
    )
    forest.call(first, tokens=[8, 9], prompt=1, generated=1, call_id="c2")
    forest.deltas["c2"][ROUTES] = np.array([[[6]], [[2]]], np.uint8)
    return forest


@pytest.mark.requirement("XR1")
def test_the_childs_prefill_supplies_the_parents_last_token():
    forest = placeholder_parent()
    reader = Unverified(forest)
    (plan,) = build_rows(forest.calls, group_id="g0", rollout_id="r0")
    assert assemble(plan, reader).routes_TLK[:, 0, 0].tolist() == [4, 5, 6, 2, -1]
    (alone,) = build_rows(forest.calls[:1], group_id="g0", rollout_id="r0")
    assert assemble(alone, reader).routes_TLK[:, 0, 0].tolist() == [4, 5, -1]


@pytest.mark.requirement("F11", "XR1", "E19")
def test_each_branch_brings_its_own_row_of_the_shared_token():
    forest = Forest(mixture=MIXTURE)
    parent = forest.call()
    children = [forest.call(parent) for _ in range(2)]
    last = parent.cum_len - 1
    shared = []
    for row, child in zip(rows_of(forest), children, strict=True):
        assert row.plan.path[-1].call_id == child.call_id
        np.testing.assert_array_equal(row.routes_TLK[last], forest.deltas[child.call_id][ROUTES][0])
        shared.append(row.routes_TLK[:last])
    np.testing.assert_array_equal(*shared)


@pytest.mark.requirement("F11", "H5")
def test_rows_share_a_token_only_where_its_experts_agree():
    forest = Forest(mixture=MIXTURE)
    parent = forest.call(prompt=3, generated=4)
    for _ in range(2):
        forest.call(parent, tokens=[5, 6], prompt=1, generated=1)
    plans = build_rows(forest.calls, group_id="g0", rollout_id="r0")
    shared = {}
    for routed in (False, True):
        found = shared_prefixes(plans, forest.reader(), across_rollouts=True, routed=routed)
        shared[routed] = found.shared
    # Both branches have the same tokens; their own prefills sent the parent's last one elsewhere.
    assert shared == {False: (0, 9), True: (0, parent.cum_len - 1)}


class Unverified:
    """Deltas as they are, without their digests: what a wrong writer would hand out."""

    def __init__(self, forest):
        self.deltas = forest.deltas

    def read(self, ref):
        return self.deltas[ref.key]


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize(
    "damage",
    [
        lambda delta: delta.update(routes=delta[ROUTES][1:]),
        lambda delta: delta.update(routes=np.concatenate([delta[ROUTES], delta[ROUTES][:1]])),
        lambda delta: delta.update(routes=delta[ROUTES][:, :1]),
        lambda delta: delta.pop(ROUTES),
        lambda delta: delta.update(routes=np.full_like(delta[ROUTES], 8)),
    ],
    ids=["short", "long", "layers", "absent", "expert"],
)
def test_rows_that_do_not_fit_stop_the_run(damage):
    forest = Forest(mixture=MIXTURE)
    call = forest.call()
    damage(forest.deltas[call.call_id])
    with pytest.raises(IntegrityError, match=f"call {call.call_id}: "):
        finalize_rollout(forest.receipt(), forest.result(call), Unverified(forest))
    (plan,) = build_rows([call], group_id="g0", rollout_id="r0")
    with pytest.raises(IntegrityError, match=f"call {call.call_id}: "):
        assemble(plan, Unverified(forest))


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize("row", [[3, 3], [1, 8]], ids=["twice", "unknown"])
def test_a_row_that_is_no_choice_of_experts_stops_the_run_before_a_row_exists(row):
    forest = Forest(mixture=MIXTURE)
    parent = forest.call(prompt=3, generated=4)
    child = forest.call(parent)
    forest.deltas[child.call_id][ROUTES][2, 1] = row
    with pytest.raises(IntegrityError) as raised:
        finalize_rollout(forest.receipt(), forest.result(parent, child), Unverified(forest))
    # The child's rows begin at its parent's last token, which is token 6.
    assert str(raised.value) == (
        f"call {child.call_id}: token 8, layer 2: {row} are not 2 different experts of 8"
    )
    assert EFFECTS[raised.value.reason] is Effect.STOP_RUN


@pytest.mark.requirement("XR2")
def test_routes_that_no_record_describes_are_not_left_out():
    forest = Forest(mixture=MIXTURE)
    call = msgspec.structs.replace(forest.call(), routes=None)
    with pytest.raises(IntegrityError, match=f"call {call.call_id}: the delta has routes that"):
        rows_of(forest, [call])


@pytest.mark.requirement("XR2")
def test_routes_of_two_models_do_not_make_a_row():
    forest = Forest(mixture=MIXTURE)
    parent = forest.call()
    forest.mixture = (3, 2, 8)
    forest.call(parent)
    with pytest.raises(IntegrityError, match="routes of several models"):
        rows_of(forest)


@pytest.mark.requirement("XR2", "H5")
def test_rows_of_two_models_do_not_share():
    forest = Forest(mixture=MIXTURE)
    forest.call()
    forest.mixture = (3, 2, 8)
    forest.call()
    plans = build_rows(forest.calls, group_id="g0", rollout_id="r0")
    with pytest.raises(IntegrityError, match="rows with routes of several models"):
        shared_prefixes(plans, forest.reader(), across_rollouts=True, routed=True)
    assert len(shared_prefixes(plans, forest.reader(), across_rollouts=True).row_ids) == 2


@pytest.mark.requirement("F11", "F13")
def test_a_call_without_routes_masks_its_rollout_where_routes_are_required():
    forest = Forest(mixture=MIXTURE)
    parent = forest.call()
    child = forest.call(parent, routed=False)
    arguments = forest.receipt(), forest.result(parent, child), forest.reader()
    masked = finalize_rollout(*arguments, require_routes=True)
    assert (masked.reason, masked.rows) == (Reason.MISSING_ROUTES, ())
    assert child.call_id in masked.detail
    assert finalize_rollout(*arguments).verified
    (row,) = rows_of(forest)
    assert (row.routes_TLK[parent.cum_len - 1 :] == -1).all()
    assert (row.routes_TLK[: parent.cum_len - 1] >= 0).all()


@pytest.mark.requirement("F11", "C20")
def test_a_plan_keeps_its_routes_and_the_record_names_the_feature():
    forest = Forest(mixture=MIXTURE)
    call = forest.call()
    assert call.required_features == features_of({ROUTES: None})
    (row,) = rows_of(forest)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(row.plan), type=type(row.plan))
    np.testing.assert_array_equal(assemble(again, forest.reader()).routes_TLK, row.routes_TLK)
