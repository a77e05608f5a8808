"""The training guide says what the code does."""

import re

from megatron_forest_trainer.config.load import key_paths
from megatron_forest_trainer.config.schema import Config

from tests.support.models import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "training.md").read_text()


def test_every_key_that_the_guide_names_exists() -> None:
    leaves = key_paths(Config)
    known = {*leaves, *(key.rpartition(".")[0] for key in leaves)}
    sections = {key.partition(".")[0] for key in leaves}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[=:][^`]*)?`", GUIDE)
    keys = {name for name in named if name.partition(".")[0] in sections}
    assert keys
    assert sorted(keys - known) == []
