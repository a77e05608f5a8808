"""The trie of rows against one that is built token by token."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.tree import (
    build_tree,
    merge_keys,
    merge_scope,
    shared_prefixes,
    trie_order,
)
from numpy.typing import NDArray

from tests.support.forests import Forest

ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple),
    ),
    max_size=10,
)
"""(scope, tokens) of rows over an alphabet so small that prefixes repeat."""


def keys_of(rows: Sequence[Sequence[int]]) -> list[NDArray[np.uint8]]:
    return [np.array(row, "<i4").view(np.uint8).reshape(-1, 4) for row in rows]


def tree_of(rows: Sequence[tuple[int, tuple[int, ...]]]):
    keys = keys_of([tokens for _, tokens in rows])
    trie = trie_order(keys, [scope for scope, _ in rows])
    return build_tree([len(tokens) for _, tokens in rows], trie)


@pytest.mark.requirement("H5")
@given(ROWS)
def test_every_shared_token_is_there_once_and_sees_its_own_path(rows) -> None:
    tree = tree_of(rows)
    prefixes = {(scope, tokens[:n]) for scope, tokens in rows for n in range(1, len(tokens) + 1)}
    assert tree.total == len(prefixes)
    # Each token of the layout is one prefix: the one that any row through it has there.
    at: dict[int, tuple[int, tuple[int, ...]]] = {}
    for (scope, tokens), path in zip(rows, tree.paths, strict=True):
        assert len(path) == len(tokens)
        for depth, index in enumerate(path.tolist()):
            assert at.setdefault(index, (scope, tokens[: depth + 1])) == (
                scope,
                tokens[: depth + 1],
            )
    assert set(at) == set(range(tree.total))
    assert set(at.values()) == prefixes
    for q in range(tree.total):
        for k in range(tree.total):
            ancestor = at[k][0] == at[q][0] and at[q][1][: len(at[k][1])] == at[k][1]
            assert (k <= q < tree.last_T[k]) == ancestor
    # Nodes cover the layout, and a row that enters one runs through it.
    assert [node.start for node in tree.nodes] == [0, *(n.end for n in tree.nodes)][:-1]
    for node in tree.nodes:
        stretch = list(range(node.start, node.end))
        through = [path for path in tree.paths if node.end - 1 in path]
        assert through
        for path in through:
            assert path[node.depth : node.depth + len(stretch)].tolist() == stretch
    assert len(tree.nodes) < 2 * max(1, len(rows))


@given(ROWS)
def test_gathered_arrays_follow_the_layout(rows) -> None:
    if not rows:
        return
    tree = tree_of(rows)
    tokens = tree.gather([np.array(tokens) for _, tokens in rows])
    depths = tree.gather([np.arange(len(tokens)) for _, tokens in rows])
    for (_, row), path in zip(rows, tree.paths, strict=True):
        assert tokens[path].tolist() == list(row)
        assert depths[path].tolist() == list(range(len(row)))


def test_a_stretch_without_a_branch_is_one_node() -> None:
    rows = [(0, (1, 2)), (0, (1, 2, 3)), (0, (1, 2, 3)), (0, (1, 2, 3, 4, 5))]
    assert [tuple(node) for node in tree_of(rows).nodes] == [(0, 5, 0, 5)]


def test_rows_share_inside_their_scope_only() -> None:
    key = keys_of([(1, 2)])[0]
    assert trie_order([key, key], ["a", "b"]).shared == (0, 0)
    assert trie_order([key, key, key], ["a", "b", "a"]) == ((0, 2, 1), (0, 2, 0))


@pytest.mark.parametrize("across_rollouts", [False, True])
def test_shared_prefixes_are_found_in_the_captured_tokens(across_rollouts: bool) -> None:
    """A branch shares its parent's call; the same prompt of two rollouts only across them."""
    forest = Forest()
    plans = []
    for number in range(2):
        parent = forest.call(tokens=[1, 2, 3, 4, 5, 6, 7 + number], generated=1)
        children = [forest.call(parent), forest.call(parent)]
        plans += build_rows([parent, *children], group_id="g", rollout_id=f"r{number}")
    reader = forest.reader()
    found = shared_prefixes(plans, reader, across_rollouts=across_rollouts)
    assert sorted(found.shared) == ([0, 6, 7, 7] if across_rollouts else [0, 0, 7, 7])
    rows = {plan.row_id: assemble(plan, reader) for plan in plans}
    in_order = [rows[row_id] for row_id in found.row_ids]
    scopes = [merge_scope(row.plan, across_rollouts=across_rollouts) for row in in_order]
    trie = trie_order(merge_keys(in_order), scopes)
    assert trie == (tuple(range(4)), found.shared)


def test_planning_holds_the_experts_of_one_group_twice() -> None:
    mixture = layers, top_k, _ = 40, 4, 16
    groups, length = 3, 256
    plans = []
    forest = Forest(mixture=mixture)
    for number in range(groups):
        rows = [forest.call(prompt=length - 1, generated=1) for _ in range(4)]
        plans += build_rows(rows, group_id=f"g{number}", rollout_id="r")
    reader = forest.reader()
    tracemalloc.start()
    try:
        found = shared_prefixes(plans, reader, across_rollouts=True, routed=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.row_ids) == 4 * groups
    assert peak < 2.5 * (4 * length * layers * top_k * 4)
