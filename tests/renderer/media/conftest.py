"""One real engine with a vision-language model for the session."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import EngineServer, scripted_engine
from tests.support.episodes import Episode
from tests.support.vision import vision_dir


@pytest.fixture(scope="session")
def vision_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision-engine") / "prompts.jsonl"


@pytest.fixture(scope="session")
def vision_server(
    vision_prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    with scripted_engine(
        vision_dir(),
        tmp_path_factory.mktemp("vision-state"),
        "--limit-mm-per-prompt", '{"image": 16, "video": 0}',
        prompts_file=vision_prompts,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def episode(vision_server: EngineServer, tokenizer: Any, vision_prompts: Path) -> Episode:
    return Episode(vision_server, tokenizer, vision_prompts)
