"""A server that cannot capture is refused before it starts an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_forest_renderer import startup

from tests.support.engine import PLUGINS, server_arguments
from tests.support.thread_server import free_port

START_SECONDS = 400
ENGINE_STARTS = "Initializing a V1 LLM engine"
"""What the engine core logs before it loads the model."""


def start(model: Path, forest: Any, *extra: str) -> str:
    """Log of a stock server process that must not come up."""
    settings = ["--additional-config", json.dumps({"forest": forest})]
    ended = subprocess.run(
        [
            sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry",
            *server_arguments(model, free_port()), *settings, *extra,
        ],
        env={**os.environ, "VLLM_PLUGINS": PLUGINS, "VLLM_LOGGING_LEVEL": "INFO"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=START_SECONDS,
    )  # fmt: skip
    assert ended.returncode != 0
    return ended.stdout


@pytest.mark.smoke
@pytest.mark.timeout(START_SECONDS)
@pytest.mark.requirement("K10", "C22")
@pytest.mark.parametrize(
    ("forest", "extra", "message"),
    [
        ({"state_directory": "/x"}, [], "forest.state_directory is not a setting; did you mean"),
        ({"delta_sink": "tape"}, [], "no vllm_forest_renderer.delta_sinks entry point is named"),
        ({}, ["--logprobs-mode", "raw_logprobs"], "--logprobs-mode processed_logprobs (it is raw"),
    ],
)
def test_wrong_settings_are_refused_before_the_engine_starts(
    qwen3_dir: Path, tmp_path: Path, forest: dict[str, str], extra: list[str], message: str
) -> None:
    log = start(qwen3_dir, {"state_dir": str(tmp_path / "state"), **forest}, *extra)
    assert message in log, log
    assert ENGINE_STARTS not in log
    assert not (tmp_path / "state").exists()


@pytest.mark.timeout(START_SECONDS)
@pytest.mark.requirement("K10")
def test_what_only_the_running_server_shows_is_refused_after_the_engine_started(
    qwen3_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    log = start(qwen3_dir, {"state_dir": str(tmp_path / "taken")})
    assert f"File exists: '{tmp_path / 'taken'}'" in log, log
    assert ENGINE_STARTS in log


def server(additional_config: Any = None, **model: Any) -> Any:
    registry = SimpleNamespace(is_transcription_only_model=lambda names, _: "Whisper" in names)
    return SimpleNamespace(
        additional_config=additional_config,
        model_config=SimpleNamespace(
            **{"runner_type": "generate", "architectures": ["Qwen3"], "registry": registry, **model}
        ),
    )


@pytest.mark.requirement("A32", "K10")
def test_only_an_engine_that_is_configured_to_capture_is_checked_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"forest": {}}
    monkeypatch.setenv("VLLM_PLUGINS", PLUGINS)
    assert startup.will_capture(server(settings))
    assert not startup.will_capture(server())
    assert not startup.will_capture(server({"other": {}}))
    assert not startup.will_capture(server(settings, runner_type="pooling"))
    assert not startup.will_capture(server(settings, architectures=["Whisper"]))
    monkeypatch.setenv("VLLM_PLUGINS", "forest_renderer")
    assert not startup.will_capture(server(settings))
    monkeypatch.delenv("VLLM_PLUGINS")
    assert not startup.will_capture(server(settings))
