"""Running `forest-train` as its user does: a process with a configuration file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.distributed import FORKSERVER
from tests.support.models import REPOSITORY


def write_config(
    directory: Path, *, url: str, token_file: Path, model: Path, **sections: Any
) -> Path:
    """A configuration of a small run, with `sections` merged over it; returns its file."""
    tasks = directory / "tasks.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    tasks.write_text("".join(json.dumps({"say": f"task {n}"}) + "\n" for n in range(4)))
    config: dict[str, Any] = {
        "token_capture": {"enabled": True, "forest_training": True, "pending_wait_s": 10},
        "policy": {
            "model_name": str(model),
            "device": "cpu",
            "precision": "float32",
            "max_total_sequence_length": 4096,
            "generation": {"temperature": 1.0, "max_new_tokens": 8},
            "megatron_cfg": {"optimizer": {"lr": 1e-3, "use_distributed_optimizer": False}},
        },
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2},
        "async_rl": {"max_concurrent_attempts": 4},
        "harness": {"target": "tests.trainer.controller.agents:babble"},
        "server": {"url": url, "control_token_file": str(token_file)},
        "data": {"train": {"data_path": str(tasks)}},
        "logger": {"log_dir": str(directory / "out")},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(_merged(config, sections)))
    return path


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            key: _merged(base[key], value)
            if isinstance(value, dict) and isinstance(base.get(key), dict)
            else value
            for key, value in over.items()
        },
    }


def environment() -> dict[str, str]:
    """Environment of a training process: one thread, and the repository's tests importable."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def command(config: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """The command line."""
    module = ["megatron_forest_trainer.cli", "grpo", "--config", str(config), *overrides]
    if ranks == 1:
        return [sys.executable, "-m", *module]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", "-m", *module,
    ]  # fmt: skip


def train(
    config: Path, *overrides: str, ranks: int = 1, timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run to the end; output is captured."""
    return subprocess.run(
        command(config, *overrides, ranks=ranks),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class ForkedRun:
    """The same command in a process forked from one that has imported everything: seconds less."""

    def __init__(self, config: Path, *overrides: str) -> None:
        self._stderr = config.with_name("stderr.txt")
        self._process = FORKSERVER.Process(
            target=_run, args=(["grpo", "--config", str(config), *overrides], str(self._stderr))
        )
        self._process.start()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout_s: float = 240) -> int:
        """The exit status."""
        self._process.join(timeout_s)
        status = self._process.exitcode
        assert status is not None, self.stderr
        return status

    @property
    def stderr(self) -> str:
        """What it told so far."""
        return self._stderr.read_text()


def _run(arguments: list[str], stderr: str) -> None:
    descriptor = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    from megatron_forest_trainer.cli import app

    app(arguments)
