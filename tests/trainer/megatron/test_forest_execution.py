"""The forest in one pass gives what its rows give, and what each call gives by itself."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.plan import FixedShape, ForestShape, PackedShape, StepPlan

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    Rollout,
    Step,
    full_gradients,
    make_config,
    make_step,
    per_call_oracle,
    random_rollout,
    resume,
    train_and_save,
)
from tests.trainer.megatron.test_mixtures import expert_load
from tests.trainer.megatron.test_parallel import CFG, CONTEXT, PIPELINE, TENSOR

SHIFT = 0.1
TREES = {"policy__forest_execution__enabled": True}
# No step moves the weights: every pass of a learner is of the same model.
STILL = {f"{CFG}optimizer__lr": 1e-30}


def forest_shape(data_parallel: int = 1, *, across: bool = True, tokens: int = 4096):
    return ForestShape(data_parallel=data_parallel, max_tokens=tokens, across_rollouts=across)


def shared_prompts(seed: int, alphabet: int = 3, *, filtered: bool = False) -> list[Rollout]:
    """Rollouts of two prompt groups with equal prompts, branches, rewrites and, with so few
    different tokens, equal generations. `filtered` samples with top-k and top-p too.
    """
    generator = np.random.default_rng(seed)
    rollouts = []
    for group in range(int(generator.integers(1, 3))):
        system = generator.integers(0, alphabet, 4)
        question = generator.integers(0, alphabet, 3)
        for number in range(int(generator.integers(1, 4))):
            rollout = Rollout(f"g{group}r{number}", f"g{group}")
            for call in range(int(generator.integers(1, 6))):
                parent = (
                    f"c{generator.integers(0, call)}" if call and generator.random() < 0.7 else None
                )
                prompt = generator.integers(0, alphabet, int(generator.integers(1, 4)))
                if parent is None:
                    prompt = np.concatenate([system, question if call == 0 else prompt])
                count = int(generator.integers(1, 4))
                rollout.call(
                    f"c{call}",
                    parent,
                    prompt,
                    generator.integers(0, alphabet, count),
                    generator.normal(-4, 0.3, count),
                    temperature=float(generator.choice([1.0, 1.0, 0.6])),
                    top_p=float(generator.choice([1.0, 0.9])) if filtered else 1.0,
                    top_k=int(generator.choice([0, 20])) if filtered else 0,
                )
            rollouts.append(rollout)
    return rollouts


def advantages_of(rollouts: list[Rollout]) -> dict[str, float]:
    return {rollout.rollout_id: 0.7 * (-1) ** n + 0.1 * n for n, rollout in enumerate(rollouts)}


class Measured:
    """One learner, whose weights stay, over many steps."""

    def __init__(self, config, hf_dir):
        from megatron_forest_trainer.learner import Learner

        self.learner = Learner(config, hf_dir)

    def __call__(self, step: Step, shift: float = SHIFT):
        """(log-probabilities by row, statistics, gradients) of one step on this rank."""
        learner, plan = self.learner, step.decoded
        learner.logprobs(plan, step.reader)
        previous = {key: value.copy() for key, value in learner._previous.items()}
        for value in learner._previous.values():
            value += shift
        stats = learner.train_step(plan, step.reader)
        return previous, (stats.loss, stats.retained_tokens, stats.entropy), full_gradients(learner)


def run_steps(config, hf_dir, steps: list[Step]):
    """`Measured` of several steps on every rank."""
    measured = Measured(config, hf_dir)
    return [measured(step) for step in steps]


def joined(results, number: int):
    """One step's results of all ranks as if one rank had run it."""
    previous: dict[str, np.ndarray] = {}
    gradients: dict[str, np.ndarray] = {}
    for rank in results:
        previous |= rank[number][0]
        gradients |= rank[number][2]
    assert len({rank[number][1] for rank in results}) == 1
    return previous, results[0][number][1], gradients


def assert_same(found, expected, tolerance: float = 1e-5) -> None:
    """Every log-probability, the statistics, and every gradient relative to its largest entry."""
    assert found[0].keys() == expected[0].keys()
    for row_id, values in expected[0].items():
        # Excluded tokens are -inf on both sides.
        np.testing.assert_allclose(found[0][row_id], values, rtol=0, atol=tolerance)
    assert found[1] == pytest.approx(expected[1], abs=tolerance)
    assert_gradients(found[2], expected[2], tolerance)


