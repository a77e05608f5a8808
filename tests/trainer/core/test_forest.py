import numpy as np
import pytest
import torch
from forest_schema import CallRecord, Reason
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.forest import (
    build_rows,
    check_ownership,
    is_linear,
    missing_parents,
)
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import Row

from tests.support.forests import Forest, selected_forests


def rows_of(forest: Forest, selection: list[CallRecord]) -> list[Row]:
    reader = forest.reader()
    plans = build_rows(selection, group_id="g0", rollout_id="r0")
    return [assemble(plan, reader) for plan in plans]


def chain(forest: Forest, length: int, parent: CallRecord | None = None) -> list[CallRecord]:
    calls = []
    for _ in range(length):
        parent = forest.call(parent)
        calls.append(parent)
    return calls


@pytest.mark.requirement("F4", "F5", "F6", "F7", "F8", "F10", "F17", "L1")
@given(selected_forests())
@settings(deadline=None)
def test_rows_equal_training_each_call_on_its_own_context(
    case: tuple[Forest, list[CallRecord]],
) -> None:
    forest, selection = case
    rows = rows_of(forest, selection)
    owners: dict[str, Row] = {}
    for row in rows:
        covered = np.zeros(row.plan.length, dtype=bool)
        for span in row.plan.spans:
            call = next(c for c in forest.calls if c.call_id == span.call_id)
            tokens, logprobs = forest.context(call)
            np.testing.assert_array_equal(row.tokens_T[: span.end], tokens)
            np.testing.assert_array_equal(row.logprobs_T[span.start : span.end], logprobs)
            assert row.loss_mask_T[span.start : span.end].all() == span.owned
            assert row.loss_mask_T[span.start : span.end].any() == span.owned
            covered[span.start : span.end] = True
            if span.owned:
                assert span.call_id not in owners
                owners[span.call_id] = row
        assert not row.loss_mask_T[~covered].any()
        assert not row.logprobs_T[~covered].any()
    assert set(owners) == {call.call_id for call in selection}
    assert sum(int(row.loss_mask_T.sum()) for row in rows) == sum(
        call.generated_len for call in selection
    )


@pytest.mark.requirement("F1", "F2", "F9", "E24")
@given(selected_forests())
@settings(deadline=None)
def test_one_row_per_selected_endpoint_in_selection_order(
    case: tuple[Forest, list[CallRecord]],
) -> None:
    _, selection = case
    rows = build_rows(selection, group_id="g0", rollout_id="r0")
    parents = {call.parent_call_id for call in selection}
    endpoints = [call.call_id for call in selection if call.call_id not in parents]
    assert [row.path[-1].call_id for row in rows] == endpoints
    assert [row.row_id for row in rows] == [f"g0/r0/s{n}" for n in range(len(rows))]
    first_with: dict[str, int] = {}
    for number, row in enumerate(rows):
        for call in row.path:
            first_with.setdefault(call.call_id, number)
    for number, row in enumerate(rows):
        assert [span.owned for span in row.spans] == [
            first_with[call.call_id] == number for call in row.path
        ]
    assert build_rows(selection, group_id="g0", rollout_id="r0") == rows


@pytest.mark.requirement("F3")
def test_twenty_calls_make_one_row_and_two_with_a_compaction_after_the_tenth() -> None:
    forest = Forest()
    selection = chain(forest, 20)
    assert len(build_rows(selection, group_id="g", rollout_id="r")) == 1

    compacted = Forest()
    selection = chain(compacted, 10) + chain(compacted, 10)
    rows = build_rows(selection, group_id="g", rollout_id="r")
    assert [len(row.path) for row in rows] == [10, 10]
    assert [row.owned_tokens for row in rows] == [40, 40]


@pytest.mark.requirement("XF3", "E19", "F6")
@pytest.mark.parametrize("children", [2, 3])
def test_shared_parent_is_context_everywhere_and_trains_once(children: int) -> None:
    forest = Forest()
    shared = forest.call(generated=7)
    branches = [forest.call(shared, generated=2 + n) for n in range(children)]
    rows = rows_of(forest, [shared, *branches])
    assert len(rows) == children
    in_shared = slice(shared.prompt_len, shared.cum_len)
    assert [int(row.loss_mask_T[in_shared].sum()) for row in rows] == [7] + [0] * (children - 1)
    for row in rows:
        np.testing.assert_array_equal(row.tokens_T[: shared.cum_len], forest.context(shared)[0])
        assert (row.logprobs_T[in_shared] != 0).all()


