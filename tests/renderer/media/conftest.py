"""One real engine with a vision-language model for the session."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import EngineServer
from tests.support.episodes import Episode
from tests.support.vision import vision_dir

FORCED = "tests.support.forced:Forced"


@pytest.fixture(scope="session")
def vision_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision-engine") / "prompts.jsonl"


@pytest.fixture(scope="session")
def vision_server(
    vision_prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    os.environ["FORCED_PROMPTS_FILE"] = str(vision_prompts)
    with EngineServer(
        vision_dir(),
        "--limit-mm-per-prompt", '{"image": 16, "video": 0}',
        "--logits-processors", FORCED,
        forest={
            "state_dir": str(tmp_path_factory.mktemp("vision-state")),
            "reproducible_logits_processors": [FORCED],
        },
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def episode(vision_server: EngineServer, tokenizer: Any, vision_prompts: Path) -> Episode:
    return Episode(vision_server, tokenizer, vision_prompts)
