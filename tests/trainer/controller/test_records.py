"""Step records on disk."""

import json
import math
from pathlib import Path

import pytest
from megatron_forest_trainer.logging_.records import (
    RECORDS_FILE,
    JsonLinesWriter,
    TensorBoardWriter,
    read_records,
)


@pytest.mark.requirement("L3")
def test_records_are_one_json_object_per_step(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path, first_step=0)
    writer.write({"step": 0, "reward/mean": 0.5})
    writer.write({"step": 1, "reward/mean": math.nan, "weight_version": "step-1"})
    writer.close()
    assert [json.loads(line) for line in (tmp_path / RECORDS_FILE).read_text().splitlines()] == [
        {"step": 0, "reward/mean": 0.5},
        {"step": 1, "reward/mean": None, "weight_version": "step-1"},
    ]


@pytest.mark.requirement("J1")
def test_a_resumed_run_drops_the_records_of_the_steps_it_repeats(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path, first_step=0)
    for step in range(4):
        writer.write({"step": step, "try": 1})
    writer.close()
    with (tmp_path / RECORDS_FILE).open("a") as file:
        file.write('{"step": 4, "tr')  # a kill in the middle of a write
    resumed = JsonLinesWriter(tmp_path, first_step=2)
    resumed.write({"step": 2, "try": 2})
    resumed.close()
    assert [(r["step"], r["try"]) for r in read_records(tmp_path)] == [(0, 1), (1, 1), (2, 2)]


def test_tensorboard_holds_the_finite_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path, first_step=0)
    writer.write({"step": 3, "reward/mean": 0.25, "loss": math.inf, "weight_version": "step-3"})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.25)]
