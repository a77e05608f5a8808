"""Checkpoints that the Megatron tests share."""

from pathlib import Path

import pytest

from tests.trainer.megatron.support import tiny_checkpoint, tiny_mixture


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("untied") / "model")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mixture(tmp_path_factory.mktemp("mixture") / "model")
