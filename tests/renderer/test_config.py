"""Settings of the server: sources, types, misspellings."""

import pytest
from vllm_forest_renderer.config import ConfigError, ForestConfig, load_config, unknown_variables


def test_command_line_comes_before_the_environment() -> None:
    environment = {
        "FOREST_STATE_DIR": "/env",
        "FOREST_ALLOW_UNREPRODUCIBLE_SAMPLING": "True",
        "FOREST_REPRODUCIBLE_LOGITS_PROCESSORS": "a:B,c:D",
        "FOREST_MAX_BODY_BYTES": "1024",
    }
    config = load_config({"forest": {"state_dir": "/cli"}, "other": 1}, environment)
    assert config.state_dir == "/cli"
    assert config.store_location == "/cli/store"
    assert config.allow_unreproducible_sampling is True
    assert config.reproducible_logits_processors == ("a:B", "c:D")
    assert config.max_body_bytes == 1024
    assert load_config(None, {}) == ForestConfig()


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("settings", "environment", "message"),
    [
        ({"state_directory": "x"}, {}, "forest.state_directory .* did you mean state_dir"),
        ({"max_body_bytes": "many"}, {}, "max_body_bytes"),
        ({"chat_stream": "fast"}, {}, "chat_stream"),
        ({}, {"FOREST_ALLOW_UNREPRODUCIBLE_SAMPLING": "yes"}, "must be true or false"),
        ([], {}, "must be an object"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: object, environment: dict[str, str],
                                            message: str) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        load_config({"forest": settings}, environment)


def test_misspelt_variables_are_reported() -> None:
    environment = {"FOREST_STATE_DIRS": "x", "FOREST_STATE_DIR": "y", "FOREST_RUN": "z"}
    assert unknown_variables(environment) == ["FOREST_STATE_DIRS (did you mean FOREST_STATE_DIR?)"]


@pytest.mark.requirement("K10")
def test_a_misspelt_section_is_refused_and_other_plugins_settings_are_not() -> None:
    for name in ("forrest", "Forest", "forests"):
        with pytest.raises(ConfigError, match=f"additional_config.{name} .* did you mean forest"):
            load_config({name: {"state_dir": "/x"}}, {})
    assert load_config({"other_plugin": {}, "rest": 1}, {}) == ForestConfig()
    assert load_config({"forest": {"state_dir": "/x"}, "forest2": {}}, {}).state_dir == "/x"
