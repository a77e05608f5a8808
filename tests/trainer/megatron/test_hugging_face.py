"""Weights come from and go back to Hugging Face directories exactly."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_forest_trainer.model import weight_map
from megatron_forest_trainer.model.hf_config import (
    UnsupportedModelError,
    parse_model_shape,
    read_model_shape,
)
from safetensors.torch import load_file, save_file

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import VOCAB, make_config

CFG = "policy__megatron_cfg__"
TENSOR = {f"{CFG}tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {f"{CFG}sequence_parallel": True}
PIPELINE = {f"{CFG}pipeline_model_parallel_size": 2}
EXPERT = {f"{CFG}expert_model_parallel_size": 2}
EXPERT_TENSOR = SEQUENCE | {f"{CFG}expert_tensor_parallel_size": 2}


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(5))


def logits_and_export(config, hf_dir: Path, target: Path) -> np.ndarray | None:
    """The loaded model's logits on the last stage, and an export of it."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    learner.export_hf(target)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        return None
    positions = torch.arange(40)[None].expand(2, -1)
    with torch.no_grad():
        logits = learner.module(tokens(), positions, None)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :VOCAB].numpy()


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("which", ["untied", "tied"])
@pytest.mark.parametrize(
    ("ranks", "overrides"), [(1, {}), (2, TENSOR), (2, PIPELINE)], ids=["one", "tensor", "pipeline"]
)
def test_logits_agree_and_the_export_is_bit_equal(request, tmp_path, which, ranks, overrides):
    source = request.getfixturevalue(which)
    assert_agrees_and_exports(source, tmp_path / "export", ranks, overrides)


def assert_agrees_and_exports(source, target, ranks, overrides):
    results = run_ranks(logits_and_export, make_config(**overrides), source, target, ranks=ranks)

    before, after = weights_of(source), weights_of(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    copied = {path.name for path in source.iterdir() if path.suffix != ".safetensors"}
    assert copied <= {path.name for path in target.iterdir()}
    assert not list(target.parent.glob(".*.partial"))

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target).float()
    with torch.no_grad():
        expected = model(tokens()).logits.numpy()
    for logits in results:
        if logits is not None:
            assert np.abs(logits - expected).max() < 1e-5


@pytest.mark.requirement("K5")
@pytest.mark.parametrize(
    ("ranks", "overrides", "change"),
    [
        (1, {}, {}),
        (1, {}, {"norm_topk_prob": False}),
        (2, EXPERT, {}),
        (2, PIPELINE, {}),
        (2, SEQUENCE | EXPERT, {}),
        (2, EXPERT_TENSOR, {}),
    ],
    ids=["one", "unscaled", "expert", "pipeline", "tensor", "expert-tensor"],
)
def test_a_mixture_agrees_and_its_export_is_bit_equal(tmp_path, mixture, ranks, overrides, change):
    mixture = shutil.copytree(mixture, tmp_path / "source")
    config = json.loads((mixture / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps(config | change))
    assert_agrees_and_exports(mixture, tmp_path / "export", ranks, overrides)


def test_sharded_checkpoints_are_read_and_large_ones_written_in_shards(
    tmp_path, untied, monkeypatch
):
    sharded = tmp_path / "sharded"
    shutil.copytree(untied, sharded)
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, sharded / file)
        index |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    run_ranks(export_in_small_shards, make_config(), sharded, tmp_path / "export")
    written = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert written["weight_map"].keys() == weights.keys()
    assert len(set(written["weight_map"].values())) > 2
    after = weights_of(tmp_path / "export")
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def export_in_small_shards(config, hf_dir, target):
    from megatron_forest_trainer.learner import Learner
    from megatron_forest_trainer.model import hf_io

    hf_io.MAX_SHARD_BYTES = 20_000
    Learner(config, hf_dir).export_hf(target)


def test_an_export_never_overwrites(tmp_path, untied):
    (tmp_path / "there").mkdir()
    messages = run_ranks(export_error, make_config(), untied, tmp_path / "there", ranks=2)
    assert all("never overwrites" in message for message in messages)


def export_error(config, hf_dir, target) -> str:
    from megatron_forest_trainer.learner import Learner

    try:
        Learner(config, hf_dir).export_hf(target)
    except FileExistsError as error:
        return str(error)
    return "written"


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path, untied):
    broken = tmp_path / "broken"
    shutil.copytree(untied, broken)
    weights = load_file(untied / "model.safetensors")
    cases = {
        "lacks tensor(s) model.norm.weight": lambda w: w.pop("model.norm.weight"),
        "unknown tensor(s) extra.bias": lambda w: w.update({"extra.bias": torch.zeros(1)}),
        "lm_head.weight gives shape": lambda w: w.update({"lm_head.weight": torch.zeros(3, 32)}),
    }
    for message, change in cases.items():
        changed = dict(weights)
        change(changed)
        save_file(changed, broken / "model.safetensors")
        (found,) = run_ranks(load_error, make_config(), broken)
        assert message in found, found


def load_error(config, hf_dir) -> str:
    from megatron_forest_trainer.learner import Learner

    try:
        Learner(config, hf_dir)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.requirement("K5", "K10")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "supports 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_parameters"),
        ({"rope_theta": None, "rope_parameters": {}}, "rope_theta"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_unsupported_models_are_refused_by_field(untied, change, named):
    config = json.loads((untied / "config.json").read_text())
    assert parse_model_shape(config, where="here").num_query_groups == 2
    with pytest.raises(UnsupportedModelError, match="here: ") as error:
        parse_model_shape(config | change, where="here")
    assert named in str(error.value)


def test_config_without_a_file_or_json_says_so(tmp_path):
    with pytest.raises(UnsupportedModelError, match="not readable"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not JSON"):
        read_model_shape(tmp_path)


def test_older_config_spelling_is_read():
    older = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "rope_theta": 1e6,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
    }  # fmt: skip
    shape = parse_model_shape(older, where="here")
    assert (shape.head_dim, shape.rope_theta, shape.dtype) == (16, 1e6, "bfloat16")
    assert not shape.tied_embeddings


def test_weight_layouts_are_exact_inverses(untied):
    shape = read_model_shape(untied)
    weights = load_file(untied / "model.safetensors")
    for layer in range(shape.num_layers):
        for tail in weight_map.layer_parameters(shape):
            name = f"decoder.layers.{layer}.{tail}"
            full = weight_map.merge_parameter(
                name, weights.__getitem__, shape, vocab_rows=shape.vocab_size
            )
            dim = 1 if tail.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
            if full.dim() > 1:
                parts = [
                    weight_map.slice_for_rank(name, full, partition_dim=dim, rank=rank, ranks=2)
                    for rank in range(2)
                ]
                assert torch.equal(weight_map.join_ranks(name, parts, partition_dim=dim), full)
            for key, tensor in weight_map.to_hugging_face(name, full, shape).items():
                assert torch.equal(tensor, weights[key]), key


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight"),
    ],
)
def test_transformer_engine_names_are_the_same_parameters(name, canonical):
    found = weight_map.canonical_name(f"decoder.layers.1.{name}", first_layer=3)
    assert found == f"decoder.layers.4.{canonical}"
