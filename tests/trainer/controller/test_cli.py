"""The command line refuses what cannot run, before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from megatron_forest_trainer.cli import app
from megatron_forest_trainer.config import parse_config
from typer.testing import CliRunner


def test_the_whole_configuration_is_printed_and_loads_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("grpo: {seed: 7}\n")
    shown = CliRunner().invoke(
        app, ["grpo", "--config", str(file), "--print-config", "grpo.max_num_steps=3"]
    )
    assert shown.exit_code == 0
    assert yaml.safe_load(shown.output)["grpo"]["max_num_steps"] == 3
    assert parse_config(shown.output).grpo.seed == 7


@pytest.mark.requirement("K10", "K2")
def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("token_capture: {context_compaction: true}\ngrpo: {sed: 7}\n")
    shown = CliRunner().invoke(app, ["grpo", "--config", str(file)])
    assert shown.exit_code == 1
    assert "token_capture.forest_training: true" in shown.output
    assert "did you mean grpo.seed?" in shown.output
    assert "server.url: is missing" in shown.output


@pytest.mark.requirement("K10")
def test_the_report_of_torchrun_ends_with_the_problems() -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "megatron_forest_trainer", "grpo", "grpo.sed=7",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1
    report = ended.stderr.rpartition("megatron_forest_trainer FAILED")[2]
    assert "traceback : forest-train: the configuration has" in report
    assert "grpo.sed: unknown key; did you mean grpo.seed?" in report
    assert "server.url: is missing" in report