def assert_gradients(found, expected, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.abs(found[name] - gradient).max()
        assert error <= tolerance * np.abs(gradient).max(), name


def examples_on_a_rank(config, hf_dir):
    """Random forests against their rows, in one process; returns how many there were."""
    measured = Measured(config, hf_dir)
    seen = []

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 10_000), st.booleans(), st.sampled_from([32, 40, 4096]))
    def check(seed: int, across: bool, tokens: int) -> None:
        rollouts = shared_prompts(seed, filtered=True)
        advantages = advantages_of(rollouts)
        tokens = max(tokens, max(r.cum_len for rollout in rollouts for r in rollout.records))
        one_by_one = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
        tree = make_step(rollouts, advantages, forest_shape(across=across, tokens=tokens))
        assert_same(measured(tree), measured(make_step(rollouts, advantages, one_by_one)))
        seen.append(tree.decoded.executed_tokens)

    check()
    return seen


@pytest.mark.requirement("H5", "F5", "F6", "XL12")
def test_random_forests_give_what_their_rows_give(untied):
    config = make_config(**TREES, **STILL, loss_fn__reference_policy_kl_penalty=0.1)
    (seen,) = run_ranks(examples_on_a_rank, config, untied)
    assert len(seen) >= 12


def cases() -> list[list[Rollout]]:
    """A wide forest, equal rollouts with different advantages, and random ones."""
    return [
        [
            random_rollout("x", BRANCHES, seed=1, sampling={"c": {"temperature": 0.6}}),
            random_rollout("y", CHAIN, seed=2),
            random_rollout("z", BRANCHES, seed=1),
        ],
        shared_prompts(5),
        shared_prompts(8),
        [random_rollout("only", (("a", None, 3, 2),), seed=3)],
    ]


@pytest.fixture(scope="module")
def oracles(untied: Path):
    return [
        per_call_oracle(untied, rollouts, advantages_of(rollouts), previous_shift=SHIFT)
        for rollouts in cases()
    ]


def assert_matches_oracle(found, oracle, plan: StepPlan) -> None:
    previous, (loss, tokens, _), gradients = found
    assert loss == pytest.approx(oracle.loss, abs=1e-5)
    assert tokens == oracle.tokens
    assert_gradients(gradients, oracle.gradients)
    for row in plan.rows:
        expected = [
            oracle.logprobs[row.plan.rollout_id, span.call_id]
            for span in row.plan.spans
            if span.owned
        ]
        assert np.abs(previous[row.row_id] - np.concatenate(expected)).max() <= 1e-5


RECOMPUTE = {f"{CFG}activation_checkpointing": True}
LAYOUTS = {
    "one rank": (1, 1, RECOMPUTE),
    "data": (2, 2, {}),
    "data, recompute": (2, 2, RECOMPUTE),
    "tensor": (2, 1, TENSOR),
    "sequence": (2, 1, TENSOR | {f"{CFG}sequence_parallel": True}),
    "pipeline": (2, 1, PIPELINE | RECOMPUTE),
    "context": (2, 1, CONTEXT | RECOMPUTE),
    "context-sequence": (4, 1, TENSOR | CONTEXT | {f"{CFG}sequence_parallel": True}),
}
"""Name -> (ranks, data-parallel ranks, configuration)."""


