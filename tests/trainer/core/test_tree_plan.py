"""Bins of tries against all ways to cut them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.plan import (
    ForestShape,
    PackedShape,
    PlannedRow,
    StepPlan,
    plan_step,
)
from megatron_forest_trainer.core.tree import SharedPrefixes, trie_order
from megatron_forest_trainer.core.tree_plan import RowSizes, cut, plan_bins

from tests.trainer.core.test_plan import planned_rows
from tests.trainer.core.test_tree import ROWS, keys_of

TRIES = ROWS.filter(bool)


def in_trie_order(rows):
    """Rows in trie order, their lengths, and what each shares with the one before it."""
    trie = trie_order(keys_of([tokens for _, tokens in rows]), [scope for scope, _ in rows])
    rows = [rows[number] for number in trie.order]
    return rows, [len(tokens) for _, tokens in rows], trie.shared


def unique_tokens(rows) -> int:
    return len({(scope, tokens[:n]) for scope, tokens in rows for n in range(1, len(tokens) + 1)})


@given(TRIES)
def test_a_run_of_rows_costs_its_unique_tokens(rows) -> None:
    rows, lengths, shared = in_trie_order(rows)
    sizes = RowSizes(lengths, shared)
    for start, stop in itertools.combinations(range(len(rows) + 1), 2):
        assert sizes.tokens(start, stop) == unique_tokens(rows[start:stop])


@st.composite
def row_sizes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths of up to 9 rows, and what each shares with the one before it."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=9))
    pairs = itertools.pairwise(lengths)
    return lengths, [0, *(draw(st.integers(0, min(pair))) for pair in pairs)]


def cheapest_cuts(rows: RowSizes, start: int, stop: int, limit: int) -> tuple[int, int]:
    """Least (tokens, pieces) over all ways to cut rows into runs of at most `limit` tokens."""
    costs = []
    for cuts in itertools.product([False, True], repeat=stop - start - 1):
        edges = [start, *(start + i + 1 for i, here in enumerate(cuts) if here), stop]
        sizes = [rows.tokens(*edge) for edge in itertools.pairwise(edges)]
        if max(sizes) <= limit:
            costs.append((sum(sizes), len(sizes)))
    return min(costs)


@pytest.mark.requirement("H3")
@settings(deadline=None)
@given(row_sizes(), st.integers(0, 40))
def test_a_forest_is_cut_where_the_fewest_tokens_are_repeated(sizes, slack: int) -> None:
    lengths, shared = sizes
    rows, limit = RowSizes(lengths, shared), max(lengths) + slack
    pieces = cut(rows, limit)
    assert [place for piece in pieces for place in range(*piece)] == list(range(len(lengths)))
    for start, stop in trie_runs(shared):
        tokens = [rows.tokens(*piece) for piece in pieces if start <= piece[0] < stop]
        assert max(tokens) <= limit
        whole = (rows.tokens(start, stop), 1)
        cheapest = whole if whole[0] <= limit else cheapest_cuts(rows, start, stop, limit)
        assert (sum(tokens), len(tokens)) == cheapest


def trie_runs(shared):
    starts = [place for place, count in enumerate(shared) if count == 0]
    return itertools.pairwise([*starts, len(shared)])


@pytest.mark.requirement("H3", "H8")
@settings(deadline=None)
@given(TRIES, st.integers(0, 12), st.integers(1, 4))
def test_bins_run_every_row_once_on_equally_many_microbatches(rows, slack, ranks) -> None:
    rows, lengths, shared = in_trie_order(rows)
    budget = max(lengths) + slack
    bins, total = plan_bins(lengths, shared, budget, ranks=ranks)
    assert len(bins) == ranks
    assert len({len(own) for own in bins}) == 1
    places = [place for own in bins for members in own for place in members]
    assert sorted(places) == list(range(len(rows)))
    sizes = [[unique_tokens([rows[i] for i in members]) for members in own] for own in bins]
    assert max(size for own in sizes for size in own) <= budget
    assert unique_tokens(rows) <= sum(map(sum, sizes)) == total
    assert any(all(own) for own in bins)
    assert plan_bins(lengths, shared, budget, ranks=ranks) == (bins, total)


def test_one_forest_is_parted_to_keep_several_ranks_busy() -> None:
    """8 branches of 128 tokens on 64: two ranks end sooner with the trunk repeated."""
    lengths, shared = [192] * 8, [0] + [64] * 7
    bins, total = plan_bins(lengths, shared, 4096, ranks=1)
    assert (bins, total) == (((tuple(range(8)),),), 64 + 8 * 128)
    bins, total = plan_bins(lengths, shared, 4096, ranks=2)
    assert sorted(len(members) for own in bins for members in own) == [4, 4]
    assert total == 2 * 64 + 8 * 128


def test_a_long_trunk_is_not_repeated_for_balance() -> None:
    """The other rank gets a padding bin."""
    lengths, shared = [1000, 1010], [0, 999]
    assert plan_bins(lengths, shared, 4096, ranks=2)[0] == (((0, 1),), ((),))


def test_a_row_above_the_budget_is_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"row has 9 tokens.*forest_execution.max_tokens_per_bin"):
        plan_bins([4, 9], [0, 0], 8, ranks=1)


def step(lengths, shared, shape) -> StepPlan:
    rows = planned_rows(lengths)
    row_ids = tuple(row.row_id for row in rows)
    return plan_step(3, rows, shape, SharedPrefixes(row_ids, tuple(shared)))


@pytest.mark.requirement("H3", "H8")
def test_a_plan_of_a_forest_serialises_and_counts_what_runs() -> None:
    shape = ForestShape(data_parallel=2, max_tokens=30, across_rollouts=True, align=8)
    plan = step([20, 22, 12, 9], [0, 18, 0, 0], shape)
    assert StepPlan.decode(plan.encode()) == plan
    assert plan.mode == "forest"
    assert plan.train == plan.logprob
    # 24 of the first two, 12 and 9: within 32, the budget after alignment.
    assert sorted(sorted(rank) for rank in plan.train) == [[(0, 1)], [(2, 3)]]
    assert plan.executed_tokens == 20 + 4 + 12 + 9
    packed = PackedShape(data_parallel=2, train_tokens=30, logprob_tokens=30)
    assert plan_step(3, planned_rows([20, 22]), packed).executed_tokens == 42


def test_a_forest_is_planned_with_what_exactly_its_rows_share() -> None:
    shape = ForestShape(data_parallel=1, max_tokens=30, across_rollouts=True)
    rows = planned_rows([5, 6])
    assert shape.row_multiple == 1
    for shared in (None, SharedPrefixes((rows[0].row_id,), (0,))):
        with pytest.raises(ValueError, match="exactly the rows"):
            plan_step(0, rows, shape, shared)
    padding = PlannedRow(row_id="g/pad0", plan=None)
    everything = SharedPrefixes(tuple(row.row_id for row in rows), (0, 0))
    with pytest.raises(ValueError, match="exactly the rows"):
        plan_step(0, [*rows, padding], shape, everything)
