"""What is refused before a server captures, as soon as vLLM shows its configuration.

Guarantees: one check, made when the routes are set up and, where the engine's own arguments carry
Forest settings, already when its renderer is made: vLLM makes it before it starts the engine, so
that a wrong setting costs seconds and not the loading of a model. Nothing else is refused early:
a renderer cannot see what it is made for, and an engine without such settings may be one that is
never asked to capture.
"""

from collections.abc import Mapping
from typing import Any

from vllm_forest_renderer import compat
from vllm_forest_renderer.config import ForestConfig, load_config
from vllm_forest_renderer.extensions import DELTA_SINKS, PREFIX_RESOLVERS, find_extension
from vllm_forest_renderer.plugin import activation_advice


def check_startup(vllm_config: Any) -> ForestConfig:
    """The settings of a server that can capture.

    Raises `UnsupportedVllm`, `ConfigError` or `ExtensionError`, which say what to change.
    """
    compat.check_signatures()
    compat.check_server(vllm_config)
    config = load_config(vllm_config.additional_config)
    find_extension(PREFIX_RESOLVERS, config.prefix_resolver)
    find_extension(DELTA_SINKS, config.delta_sink)
    return config


def will_capture(vllm_config: Any) -> bool:
    """Whether the engine's arguments configure the capture and vLLM will load its routes."""
    settings = vllm_config.additional_config
    return (
        isinstance(settings, Mapping)
        and "forest" in settings
        and activation_advice() is None
        and compat.generates_text(vllm_config.model_config)
    )
