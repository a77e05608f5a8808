import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.packing import pack
from megatron_forest_trainer.core.padding import pad_groups, padding_ids
from megatron_forest_trainer.core.plan import (
    BatchShape,
    FixedShape,
    NoRetainedTokens,
    PackedShape,
    PlannedRow,
    StepPlan,
    plan_step,
)

from tests.support.forests import Forest


def planned_rows(lengths: list[int]) -> list[PlannedRow]:
    rows = []
    for number, length in enumerate(lengths):
        forest = Forest(seed=number, attempt_id=f"att_{number}")
        call = forest.call(prompt=length - 1, generated=1)
        (plan,) = build_rows([call], group_id="g", rollout_id=f"r{number}")
        rows.append(PlannedRow(row_id=plan.row_id, plan=plan, advantage=1.0, train=True))
    return rows


SHAPES = st.one_of(
    st.builds(
        FixedShape,
        data_parallel=st.integers(1, 4),
        train_micro_batch=st.integers(1, 3),
        logprob_micro_batch=st.integers(1, 4),
    ),
    st.builds(
        PackedShape,
        data_parallel=st.integers(1, 4),
        train_tokens=st.integers(24, 60),
        logprob_tokens=st.integers(60, 200),
        align=st.sampled_from([1, 4, 8]),
    ),
)


@pytest.mark.requirement("H1", "H3", "H5", "H8", "F12")
@given(st.lists(st.integers(2, 20), min_size=1, max_size=20), SHAPES)
@settings(deadline=None)
def test_a_plan_runs_every_row_once_on_equally_many_microbatches(
    lengths: list[int], shape: BatchShape
) -> None:
    rows = pad_groups([("g", planned_rows(lengths))], shape.row_multiple)
    plan = plan_step(3, rows, shape)
    for schedule in (plan.train, plan.logprob):
        assert len(schedule) == shape.data_parallel
        assert len({len(rank) for rank in schedule}) == 1
        flat = [index for rank in schedule for microbatch in rank for index in microbatch]
        assert sorted(flat) == list(range(len(rows)))
        assert all(microbatch for rank in schedule for microbatch in rank)
    for rank in range(shape.data_parallel):
        on_rank = {index for microbatch in plan.logprob[rank] for index in microbatch}
        assert on_rank == {index for microbatch in plan.train[rank] for index in microbatch}
    if isinstance(shape, FixedShape):
        assert {len(m) for rank in plan.train for m in rank} == {shape.train_micro_batch}
        assert {len(m) for rank in plan.logprob for m in rank} == {shape.logprob_micro_batch}
    else:
        for budget, schedule in (
            (shape.train_tokens, plan.train),
            (shape.logprob_tokens, plan.logprob),
        ):
            for microbatch in (m for rank in schedule for m in rank):
                loads = [-(-rows[i].length // shape.align) * shape.align for i in microbatch]
                assert sum(loads) <= -(-budget // shape.align) * shape.align
    assert plan.retained_tokens == len(lengths)
    assert plan_step(3, rows, shape) == plan
    assert StepPlan.decode(plan.encode()) == plan


@pytest.mark.requirement("H3")
def test_the_longest_row_fits_its_bin_after_alignment() -> None:
    shape = PackedShape(data_parallel=1, train_tokens=30, logprob_tokens=30, align=8)
    plan = plan_step(0, planned_rows([30, 2]), shape)
    assert sorted(len(members) for members in plan.train[0]) == [1, 1]


def test_an_encoded_plan_holds_no_tokens() -> None:
    """Its size does not depend on the number of tokens."""
    shape = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
    sizes = {len(plan_step(0, planned_rows([length]), shape).encode()) for length in (1000, 9000)}
    assert len(sizes) == 1


@pytest.mark.requirement("H1")
def test_a_row_count_that_is_no_multiple_is_refused() -> None:
    shape = FixedShape(data_parallel=2, train_micro_batch=2, logprob_micro_batch=3)
    assert shape.row_multiple == 12
    with pytest.raises(ValueError, match="not a multiple of 12"):
        plan_step(0, planned_rows([3]), shape)


@pytest.mark.requirement("G24", "XL9")
@pytest.mark.parametrize("rows", [(), (PlannedRow(row_id="g/pad0", plan=None),)])
def test_a_plan_needs_a_token_to_train_on(rows: tuple[PlannedRow, ...]) -> None:
    """Masked rollouts have no rows at all."""
    shape = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
    with pytest.raises(NoRetainedTokens, match=f"none of the {len(rows)} rows has a token"):
        plan_step(0, rows, shape)


def test_row_ids_are_unique() -> None:
    shape = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
    row = planned_rows([3])[0]
    with pytest.raises(ValueError, match="unique"):
        plan_step(0, [row, row], shape)


@pytest.mark.requirement("H10", "XL11")
@pytest.mark.parametrize(
    ("rows", "multiple", "count"), [(7, 4, 1), (6, 4, 2), (3, 4, 1), (8, 4, 0), (0, 4, 0)]
)
def test_padding_ids_follow_from_the_row_count(rows: int, multiple: int, count: int) -> None:
    assert padding_ids("g", rows, multiple) == tuple(f"g/pad{n}" for n in range(count))


# Bins


@pytest.mark.requirement("H3")
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 4))
def test_bins_hold_every_item_once_within_the_budget(lengths: list[int], multiple: int) -> None:
    lengths = lengths + [1] * (-len(lengths) % multiple)
    bins = pack(lengths, 32, multiple=multiple)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= 32 for members in bins)
    assert len(bins) % multiple == 0
    assert all(bins)


def first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """The textbook algorithm, quadratic."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for members in bins:
            if sum(lengths[i] for i in members) + lengths[index] <= budget:
                members.append(index)
                break
        else:
            bins.append([index])
    return bins


@pytest.mark.requirement("H3")
@given(st.lists(st.integers(1, 30), max_size=40))
def test_packing_is_first_fit_decreasing(lengths: list[int]) -> None:
    assert pack(lengths, 32) == first_fit_decreasing(lengths, 32)


@pytest.mark.requirement("H3")
def test_packing_is_fast_and_tight() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(7.0, 1.0, 10_000), 1, 16_384).astype(int).tolist()
    start = time.perf_counter()
    bins = pack(lengths, 16_384, multiple=8)
    assert time.perf_counter() - start < 0.2
    assert sum(lengths) >= 0.97 * 16_384 * len(bins)


def test_items_that_fit_no_bin_are_named() -> None:
    with pytest.raises(ValueError, match="item 1 has 33 tokens"):
        pack([4, 33], 32)
    with pytest.raises(ValueError, match="cannot fill a multiple of 2"):
        pack([4], 32, multiple=2)
    with pytest.raises(ValueError, match="at least 1"):
        pack([4], 32, multiple=0)
