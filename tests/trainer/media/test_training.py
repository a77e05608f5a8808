"""A model that sees trains like each call by itself under the transformers library."""

import numpy as np
import pytest
from megatron_forest_trainer.core.plan import BatchShape, FixedShape, PackedShape

from tests.support.distributed import run_ranks
from tests.trainer.media.support import (
    ADVANTAGES,
    rollouts,
    tiny_vision_checkpoint,
    vision_oracle,
)
from tests.trainer.megatron.support import (
    assert_gradients_close,
    make_config,
    make_step,
    run_step,
)

CFG = "policy__megatron_cfg__"
TENSOR = {f"{CFG}tensor_model_parallel_size": 2}
FROZEN = {f"{CFG}freeze_vision_model": True}
SHIFT = 0.1
LAYOUTS = {
    "one-fixed": (1, 1, "fixed", {}),
    "one-packed": (1, 1, "packed", {f"{CFG}activation_checkpointing": True}),
    "data": (2, 2, "fixed", {}),
    "tensor": (2, 1, "packed", TENSOR),
    "sequence": (2, 1, "fixed", TENSOR | {f"{CFG}sequence_parallel": True}),
    "pipeline": (2, 1, "packed", {f"{CFG}pipeline_model_parallel_size": 2}),
    "context-fixed": (2, 1, "fixed", {f"{CFG}context_parallel_size": 2}),
    "context-packed": (2, 1, "packed", {f"{CFG}context_parallel_size": 2}),
    "frozen": (2, 2, "packed", FROZEN),
}
"""Name -> (ranks, data-parallel ranks, form, configuration)."""


def shape_of(form: str, data_parallel: int) -> BatchShape:
    if form == "fixed":
        return FixedShape(data_parallel=data_parallel, train_micro_batch=2, logprob_micro_batch=1)
    return PackedShape(data_parallel=data_parallel, train_tokens=64, logprob_tokens=128)


@pytest.fixture(scope="module")
def oracle(sees):
    return vision_oracle(sees, rollouts(), ADVANTAGES, previous_shift=SHIFT)


@pytest.mark.requirement("B2", "B15", "XM7")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_matches_the_per_call_oracle(sees, oracle, layout):
    assert_matches(sees, oracle, layout)


@pytest.mark.requirement("B2")
def test_a_step_without_images_leaves_the_tower_without_gradient(sees):
    words = rollouts()[2:]
    oracle = vision_oracle(sees, words, ADVANTAGES)
    step = make_step(words, ADVANTAGES, shape_of("fixed", 2))
    results = run_ranks(run_step, make_config(), sees, step, ranks=2)
    found = results[0]["gradients"]
    tower = {name for name in found if name.startswith("visual.")}
    assert tower
    assert not any(found.pop(name).any() for name in tower)
    assert results[0]["stats"]["loss"] == pytest.approx(oracle.loss, abs=1e-6)
    assert_gradients_close(found, oracle.gradients, 1e-5)


@pytest.mark.requirement("B15")
def test_tied_embeddings_take_no_gradient_from_placeholders(tmp_path):
    """The last stage's copy of the embedding trains too; image tokens are not looked up in it."""
    model = tiny_vision_checkpoint(tmp_path / "model", tied=True)
    oracle = vision_oracle(model, rollouts(), ADVANTAGES, previous_shift=SHIFT)
    assert_matches(model, oracle, "pipeline")


def assert_matches(sees, oracle, layout):
    ranks, data_parallel, form, overrides = LAYOUTS[layout]
    step = make_step(rollouts(), ADVANTAGES, shape_of(form, data_parallel))
    results = run_ranks(run_step, make_config(**overrides), sees, step, SHIFT, ranks=ranks)

    gradients = {}
    for result in results:
        assert result["stats"] == results[0]["stats"]
        gradients |= result["gradients"]
    assert results[0]["stats"]["loss"] == pytest.approx(oracle.loss, abs=1e-6)
    expected = oracle.gradients
    if overrides == FROZEN:
        expected = {k: v for k, v in expected.items() if not k.startswith("visual.")}
    assert any(k.startswith("visual.") for k in expected) != (overrides == FROZEN)
    assert_gradients_close(gradients, expected, 1e-5)

    logprobs = {key: value for result in results for key, value in result["previous"].items()}
    for row in step.decoded.rows:
        if row.plan is None:
            continue
        own = [
            oracle.logprobs[row.plan.rollout_id, span.call_id]
            for span in row.plan.spans
            if span.owned
        ]
        assert np.abs(logprobs[row.row_id] - np.concatenate(own)).max() < 1e-5
