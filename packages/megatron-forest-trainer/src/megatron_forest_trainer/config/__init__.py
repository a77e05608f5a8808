"""Configuration of a training run: one typed model, loaded from YAML and dotted overrides."""

from megatron_forest_trainer.config.load import (
    ConfigError,
    Problem,
    config_from_mapping,
    config_to_yaml,
    load_config,
    parse_config,
)
from megatron_forest_trainer.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "config_from_mapping",
    "config_to_yaml",
    "load_config",
    "parse_config",
]