@pytest.mark.requirement("XF3", "L2", "H9")
@given(selected_forests(max_calls=6))
@settings(deadline=None, max_examples=25)
def test_loss_and_gradient_equal_the_per_call_oracle(
    case: tuple[Forest, list[CallRecord]],
) -> None:
    """An order-sensitive (recurrent) model: rows against each call alone on its own context."""
    forest, selection = case
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(97, 8),
            "gru": torch.nn.GRU(8, 8, batch_first=True),
            "head": torch.nn.Linear(8, 97),
        }
    ).double()

    def loss(tokens: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64) % 97)
        hidden, _ = model["gru"](model["embed"](ids)[None])
        logprobs = model["head"](hidden[0]).log_softmax(-1)
        positions = torch.from_numpy(np.flatnonzero(targets))
        return -(logprobs[positions - 1, ids[positions]]).sum()

    def gradients(total: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(total, list(model.parameters())))

    by_rows = sum(loss(row.tokens_T, row.loss_mask_T) for row in rows_of(forest, selection))
    by_calls = torch.zeros((), dtype=torch.float64)
    for call in selection:
        tokens, _ = forest.context(call)
        targets = np.zeros(len(tokens), dtype=bool)
        targets[call.prompt_len :] = True
        by_calls = by_calls + loss(tokens, targets)
    torch.testing.assert_close(by_rows, by_calls, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(gradients(by_rows), gradients(by_calls), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.requirement("F2")
def test_a_selected_call_whose_children_were_discarded_is_an_endpoint() -> None:
    forest = Forest()
    first = forest.call()
    forest.call(first)
    rows = build_rows([first], group_id="g", rollout_id="r")
    assert [[call.call_id for call in row.path] for row in rows] == [[first.call_id]]


@pytest.mark.requirement("A26")
def test_resuming_an_earlier_chain_adds_no_row() -> None:
    forest = Forest()
    first = forest.call()
    other = forest.call()
    again = forest.call(first)
    rows = build_rows([first, other, again], group_id="g", rollout_id="r")
    assert [[call.call_id for call in row.path] for row in rows] == [
        [other.call_id],
        [first.call_id, again.call_id],
    ]


@pytest.mark.requirement("XF4")
def test_a_rewritten_context_is_its_own_row_beside_its_siblings() -> None:
    forest = Forest()
    kept = chain(forest, 3)
    rewritten = forest.call(prompt=9)
    rows = rows_of(forest, [*kept, rewritten])
    assert [row.plan.owned_tokens for row in rows] == [12, 4]
    np.testing.assert_array_equal(rows[1].tokens_T, forest.context(rewritten)[0])


@pytest.mark.requirement("F16")
def test_lengths_that_do_not_continue_stop_the_run() -> None:
    forest, other = Forest(), Forest()
    parent = forest.call(prompt=5)
    longer = other.call(prompt=6, call_id=parent.call_id)
    child = other.call(longer)
    with pytest.raises(IntegrityError, match=r"inherits 10 tokens.*has 9") as caught:
        build_rows([parent, child], group_id="g", rollout_id="r")
    assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_a_root_without_a_prompt_stops_the_run() -> None:
    forest = Forest()
    with pytest.raises(IntegrityError, match="root without a prompt"):
        build_rows([forest.call(prompt=0)], group_id="g", rollout_id="r")


@pytest.mark.requirement("E29")
def test_missing_parents_are_named_in_order() -> None:
    forest = Forest()
    a, b = forest.call(), forest.call()
    children = [forest.call(b), forest.call(a), forest.call(b)]
    assert missing_parents(children) == (b.call_id, a.call_id)
    assert missing_parents([a, b, *children]) == ()
    with pytest.raises(IntegrityError, match="lacks the parent"):
        build_rows(children, group_id="g", rollout_id="r")


def test_linear_is_one_root_without_branches() -> None:
    forest = Forest()
    a = forest.call()
    b = forest.call(a)
    c = forest.call(b)
    other = forest.call(a)
    root = forest.call()
    assert is_linear([a, b, c])
    assert is_linear([c, a, b])
    assert not is_linear([a, b, other])
    assert not is_linear([a, root])


@pytest.mark.requirement("F5")
@given(selected_forests(), st.randoms(use_true_random=False))
def test_a_generation_owned_twice_or_not_at_all_is_refused(case, random) -> None:  # type: ignore[no-untyped-def]
    _, selection = case
    rows = build_rows(selection, group_id="g", rollout_id="r")
    generated = {call.call_id: call.generated_len for call in selection}
    check_ownership(rows, generated)
    victim = random.choice(selection)
    with pytest.raises(IntegrityError, match="owned exactly once"):
        check_ownership(rows, generated | {victim.call_id: victim.generated_len + 1})
    with pytest.raises(IntegrityError, match="two rows own"):
        check_ownership([*rows, *rows], generated)
