"""The checkpoint that the image tests share."""

from pathlib import Path

import pytest

from tests.trainer.media.support import tiny_vision_checkpoint


@pytest.fixture(scope="session")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("sees") / "model")
