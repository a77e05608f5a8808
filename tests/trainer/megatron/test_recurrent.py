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


def random_forest(generator, name):
    """Calls with random parents: chains, branches, and rewrites (roots)."""
    shape = []
    for number in range(int(generator.integers(1, 9))):
        parent = None
        if number and generator.random() < 0.8:
            parent = f"c{generator.integers(0, number)}"
        prompt, generated = generator.integers(1, 9), generator.integers(0, 6)
        shape.append((f"c{number}", parent, int(prompt), int(generated)))
    sampling = {
        f"c{n}": {"temperature": float(generator.choice([0.0, 0.5, 1.0]))}
        for n in range(len(shape))
    }
    seed = int(generator.integers(1 << 30))
    return random_rollout(name, shape, seed=seed, sampling=sampling)


def compare_random_forests(hf_dir, seeds) -> list[tuple[int, str, float, float]]:
    """(seed, form, loss difference, largest gradient difference) of each random step."""
    import numpy as np

    from tests.trainer.megatron.recurrent import Recurrent, recurrent_oracle

    found = []
    for seed in seeds:
        generator = np.random.default_rng(seed)
        rollouts = [random_forest(generator, f"r{n}") for n in range(3)]
        if not any(call.generated_len for rollout in rollouts for call in rollout.records):
            continue
        advantages = {rollout.rollout_id: float(generator.normal()) for rollout in rollouts}
        oracle = recurrent_oracle(rollouts, advantages, SHIFT)
        size = int(generator.integers(1, 4))
        for form, shape in (
            (
                "fixed",
                FixedShape(data_parallel=1, train_micro_batch=size, logprob_micro_batch=1),
            ),
            (
                "packed",
                PackedShape(data_parallel=1, train_tokens=128 * size, logprob_tokens=512 * size),
            ),
        ):
            step = make_step(rollouts, advantages, shape)
            result = run_step(make_config(), hf_dir, step, SHIFT, Recurrent)
            gradients = max(
                float(np.abs(result["gradients"][name] - expected).max())
                for name, expected in oracle.gradients.items()
            )
            found.append((seed, form, abs(result["stats"]["loss"] - oracle.loss), gradients))
    return found


@pytest.mark.requirement("H9", "L2", "F1", "F2", "F4", "F5", "F6", "F7", "XF3")
def test_random_forests_train_like_their_calls(untied):
    (found,) = run_ranks(compare_random_forests, untied, range(40))
    assert len(found) > 70
    for seed, form, loss, gradient in found:
        assert loss < 1e-5, (seed, form)
        assert gradient < 1e-5, (seed, form)
