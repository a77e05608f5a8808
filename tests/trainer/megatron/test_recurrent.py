"""A model that remembers order: any leak between rows, bins or padding would change its result."""

import pytest
from megatron_forest_trainer.core.plan import FixedShape, PackedShape

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    assert_gradients_close,
    make_config,
    make_step,
    random_rollout,
    run_step,
)

ADVANTAGES = {"x": 1.0, "y": -0.5, "z": 2.0}
SHIFT = 0.1


def oracle_on_a_rank(rollouts):
    from tests.trainer.megatron.recurrent import recurrent_oracle

    return recurrent_oracle(rollouts, ADVANTAGES, SHIFT)


def make_recurrent():
    from tests.trainer.megatron.recurrent import Recurrent

    return Recurrent()


def rollouts():
    return [
        random_rollout("x", BRANCHES, seed=1, sampling={"b": {"temperature": 0.7}}),
        random_rollout("y", CHAIN, seed=2),
        random_rollout("z", BRANCHES, seed=4, group_id="g1"),
    ]


@pytest.mark.requirement("H9", "L2", "H5", "XF3", "F5", "F6")
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_equal_the_per_call_inputs(untied, ranks):
    (oracle,) = run_ranks(oracle_on_a_rank, rollouts())
    for shape, divisible_by in (
        (FixedShape(data_parallel=ranks, train_micro_batch=1, logprob_micro_batch=4), 1),
        (FixedShape(data_parallel=ranks, train_micro_batch=3, logprob_micro_batch=2), 8),
        (PackedShape(data_parallel=ranks, train_tokens=48, logprob_tokens=96), 1),
        (PackedShape(data_parallel=ranks, train_tokens=96, logprob_tokens=96, align=8), 8),
    ):
        step = make_step(rollouts(), ADVANTAGES, shape)
        config = make_config(policy__make_sequence_length_divisible_by=divisible_by)
        for result in run_ranks(run_step, config, untied, step, SHIFT, make_recurrent, ranks=ranks):
            assert result["stats"]["loss"] == pytest.approx(oracle.loss, abs=1e-6)
            assert_gradients_close(result["gradients"], oracle.gradients, 1e-5)
