"""One training step of forest rows equals training each call by itself on its own context."""

from pathlib import Path

import numpy as np
import pytest
from megatron_forest_trainer.core.plan import BatchShape, FixedShape, PackedShape

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    assert_gradients_close,
    make_config,
    make_step,
    per_call_oracle,
    random_rollout,
    run_step,
)

ADVANTAGES = {"x": 1.0, "y": -0.5, "z": 0.25}
SHIFT = 0.1
"""Puts every probability ratio at exp(-0.1), so that the ratio itself is tested."""

FIXED = {"train_micro_batch": 2, "logprob_micro_batch": 1}
PACKED = {"train_tokens": 48, "logprob_tokens": 96}


def rollouts():
    return [
        random_rollout("x", BRANCHES, seed=1, sampling={"c": {"temperature": 0.6}}),
        random_rollout("y", CHAIN, seed=2),
        random_rollout("z", BRANCHES, seed=3, group_id="g1"),
    ]


@pytest.fixture(scope="module")
def oracle(untied: Path):
    return per_call_oracle(untied, rollouts(), ADVANTAGES, previous_shift=SHIFT)


@pytest.mark.requirement("XF3", "XL2", "F5", "F6", "F17", "L2", "H5", "H8", "G15")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_forest_rows_train_like_each_call_on_its_own_context(untied, oracle, ranks, form):
    shape: BatchShape = (
        FixedShape(data_parallel=ranks, **FIXED)
        if form == "fixed"
        else PackedShape(data_parallel=ranks, **PACKED)
    )
    step = make_step(rollouts(), ADVANTAGES, shape)
    results = run_ranks(run_step, make_config(), untied, step, SHIFT, ranks=ranks)

    for result in results:
        assert result["stats"]["loss"] == pytest.approx(oracle.loss, abs=1e-6)
        assert result["stats"]["retained_tokens"] == oracle.tokens
        assert result["stats"] == results[0]["stats"]
        assert_gradients_close(result["gradients"], oracle.gradients, 1e-5)


def reference_passes(config, hf_dir, step):
    """Trainer's and reference's log-probabilities before the first and the second step."""
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    seen = []
    for _ in range(2):
        learner.logprobs(step.decoded, step.reader)
        seen.append((learner._previous, learner._reference))
        stats = learner.train_step(step.decoded, step.reader)
    return seen, stats.kl


@pytest.mark.requirement("G15")
@pytest.mark.parametrize("distributed", [False, True])
def test_reference_is_the_initial_model_and_leaves_the_trained_one_alone(untied, distributed):
    shape = FixedShape(data_parallel=1, **FIXED)
    step = make_step(rollouts(), ADVANTAGES, shape)
    optimizer = {
        "policy__megatron_cfg__optimizer__use_distributed_optimizer": distributed,
        "loss_fn__reference_policy_kl_penalty": 1e-9,
    }
    ((seen, kl),) = run_ranks(reference_passes, make_config(**optimizer), untied, step)
    (first, first_reference), (second, second_reference) = seen
    ((plain, _),) = run_ranks(
        reference_passes,
        make_config(**optimizer | {"loss_fn__reference_policy_kl_penalty": 0.0}),
        untied,
        step,
    )
    for row_id, values in first.items():
        assert np.array_equal(first_reference[row_id], values)
        assert np.array_equal(second_reference[row_id], values)
        assert np.abs(second[row_id] - values).max() > 1e-3
        assert np.abs(second[row_id] - plain[1][0][row_id]).max() < 1e-5
    assert kl > 0


@pytest.mark.requirement("XL4", "F10")
def test_logprobs_before_the_step_are_those_of_each_call_alone(untied, oracle):
    for shape in (
        FixedShape(data_parallel=1, **FIXED),
        PackedShape(data_parallel=1, **PACKED),
        PackedShape(data_parallel=1, align=8, **PACKED),
    ):
        step = make_step(rollouts(), ADVANTAGES, shape)
        config = make_config(
            policy__make_sequence_length_divisible_by=8 if getattr(shape, "align", 1) == 8 else 1
        )
        (result,) = run_ranks(run_step, config, untied, step)
        for planned in step.decoded.rows:
            if planned.plan is None:
                continue
            expected = [
                oracle.logprobs[planned.plan.rollout_id, span.call_id]
                for span in planned.plan.spans
                if span.owned
            ]
            found = result["previous"][planned.row_id]
            assert np.abs(found - np.concatenate(expected)).max() < 1e-5
