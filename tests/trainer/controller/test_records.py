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
from megatron_forest_trainer.logging_.step_line import step_line


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


@pytest.mark.requirement("L3")
def test_the_console_line_of_a_step_is_read_at_a_glance() -> None:
    record = {
        "step": 12,
        "reward/mean": 0.5123,
        "loss": -0.01234,
        "kl": 0.0,
        "entropy": 1.5,
        "gen_kl_error": 1.234e-13,
        "token_mult_prob_error": 1.0000012,
        "retained_tokens": 123456.0,
        "step_seconds": 123.45,
        "finalize/masked_rollouts": 1.0,
        "dropped_prompt_groups": 2,
    }
    line = step_line(record, 100)
    assert line == (
        "step 12/100 | reward: 0.512 | loss: -1.23e-02 | gen KL: 1.2e-13 | TMPE: 1.00000 | "
        "tokens: 123456 | time: 123.5 s | masked: 1 | dropped: 2"
    )
    assert "loss: -1.23e-02 | kl: 2.5e-03 | gen KL" in step_line({**record, "kl": 0.0025}, 100)
    # Nobody gave a reward.
    assert step_line({**record, "reward/mean": None}, 100).startswith("step 12/100 | loss")