@pytest.mark.requirement("K4", "F5", "H5", "XF3")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_matches_the_rows_and_the_per_call_oracle(untied, oracles, layout):
    """Wide bins, and bins so small that the forests are cut."""
    ranks, data_parallel, overrides = LAYOUTS[layout]
    steps, plans = [], []
    for rollouts in cases():
        advantages = advantages_of(rollouts)
        longest = max(r.cum_len for rollout in rollouts for r in rollout.records)
        for shape in (
            forest_shape(data_parallel),
            forest_shape(data_parallel, across=False, tokens=longest + 8),
            PackedShape(data_parallel=data_parallel, train_tokens=96, logprob_tokens=96),
        ):
            steps.append(make_step(rollouts, advantages, shape))
            plans.append(steps[-1].decoded)
    assert any(len(plan.train[0]) > 1 for plan in plans[1::3])
    if data_parallel > 1:
        # One rank has nothing to do: a bin of padding.
        assert any(members == () for plan in plans for rank in plan.train for members in rank)
    results = run_ranks(
        run_steps, make_config(**TREES, **STILL, **overrides), untied, steps, ranks=ranks
    )
    for number, plan in enumerate(plans):
        found = joined(results, number)
        rows = joined(results, number - number % 3 + 2)
        if plan.mode == "forest":
            assert_same(found, rows)
            assert_matches_oracle(found, oracles[number // 3], plan)


def test_bfloat16_trains_close_to_float32(untied, oracles):
    step = make_step(cases()[0], advantages_of(cases()[0]), forest_shape())
    config = make_config(**TREES, **STILL, policy__precision="bfloat16")
    (found,) = run_ranks(run_steps, config, untied, [step])
    _, (loss, tokens, _), gradients = found[0]
    assert loss == pytest.approx(oracles[0].loss, abs=0.02)
    assert tokens == oracles[0].tokens
    assert_gradients(gradients, oracles[0].gradients, 0.05)


def projected_positions(config, hf_dir, step):
    """Positions that the output layer projected in one log-probability pass."""
    measured = Measured(config, hf_dir)
    counts = []
    layer = measured.learner.module.output_layer
    layer.register_forward_hook(lambda _, __, output: counts.append(len(output[0])))
    measured.learner.logprobs(step.decoded, step.reader)
    return counts


def test_only_positions_with_an_edge_are_projected(untied):
    step = make_step(cases()[0], advantages_of(cases()[0]), forest_shape())
    (counts,) = run_ranks(projected_positions, make_config(**TREES), untied, step)
    assert counts == [step.decoded.retained_tokens]


def attention_by_each_kernel(rollouts, context_ranks: int):
    """Errors of a trie's attention by parts, its gradients, and of flex attention."""
    import torch
    from megatron_forest_trainer.core.rows import assemble
    from megatron_forest_trainer.data.collate import RowInput
    from megatron_forest_trainer.data.tree import TreeCollator
    from megatron_forest_trainer.model.tree_kernels import attend_masked, attend_parts, visible

    step = make_step(rollouts, advantages_of(rollouts), forest_shape())
    items = [RowInput(assemble(row.plan, step.reader)) for row in step.decoded.rows]
    generator = torch.Generator().manual_seed(0)
    errors = []
    for rank in range(context_ranks):
        collate = TreeCollator(
            across_rollouts=True, multiple=4, context_ranks=context_ranks, context_rank=rank
        )
        tree = collate(items, training=False).packed
        keys = torch.arange(len(tree.last))
        q, k, v = (torch.randn(1, heads, len(keys), 16, generator=generator) for heads in (4, 2, 2))
        inputs = [tensor.requires_grad_() for tensor in (q[:, :, tree.query_index], k, v)]
        weight = torch.randn(inputs[0].shape, generator=generator)

        def with_gradients(output, weight=weight, inputs=inputs):
            return [output, *torch.autograd.grad((output * weight).sum(), inputs)]

        queries = torch.arange(len(tree.query_index))
        allowed = visible(tree.query_index, tree.last)(None, None, queries[:, None], keys[None])
        dense = torch.nn.functional.scaled_dot_product_attention(
            *inputs, attn_mask=allowed, scale=0.3, enable_gqa=True
        )
        by_parts = attend_parts(*inputs, tree.parts, 0.3)
        pairs = list(zip(with_gradients(by_parts), with_gradients(dense), strict=True))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            leaves = [tensor.detach() for tensor in inputs]
            pairs.append((attend_masked(*leaves, tree.block_mask, 0.3), dense))
        errors += [float((found - expected).abs().max()) for found, expected in pairs]
    return errors


@pytest.mark.parametrize("context_ranks", [1, 2])
def test_every_kernel_computes_the_masked_attention(context_ranks):
    """Flex attention runs uncompiled and without gradient: on the CPU it has no backward pass."""
    (errors,) = run_ranks(attention_by_each_kernel, shared_prompts(5), context_ranks)
    assert len(errors) == 5 * context_ranks
    assert max(errors) < 1e-5


def refusals() -> dict[str, str]:
    """What `enable_tree_execution` says of models that cannot run a trie."""
    import torch
    from megatron_forest_trainer.model import parallel
    from megatron_forest_trainer.model.attention import SDPAVarlenAttention
    from megatron_forest_trainer.model.hf_config import UnsupportedModelError
    from megatron_forest_trainer.model.parallel import Parallelism
    from megatron_forest_trainer.model.transformer import build_model, transformer_config
    from megatron_forest_trainer.model.tree import enable_tree_execution

    from tests.trainer.megatron.mixtures import SHAPE
    from tests.trainer.megatron.recurrent import Recurrent

    parallel.initialize(Parallelism(), seed=0)

    def model(trees: bool = True, **overrides):
        config = transformer_config(SHAPE, Parallelism(), overrides=overrides)
        return build_model(SHAPE, config, trees=trees)

    class LinearAttention(torch.nn.Module):
        pass

    linear, positions, predicting = model(), model(), model()
    linear.decoder.layers[1].self_attention = LinearAttention()
    positions.position_embedding_type = "yarn"
    predicting.config.mtp_num_layers = 1
    modules = {
        "accepted": model(),
        "window_size (128, 0)": model(window_size=(128, 0)),
        "softmax_type 'learnable'": model(softmax_type="learnable"),
        "mtp_num_layers 1": predicting,
        "LinearAttention in layer 1": linear,
        f"{SDPAVarlenAttention.__name__} in layer 0": model(trees=False),
        "position_embedding_type 'yarn'": positions,
        "no decoder layers (Recurrent)": Recurrent(),
    }
    found = {}
    for name, module in modules.items():
        try:
            enable_tree_execution(module)
            found[name] = "accepted"
        except UnsupportedModelError as error:
            found[name] = str(error)
    return found


@pytest.mark.requirement("K10")
def test_models_that_cannot_run_a_trie_are_refused_by_what_they_have():
    (found,) = run_ranks(refusals)
    assert found.pop("accepted") == "accepted"
    for name, message in found.items():
        assert f"the loaded model has {name};" in message, message
        assert "policy.forest_execution.enabled" in message


@pytest.mark.requirement("K12")
def test_a_router_counts_every_token_of_the_forest_once(untied):
    rollouts = cases()[-1]
    step = make_step(rollouts, advantages_of(rollouts), forest_shape(2))
    assert any(members == () for rank in step.decoded.train for members in rank)
    counts = run_ranks(expert_load, make_config(**TREES), untied, step, ranks=2)[0]
    assert counts.sum(axis=1).tolist() == [step.decoded.executed_tokens * 2] * 2


@pytest.mark.requirement("K12")
@pytest.mark.parametrize("across", [True, False])
def test_tokens_that_a_cut_repeats_are_counted_once(untied, across):
    rollouts = [random_rollout("x", BRANCHES, seed=1), random_rollout("y", CHAIN, seed=2)]
    longest = max(r.cum_len for rollout in rollouts for r in rollout.records)
    step = make_step(rollouts, advantages_of(rollouts), forest_shape(across=across, tokens=longest))
    unique = sum(record.delta_len for rollout in rollouts for record in rollout.records)
    assert step.decoded.executed_tokens > unique
    (counts,) = run_ranks(expert_load, make_config(**TREES), untied, step)
    assert counts.sum(axis=1).tolist() == [unique * 2] * 2


@pytest.mark.requirement("J1")
def test_rows_continue_what_the_forest_saved(untied, tmp_path):
    """The wrapped rotary embedding changes no name in a checkpoint."""
    rollouts = cases()[0]
    advantages = advantages_of(rollouts)
    packed = PackedShape(data_parallel=1, train_tokens=96, logprob_tokens=96)
    forest, rows = (make_step(rollouts, advantages, shape) for shape in (forest_shape(), packed))
    checkpoint = tmp_path / "checkpoint"
    (expected,) = run_ranks(train_and_save, make_config(**TREES), untied, forest, checkpoint, 2, 2)
    (found,) = run_ranks(resume, make_config(), untied, rows, checkpoint, 2)
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-6)
