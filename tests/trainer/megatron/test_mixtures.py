"""Mixtures of experts: which ones are accepted, and what their load counts."""

import numpy as np
import pytest
from megatron_forest_trainer.core.plan import FixedShape, PackedShape

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import BRANCHES, CHAIN, make_config, make_step, random_rollout

ACCEPTED = {
    "plain": {},
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}
REFUSED = {
    "moe_aux_loss_coeff": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "moe_aux_loss_coeff [0.01]": {
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [0.01],
    },
    "moe_router_load_balancing_type": {"moe_router_load_balancing_type": "sinkhorn"},
    "moe_z_loss_coeff": {"moe_z_loss_coeff": 1e-3},
    "moe_expert_capacity_factor": {
        "moe_expert_capacity_factor": 1.0,
        "moe_token_drop_policy": "position",
    },
    "moe_input_jitter_eps": {"moe_input_jitter_eps": 0.1},
    "moe_router_force_load_balancing": {"moe_router_force_load_balancing": True},
    "hidden_dropout": {"hidden_dropout": 0.1},
    "attention_dropout": {"attention_dropout": 0.1},
    "calculate_per_token_loss": {"calculate_per_token_loss": False},
}


def verdicts() -> dict[str, str]:
    from megatron_forest_trainer.model import parallel
    from megatron_forest_trainer.model.checks import check_model
    from megatron_forest_trainer.model.hf_config import UnsupportedModelError

    from tests.trainer.megatron.mixtures import make_mixture

    found = {}
    for name, overrides in (ACCEPTED | REFUSED).items():
        module = make_mixture(**overrides)
        try:
            check_model(module)
            found[name] = "accepted"
        except UnsupportedModelError as error:
            found[name] = str(error)
        parallel.shutdown()
    return found


@pytest.mark.requirement("K5", "K10")
def test_the_loaded_model_decides():
    (found,) = run_ranks(verdicts)
    for name in ACCEPTED:
        assert found[name] == "accepted", name
    for name in REFUSED:
        assert f"the loaded model has {name.split()[0]} " in found[name], (name, found[name])


def expert_load(config, hf_dir, step):
    """Tokens per expert of each layer in one step, summed over ranks."""
    import torch
    import torch.distributed as dist
    from megatron_forest_trainer.learner import Learner

    from tests.trainer.megatron.mixtures import make_biased_mixture

    learner = Learner(config, hf_dir, module=make_biased_mixture())
    learner.logprobs(step.decoded, step.reader)
    learner.train_step(step.decoded, step.reader)
    counts = torch.from_numpy(np.stack(learner.module.counts))
    dist.all_reduce(counts)
    return counts.numpy()


@pytest.mark.requirement("K12", "H4")
def test_load_counts_every_real_token_once(untied):
    rollouts = [random_rollout("x", BRANCHES, seed=1), random_rollout("y", CHAIN, seed=2)]
    unique = sum(record.delta_len for rollout in rollouts for record in rollout.records)
    advantages = {"x": 1.0, "y": -0.5}
    loads = []
    for ranks, shape, padding in (
        (1, FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1), 0),
        (1, FixedShape(data_parallel=1, train_micro_batch=2, logprob_micro_batch=2), 2),
        (2, PackedShape(data_parallel=2, train_tokens=64, logprob_tokens=64), 1),
    ):
        step = make_step(rollouts, advantages, shape, extra_padding=padding)
        config = make_config()
        loads.append(run_ranks(expert_load, config, untied, step, ranks=ranks)[0])
        assert loads[-1].sum(axis=1).tolist() == [unique * 2] * 2
        assert np.array_equal(loads[-1], loads[0])

    counting = make_config(policy__megatron_cfg__count_padding_in_expert_load=True)
    (everything,) = run_ranks(expert_load, counting, untied, step_with_padding(rollouts))
    assert everything.sum() > loads[0].sum()


def step_with_padding(rollouts, padding=3):
    shape = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
    return make_step(rollouts, {"x": 1.0, "y": -0.5}, shape, extra_padding=padding)


def expert_biases(configs, hf_dir, steps):
    """The routers' biases after one step each, by configuration and step."""
    from megatron_forest_trainer.learner import Learner
    from megatron_forest_trainer.model import parallel
    from megatron_forest_trainer.model.checks import routers

    from tests.trainer.megatron.mixtures import make_biased_mixture

    found = []
    for config in configs:
        for step in steps:
            learner = Learner(config, hf_dir, module=make_biased_mixture())
            learner.logprobs(step.decoded, step.reader)
            learner.train_step(step.decoded, step.reader)
            found.append(np.stack([r.expert_bias.numpy() for r in routers(learner.module)]))
            parallel.shutdown()
    return found


@pytest.mark.requirement("K12", "H4")
def test_the_bias_does_not_feel_added_padding(untied):
    rollouts = [random_rollout("x", BRANCHES, seed=1), random_rollout("y", CHAIN, seed=2)]
    steps = [step_with_padding(rollouts, padding) for padding in (0, 60)]
    configs = [
        make_config(policy__megatron_cfg__count_padding_in_expert_load=counted)
        for counted in (False, True)
    ]
    ((plain, padded, plain_counted, padded_counted),) = run_ranks(
        expert_biases, configs, untied, steps
    )
    assert np.abs(plain).max() > 0
    assert np.array_equal(plain, padded)
    # Counted, the padding moves it.
    assert not np.array_equal(plain_counted, padded_counted)


def biases_after_a_failure(config, hf_dir, step):
    """Biases and load counts of a learner whose step had an infinite gradient."""
    import msgspec
    from megatron_forest_trainer.learner import Learner, NonFiniteGradientError
    from megatron_forest_trainer.model.checks import routers

    from tests.trainer.megatron.mixtures import make_biased_mixture

    learner, plan = Learner(config, hf_dir, module=make_biased_mixture()), step.decoded
    rows = tuple(msgspec.structs.replace(row, advantage=float("inf")) for row in plan.rows)
    learner.logprobs(plan, step.reader)
    with pytest.raises(NonFiniteGradientError):
        learner.train_step(msgspec.structs.replace(plan, rows=rows), step.reader)
    assert max(counts.max() for counts in learner.module.counts) > 0
    return [
        (r.expert_bias.tolist(), r.local_tokens_per_expert.tolist())
        for r in routers(learner.module)
    ]


@pytest.mark.requirement("XL9", "K5")
def test_a_step_that_is_not_taken_leaves_the_biases_alone(untied):
    rollouts = [random_rollout("x", BRANCHES, seed=1), random_rollout("y", CHAIN, seed=2)]
    (found,) = run_ranks(biases_after_a_failure, make_config(), untied, step_with_padding(rollouts))
    assert found == [([0.0] * 4, [0.0] * 4)] * 2
