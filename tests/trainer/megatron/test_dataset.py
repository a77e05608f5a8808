"""Forests as a Megatron dataset, alone and inside a plain Megatron loop."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forest_schema.shards import encode_shard
from megatron_forest_trainer.core.plan import FixedShape

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    make_step,
    random_rollout,
)

ADVANTAGES = {"x": 1.0, "y": -0.5, "z": 0.5}
EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron_lm" / "train.py"


def rollouts():
    return [
        random_rollout("x", BRANCHES, seed=1, group_id="g0"),
        random_rollout("y", CHAIN, seed=2, group_id="g1"),
        random_rollout("z", CHAIN, seed=3, group_id="g2"),
    ]


@pytest.fixture
def captured(tmp_path):
    """(forest file, store folder) of three prompt groups."""
    shape = FixedShape(data_parallel=1, train_micro_batch=2, logprob_micro_batch=2)
    step = make_step(rollouts(), ADVANTAGES, shape)
    folder = tmp_path / "store" / "p"
    folder.mkdir(parents=True)
    shard = encode_shard(step.reader.deltas, store="s", partition="p")
    (folder / "0.safetensors").write_bytes(shard)
    run_ranks(write_file, step, tmp_path / "groups.jsonl")
    return tmp_path / "groups.jsonl", tmp_path / "store"


def write_file(step, path):
    from megatron_forest_trainer.data.dataset import groups_of, write_forest_file

    write_forest_file(path, groups_of(step.decoded))


def read_dataset(path, store, cache, sizes, split):
    """(group id, row ids, owned tokens) of every item of every split."""
    import torch.distributed as dist
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron_forest_trainer.data.dataset import ForestDataset, ForestDatasetConfig

    dist.init_process_group("gloo")
    config = ForestDatasetConfig(
        random_seed=1,
        sequence_length=128,
        blend=([str(path)], None),
        split=split,
        path_to_cache=str(cache),
        store_path=str(store),
    )
    built = BlendedMegatronDatasetBuilder(ForestDataset, sizes, lambda: True, config).build()
    return [
        None
        if dataset is None
        else [
            (
                item["group_id"],
                [row.row.plan.row_id for row in item["rows"]],
                [row.row.tokens_T[row.row.loss_mask_T] for row in item["rows"]],
                [row.previous_N for row in item["rows"]],
            )
            for item in (dataset[index] for index in range(len(dataset)))
        ]
        for dataset in built
    ]


@pytest.mark.requirement("G3", "F12")
def test_items_are_whole_prompt_groups(captured, tmp_path):
    path, store = captured
    (found,) = run_ranks(read_dataset, path, store, tmp_path / "cache", [None] * 3, "1,0,0")
    train, *others = found
    assert others == [None, None]
    assert {group for group, *_ in train} == {"g0", "g1", "g2"}
    rows = {group: ids for group, ids, *_ in train}
    assert len(rows["g0"]) == 4
    assert rows["g1"] == ["g1/y/s0"]
    generated = {
        "x": [5 + 4, 3, 7 + 2, 6],
        "y": [13],
        "z": [13],
    }
    for group, ids, tokens, previous in train:
        name = ids[0].split("/")[1]
        assert [len(values) for values in tokens] == generated[name], group
        assert [len(values) for values in previous] == generated[name]
        assert all(np.all(values < 0) for values in previous)


@pytest.mark.requirement("J3")
def test_another_schema_version_is_refused(captured, tmp_path):
    path, store = captured
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(msgspec.json.encode(line | {"schema": 4}) + b"\n" for line in lines))
    (message,) = run_ranks(read_error, path, store, tmp_path / "cache")
    assert "schema version 4 is not supported" in message


def read_error(path, store, cache) -> str:
    try:
        read_dataset(path, store, cache, [None] * 3, "1,0,0")
    except ValueError as error:
        return str(error)
    return "read"


@pytest.mark.requirement("G15", "H8")
def test_example_trains_inside_a_plain_megatron_loop(captured, tmp_path, untied):
    path, store = captured
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLE), "--cpu", "--model", str(untied),
        "--forests", str(path), "--store", str(store), "--cache", str(tmp_path / "cache"),
        "--export", str(tmp_path / "trained"), "--steps", "3", "--groups-per-step", "3",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"loss (-?[\d.]+)", result.stdout)]
    assert len(losses) == 3
    assert (tmp_path / "trained" / "model.safetensors").is_file()
