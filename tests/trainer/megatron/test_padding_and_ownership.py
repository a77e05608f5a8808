"""Padding changes nothing; a step that trains a token twice, or nothing, is not taken."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.plan import FixedShape, PackedShape, StepPlan
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.loss.ownership import OwnedRun, OwnershipError, check_once_only

from tests.support.distributed import run_ranks
from tests.support.forests import Forest
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    Step,
    assert_gradients_close,
    make_config,
    make_step,
    random_rollout,
    run_step,
)

ADVANTAGES = {"x": 1.0, "y": -0.5}
ONE = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)


def rollouts():
    return [random_rollout("x", BRANCHES, seed=1), random_rollout("y", CHAIN, seed=2)]


@pytest.mark.requirement("XL3", "H4")
@pytest.mark.parametrize("overrides", [{}, {"policy__megatron_cfg__context_parallel_size": 2}])
def test_padding_rows_change_nothing(untied, overrides):
    results = [
        run_ranks(
            run_step,
            make_config(**overrides, loss_fn__reference_policy_kl_penalty=0.1),
            untied,
            make_step(rollouts(), ADVANTAGES, ONE, extra_padding=padding),
            0.05,
            ranks=2 if overrides else 1,
        )[0]
        for padding in (0, 3, 7)
    ]
    for result in results[1:]:
        assert result["stats"] == results[0]["stats"]
        assert result["errors"] == results[0]["errors"]
        for name, gradient in results[0]["gradients"].items():
            assert np.array_equal(result["gradients"][name], gradient), name


def collated_advantages(rows, advantage, packed):
    """Rows and a padding row in one microbatch: what each position carries, and row starts."""
    from megatron_forest_trainer.data.collate import Collator, RowInput

    batch = Collator(packed=packed, multiple=4)(
        [
            *(RowInput(row=row, trains=True, advantage=advantage) for row in rows),
            RowInput(row=None),
        ],
        training=True,
    )
    carried = np.zeros(batch.tokens.numel(), np.float32)
    np.add.at(carried, batch.edges.source_E, batch.edges.advantage_E)
    first = (batch.position_ids == 0) & ~batch.artificial
    return carried, np.flatnonzero(first.numpy())


@pytest.mark.requirement("XL2")
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_rollout_carry_one_advantage_on_owned_tokens_only(packed):
    forest = Forest()
    for generated in (5, 9, 3):
        forest.call(generated=generated)
    plans = build_rows(forest.calls, group_id="g0", rollout_id="r0")
    rows = [assemble(plan, forest.reader()) for plan in plans]
    ((carried, starts),) = run_ranks(collated_advantages, rows, 0.75, packed)
    expected = np.zeros_like(carried)
    for start, row, generated in zip(starts, rows, (5, 9, 3), strict=True):
        (owned,) = np.nonzero(row.loss_mask_T)
        assert len(owned) == generated
        # The model predicts a token at the position before it.
        expected[start + owned - 1] = 0.75
    np.testing.assert_array_equal(carried, expected)
    assert np.count_nonzero(carried) == 5 + 9 + 3


@pytest.mark.requirement("XL3", "H4")
def test_a_rank_of_padding_only_takes_part(untied):
    single = [random_rollout("y", CHAIN, seed=2)]
    for shape in (
        FixedShape(data_parallel=2, train_micro_batch=2, logprob_micro_batch=2),
        PackedShape(data_parallel=2, train_tokens=64, logprob_tokens=64),
    ):
        alone, shared = (
            run_ranks(run_step, make_config(), untied, make_step(single, {"y": -0.5}, s), ranks=n)[
                0
            ]
            for s, n in ((ONE, 1), (shape, 2))
        )
        assert shared["stats"]["loss"] == pytest.approx(alone["stats"]["loss"], abs=1e-7)
        assert_gradients_close(shared["gradients"], alone["gradients"], 1e-6)


@pytest.mark.requirement("G7", "G1")
def test_a_filtered_rollout_runs_without_loss(untied):
    both = make_step(rollouts(), ADVANTAGES, ONE, untrained=["y"])
    only = make_step(rollouts()[:1], ADVANTAGES, ONE)
    filtered, alone = (run_ranks(run_step, make_config(), untied, step)[0] for step in (both, only))
    assert filtered["stats"] == alone["stats"]
    assert_gradients_close(filtered["gradients"], alone["gradients"], 0)
    assert filtered["errors"].keys() == {row.row_id for row in both.decoded.rows}


def attempt(config, hf_dir, step: Step, change: str):
    """Try a step that must not be taken: (error, whether the weights changed, step counter)."""
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    before = [parameter.detach().clone() for parameter in learner.module.parameters()]
    plan = CHANGES[change](step.decoded)
    learner.logprobs(plan, step.reader)
    try:
        learner.train_step(plan, step.reader)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "taken"
    same = all(
        bool((old == new).all())
        for old, new in zip(before, learner.module.parameters(), strict=True)
    )
    return message, same, learner.step


def _none_trains(plan: StepPlan) -> StepPlan:
    rows = tuple(msgspec.structs.replace(row, train=False) for row in plan.rows)
    return msgspec.structs.replace(plan, rows=rows, retained_tokens=0)


def _one_row_twice(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, train=tuple((*rank[:-1], rank[0]) for rank in plan.train))


def _one_row_left_out(plan: StepPlan) -> StepPlan:
    rows = list(plan.rows)
    index = next(i for i, row in enumerate(rows) if row.plan and row.plan.rollout_id == "x")
    owned = rows[index].plan
    assert owned is not None
    spans = tuple(msgspec.structs.replace(span, owned=False) for span in owned.spans)
    rows[index] = msgspec.structs.replace(
        rows[index], plan=msgspec.structs.replace(owned, spans=spans)
    )
    return msgspec.structs.replace(plan, rows=tuple(rows))


def _infinite_advantage(plan: StepPlan) -> StepPlan:
    rows = (msgspec.structs.replace(plan.rows[0], advantage=float("inf")), *plan.rows[1:])
    return msgspec.structs.replace(plan, rows=rows)


CHANGES = {
    "none": _none_trains,
    "twice": _one_row_twice,
    "left out": _one_row_left_out,
    "infinite": _infinite_advantage,
}


@pytest.mark.requirement("XL9", "G24", "F5", "XF3")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("none", "NoRetainedTokens: step 0"),
        ("twice", "OwnershipError: rollout g0/"),
        ("left out", "is trained by no row"),
        ("infinite", "NonFiniteGradientError"),
    ],
)
def test_steps_that_must_not_be_taken_leave_the_weights_alone(untied, change, error):
    shape = FixedShape(data_parallel=2, train_micro_batch=1, logprob_micro_batch=1)
    step = make_step(rollouts(), ADVANTAGES, shape)
    for message, same, steps in run_ranks(attempt, make_config(), untied, step, change, ranks=2):
        assert error in message
        assert same
        assert steps == 0


@pytest.mark.requirement("F5", "F6")
@settings(max_examples=200, deadline=None)
@given(
    lengths=st.dictionaries(
        st.tuples(st.sampled_from("xy"), st.sampled_from("abc")), st.integers(0, 6), min_size=1
    ),
    data=st.data(),
)
def test_once_only_check_accepts_exact_covers_and_nothing_else(lengths, data):
    tokens = [(key, index) for key, length in lengths.items() for index in range(length)]
    held = [OwnedRun(*key, index, index + 1) for key, index in tokens]
    held = data.draw(st.permutations(held))
    check_once_only(held, lengths)
    if not tokens:
        return
    token = data.draw(st.sampled_from(held))
    with pytest.raises(OwnershipError, match="twice"):
        check_once_only([*held, token], lengths)
    with pytest.raises(OwnershipError, match="by no row"):
        check_once_only([run for run in held if run != token], lengths)
    with pytest.raises(OwnershipError, match="not in the step"):
        check_once_only([*held, OwnedRun("z", "a", 0, 1)], lengths)
