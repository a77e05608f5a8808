"""Every parallel layout gives the loss and gradients of the per-call oracle."""

from pathlib import Path

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

ADVANTAGES = {"x": 1.0, "y": -0.5}
SHIFT = 0.1
CFG = "policy__megatron_cfg__"
TENSOR = {f"{CFG}tensor_model_parallel_size": 2}
PIPELINE = {f"{CFG}pipeline_model_parallel_size": 2}
CONTEXT = {f"{CFG}context_parallel_size": 2}
LAYOUTS = {
    "tensor": (2, 1, TENSOR),
    "sequence": (2, 1, TENSOR | {f"{CFG}sequence_parallel": True}),
    "pipeline": (2, 1, PIPELINE),
    "context": (2, 1, CONTEXT),
    "recompute": (2, 2, {f"{CFG}activation_checkpointing": True}),
    "tensor-pipeline": (4, 1, TENSOR | PIPELINE),
    "context-sequence": (4, 1, TENSOR | CONTEXT | {f"{CFG}sequence_parallel": True}),
    "data-pipeline": (4, 2, PIPELINE),
}
"""Name -> (ranks, data-parallel ranks, configuration)."""


def rollouts():
    return [
        random_rollout(
            "x",
            BRANCHES,
            seed=1,
            sampling={"c": {"temperature": 0.6}},
        ),
        random_rollout("y", CHAIN, seed=2),
    ]


def shape_of(form: str, data_parallel: int) -> BatchShape:
    if form == "fixed":
        return FixedShape(data_parallel=data_parallel, train_micro_batch=2, logprob_micro_batch=1)
    return PackedShape(data_parallel=data_parallel, train_tokens=48, logprob_tokens=96)


@pytest.fixture(scope="module")
def oracles(untied: Path, tied: Path):
    return {
        directory: per_call_oracle(directory, rollouts(), ADVANTAGES, previous_shift=SHIFT)
        for directory in (untied, tied)
    }


def assert_matches_oracle(results, oracle) -> None:
    gradients = {}
    for result in results:
        assert result["stats"] == results[0]["stats"]
        gradients |= result["gradients"]
    assert results[0]["stats"]["loss"] == pytest.approx(oracle.loss, abs=1e-6)
    assert results[0]["stats"]["retained_tokens"] == oracle.tokens
    assert_gradients_close(gradients, oracle.gradients, 1e-5)


@pytest.mark.requirement("K4", "L2", "F5", "H5")
@pytest.mark.parametrize("form", ["fixed", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_matches_the_per_call_oracle(untied, oracles, layout, form):
    ranks, data_parallel, overrides = LAYOUTS[layout]
    step = make_step(rollouts(), ADVANTAGES, shape_of(form, data_parallel))
    results = run_ranks(run_step, make_config(**overrides), untied, step, SHIFT, ranks=ranks)
    assert_matches_oracle(results, oracles[untied])


@pytest.mark.requirement("K4")
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "tensor-pipeline"])
def test_tied_embeddings_match_the_per_call_oracle(tied, oracles, layout):
    ranks, data_parallel, overrides = LAYOUTS[layout]
    step = make_step(rollouts(), ADVANTAGES, shape_of("packed", data_parallel))
    results = run_ranks(run_step, make_config(**overrides), tied, step, SHIFT, ranks=ranks)
    assert_matches_oracle(results, oracles[tied])


@pytest.mark.requirement("H8")
def test_distributed_optimizer_takes_the_same_step(untied):
    step = make_step(rollouts(), ADVANTAGES, shape_of("packed", 2))
    plain, sharded = (
        run_ranks(
            exported_step,
            make_config(**{f"{CFG}optimizer__use_distributed_optimizer": distributed}),
            untied,
            step,
            ranks=2,
        )
        for distributed in (False, True)
    )
    for name, weight in plain[0].items():
        assert abs(sharded[0][name] - weight).max() < 1e-6, name


@pytest.mark.requirement("H8")
@pytest.mark.parametrize("distributed", [False, True])
def test_bfloat16_trains_close_to_float32(untied, oracles, distributed):
    step = make_step(rollouts(), ADVANTAGES, shape_of("packed", 2))
    config = make_config(
        policy__precision="bfloat16",
        **{f"{CFG}optimizer__use_distributed_optimizer": distributed},
    )
    results = run_ranks(run_step, config, untied, step, SHIFT, ranks=2)
    oracle = oracles[untied]
    assert results[0]["stats"] == results[1]["stats"]
    assert results[0]["stats"]["loss"] == pytest.approx(oracle.loss, abs=0.02)
    assert results[0]["stats"]["retained_tokens"] == oracle.tokens


def exported_step(config, hf_dir, step):
    """Two optimizer steps; the weights under Hugging Face names."""
    from megatron_forest_trainer.learner import Learner
    from megatron_forest_trainer.model.hf_io import _export_tensors

    learner = Learner(config, hf_dir)
    for _ in range(2):
        learner.logprobs(step.decoded, step.reader)
        learner.train_step(step.decoded, step.reader)
    import torch

    return {
        name: tensor.numpy()
        for name, tensor in _export_tensors(learner.module, learner.shape, torch.float32)
    }


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("ranks", "overrides", "key"),
    [
        (1, TENSOR, "tensor_model_parallel_size"),
        (3, TENSOR, "tensor_model_parallel_size"),
        (1, {f"{CFG}sequence_parallel": True}, "sequence_parallel"),
        (4, {f"{CFG}pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size"),
        (4, {f"{CFG}tensor_model_parallel_size": 4}, "tensor_model_parallel_size"),
        (1, {"policy__device": "cuda"}, "policy.device"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_key(untied, ranks, overrides, key):
    messages = run_ranks(refusal, make_config(**overrides), untied, ranks=ranks)
    assert all(key in message for message in messages)


def refusal(config, hf_dir) -> str:
    from megatron_forest_trainer.learner import Learner

    try:
        Learner(config, hf_dir)
    except ValueError as error:
        return str(error)
    return "accepted"
