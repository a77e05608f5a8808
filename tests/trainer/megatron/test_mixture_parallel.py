"""Every parallel layout of a mixture gives the loss and gradients of the per-call oracle."""

import json

import pytest
from megatron_forest_trainer.model.hf_config import (
    MixtureShape,
    UnsupportedModelError,
    parse_model_shape,
    read_model_shape,
)
from megatron_forest_trainer.model.parallel import Parallelism
from megatron_forest_trainer.model.transformer import transformer_config

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import make_config, make_step, per_call_oracle, run_step
from tests.trainer.megatron.test_parallel import (
    ADVANTAGES,
    CFG,
    PIPELINE,
    SHIFT,
    TENSOR,
    assert_matches_oracle,
    rollouts,
    shape_of,
)

SEQUENCE = TENSOR | {f"{CFG}sequence_parallel": True}
EXPERT_TENSOR = SEQUENCE | {f"{CFG}expert_tensor_parallel_size": 2}
EXPERT = {f"{CFG}expert_model_parallel_size": 2}
LAYOUTS = {
    "one": (1, 1, "fixed", {}),
    "expert-fixed": (2, 2, "fixed", EXPERT),
    "expert-packed": (2, 2, "packed", EXPERT),
    "data-recompute": (2, 2, "packed", {f"{CFG}activation_checkpointing": True}),
    "pipeline": (2, 1, "packed", PIPELINE),
    "sequence-expert": (2, 1, "packed", SEQUENCE | EXPERT),
    "expert-tensor": (2, 1, "fixed", EXPERT_TENSOR),
}
"""Name -> (ranks, data-parallel ranks, form, configuration)."""


@pytest.fixture(scope="module")
def oracle(mixture):
    return per_call_oracle(mixture, rollouts(), ADVANTAGES, previous_shift=SHIFT)


@pytest.mark.requirement("K4", "K5", "F5", "H5")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_matches_the_per_call_oracle(mixture, oracle, layout):
    ranks, data_parallel, form, overrides = LAYOUTS[layout]
    step = make_step(rollouts(), ADVANTAGES, shape_of(form, data_parallel))
    results = run_ranks(run_step, make_config(**overrides), mixture, step, SHIFT, ranks=ranks)
    assert_matches_oracle(results, oracle)


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(tensor=2), "needs sequence_parallel: true"),
        (Parallelism(tensor=2, sequence_parallel=True), "needs expert_tensor_parallel_size 2"),
        (Parallelism(expert=3), r"4 expert\(s\) do not divide over expert_model_parallel_size 3"),
    ],
)
def test_layouts_that_would_train_experts_wrongly_are_refused(mixture, parallelism, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(read_model_shape(mixture), parallelism)


@pytest.mark.requirement("K10")
def test_experts_need_experts(untied):
    with pytest.raises(ValueError, match=r"1 expert\(s\) do not divide"):
        transformer_config(read_model_shape(untied), Parallelism(expert=2))


@pytest.mark.requirement("K5", "K10")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts_per_tok": 5}, "at most num_local_experts (4)"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_unsupported_mixtures_are_refused_by_field(mixture, change, named):
    config = json.loads((mixture / "config.json").read_text())
    assert parse_model_shape(config, where="here").mixture == MixtureShape(
        experts=4, top_k=2, ffn_hidden_size=24, normalized=True
    )
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_shape(config | change, where="here")
    assert named in str(error.value)
