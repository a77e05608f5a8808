"""Weights, configuration and checkpoints of a model that sees."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forest_schema import TensorRef
from megatron_forest_trainer.core.plan import FixedShape
from megatron_forest_trainer.model.hf_config import UnsupportedModelError, parse_model_shape
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.distributed import run_ranks
from tests.trainer.media.support import ADVANTAGES, rollouts
from tests.trainer.megatron.support import (
    MemoryReader,
    Step,
    make_config,
    make_step,
    resume,
    train_and_save,
)

CFG = "policy__megatron_cfg__"
TENSOR = {f"{CFG}tensor_model_parallel_size": 2}
PIPELINE = {f"{CFG}pipeline_model_parallel_size": 2}


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def step_of(data_parallel: int) -> Step:
    shape = FixedShape(data_parallel=data_parallel, train_micro_batch=1, logprob_micro_batch=1)
    return make_step(rollouts(), ADVANTAGES, shape)


def export(config, hf_dir, target, step):
    """Export, after a training step where one is given; the names of what can train."""
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    if step is not None:
        learner.logprobs(step.decoded, step.reader)
        learner.train_step(step.decoded, step.reader)
    learner.export_hf(target)
    return [name for name, p in learner.module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("ranks", "overrides"), [(1, {}), (2, TENSOR), (2, PIPELINE)], ids=["one", "tensor", "pipeline"]
)
def test_the_export_is_bit_equal(sees, tmp_path, ranks, overrides):
    target = tmp_path / "export"
    run_ranks(export, make_config(**overrides), sees, target, None, ranks=ranks)
    before, after = weights_of(sees), weights_of(target)
    assert before.keys() == after.keys()
    assert any(name.startswith("visual.") for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_tower_trains_unless_it_is_frozen(sees, tmp_path, freeze):
    target = tmp_path / "export"
    config = make_config(**{f"{CFG}freeze_vision_model": freeze})
    (names,) = run_ranks(export, config, sees, target, step_of(1))
    assert any(name.startswith("vision_model.") for name in names) != freeze
    before, after = weights_of(sees), weights_of(target)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    tower = {name for name in before if name.startswith("visual.")}
    assert changed & tower == (set() if freeze else tower)
    assert changed - tower == before.keys() - tower


@pytest.mark.parametrize(
    ("name", "tensor"), [("visual.extra", torch.zeros(1)), ("visual.merger.ln_q.weight", None)]
)
def test_missing_and_unknown_tensors_of_the_tower_are_named(sees, tmp_path, name, tensor):
    broken = tmp_path / "broken"
    shutil.copytree(sees, broken)
    weights = load_file(sees / "model.safetensors")
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    save_file(weights, broken / "model.safetensors")
    (message,) = run_ranks(load_error, make_config(), broken)
    assert "missing or unknown" in message
    assert name in message


def load_error(config, hf_dir) -> str:
    from megatron_forest_trainer.learner import Learner

    try:
        Learner(config, hf_dir)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_holds_the_tower_too(sees, tmp_path):
    """Resumed under another layout, training goes on as if it had not stopped."""
    directory = tmp_path / "checkpoint"
    step = step_of(1)
    uninterrupted = run_ranks(
        train_and_save, make_config(**TENSOR), sees, step, directory, 1, 2, ranks=2
    )
    (resumed,) = run_ranks(resume, make_config(), sees, step, directory, 2)
    for found, expected in zip(resumed, uninterrupted[0], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@dataclass
class RecordingReader:
    """Remembers which deltas were read."""

    reader: MemoryReader
    keys: set[str] = field(default_factory=set)

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        self.keys.add(ref.key)
        return self.reader.read(ref)


def keys_read(config, hf_dir, step):
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    reader = RecordingReader(step.reader)
    learner.logprobs(step.decoded, reader)
    learner.train_step(step.decoded, reader)
    return reader.keys


@pytest.mark.requirement("B15")
def test_a_rank_reads_the_pixels_of_its_own_rows_only(sees):
    step = step_of(2)
    plan = step.decoded
    found = run_ranks(keys_read, make_config(), sees, step, ranks=2)
    for rank, keys in enumerate(found):
        own = [plan.rows[index].plan for members in plan.train[rank] for index in members]
        assert keys == {call.delta.key for row in own if row for call in row.path}
    assert found[0] != found[1]


def test_published_configurations_are_read(sees):
    """Fields of the decoder at the top, `rope_scaling`, no section for the text."""
    config = json.loads((sees / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    older = {
        **text,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    newer = json.loads((sees / "config.json").read_text())
    assert parse_model_shape(older, where="here") == parse_model_shape(newer, where="here")
    shape = parse_model_shape(newer, where="here")
    assert (shape.qkv_bias, shape.qk_norm, shape.head_dim) == (True, False, 8)
    assert shape.vision is not None
    assert (shape.vision.merge_size, shape.vision.patch_values) == (2, 96)


@pytest.mark.requirement("K5", "K10")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vision_config": None}, "vision_config is None"),
        ({"vision_config": {"out_hidden_size": 16}}, "vision_config: out_hidden_size is 16"),
        ({"image_token_id": None}, "image_token_id"),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 2, 2]}}, "the sum 4"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "default or mrope"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_unsupported_models_are_refused_by_field(sees, change, named):
    config = json.loads((sees / "config.json").read_text())
    text = change.keys() & config["text_config"].keys()
    config["text_config"] |= {key: change[key] for key in text}
    config |= {key: change[key] for key in change.keys() - text}
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_shape(config, where="here")
    assert named in str(error.value)


def test_bfloat16_keeps_the_rotary_frequencies_of_the_tower(sees):
    (found,) = run_ranks(tower_types, make_config(policy__precision="bfloat16"), sees)
    assert found == ({"bfloat16"}, {"float32"})


def tower_types(config, hf_dir):
    from megatron_forest_trainer.learner import Learner

    tower = Learner(config, hf_dir).module.vision_model
    names = [
        {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        for tensors in (tower.parameters(), tower.buffers())
    ]
    return tuple(names)


def test_logprobs_in_bfloat16_stay_near_float32(sees):
    step = step_of(1)
    exact, rounded = (
        run_ranks(logprobs, make_config(policy__precision=precision), sees, step)[0]
        for precision in ("float32", "bfloat16")
    )
    for row_id, values in exact.items():
        assert np.abs(rounded[row_id] - values).max() < 0.2


def logprobs(config, hf_dir, step):
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    learner.logprobs(step.decoded, step.reader)
    return learner._previous
