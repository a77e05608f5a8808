"""One real engine for the whole session, with Qwen3's tokenizer and template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import EngineServer, scripted_engine
from tests.support.episodes import Episode
from tests.support.models import CACHE, load_qwen3_tokenizer, make_qwen3_model


@pytest.fixture(scope="session")
def qwen3_dir() -> Path:
    directory = CACHE / "qwen3-tiny-untied"
    if not (directory / "model.safetensors").is_file():
        make_qwen3_model(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_qwen3_tokenizer()


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "prompts.jsonl"


@pytest.fixture(scope="session")
def server(
    qwen3_dir: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    with scripted_engine(
        qwen3_dir,
        tmp_path_factory.mktemp("state"),
        "--reasoning-parser", "qwen3",
        "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes",
        prompts_file=prompts_file,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def episode(server: EngineServer, tokenizer: Any, prompts_file: Path) -> Episode:
    return Episode(server, tokenizer, prompts_file)
