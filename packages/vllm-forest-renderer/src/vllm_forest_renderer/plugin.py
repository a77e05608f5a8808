"""vLLM general plugin: puts the capture hook around every renderer.

Guarantees: idempotent, cheap (it runs in every vLLM process), and inert for requests that do not
come through the capture routes. An unsupported vLLM is refused here, by name.
"""

import logging
import multiprocessing
import os
from importlib.metadata import entry_points

from vllm_forest_renderer import compat

GENERAL_PLUGIN = "forest_renderer"
ENDPOINT_PLUGIN = "forest_endpoints"

_RENDERER_MODULE = "vllm_forest_renderer.renderer"

logger = logging.getLogger("vllm.forest")
"""A child of vLLM's logger, so that its format and level hold for us."""

wrapped: dict[str, tuple[str, str]] = {}
"""Renderer mode -> (module, class) that was registered before the hook."""


def register() -> None:
    """Entry point `vllm.general_plugins: forest_renderer`. Raises `UnsupportedVllm`."""
    wrap_renderers()
    if multiprocessing.parent_process() is None and (advice := activation_advice()):
        logger.warning("%s", advice)


def wrap_renderers() -> None:
    """Put the hook in front of every registered renderer. Raises `UnsupportedVllm`."""
    compat.check_version()
    registry = compat.RENDERER_REGISTRY
    for mode, (module, class_name) in list(registry.renderers.items()):
        if module != _RENDERER_MODULE:
            wrapped[mode] = (module, class_name)
            # Not `registry.register`: it warns about every overwritten renderer.
            registry.renderers[mode] = (_RENDERER_MODULE, f"Forest_{mode}")


def activation_advice() -> str | None:
    """What to export so that both plugins load; None where both are named already."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = allowed.split(",") if allowed is not None else []
    if {GENERAL_PLUGIN, ENDPOINT_PLUGIN} <= set(names):
        return None
    if allowed is None:
        # Setting the variable switches off every plugin that it does not name.
        names = sorted(
            {
                entry.name
                for group in _plugin_groups()
                for entry in entry_points(group=group)
                if entry.name not in (GENERAL_PLUGIN, ENDPOINT_PLUGIN)
            }
        )
    wanted = [*(n for n in names if n not in (GENERAL_PLUGIN, ENDPOINT_PLUGIN)), GENERAL_PLUGIN,
              ENDPOINT_PLUGIN]  # fmt: skip
    return (
        f"the capture routes are not active; to serve them: export VLLM_PLUGINS={','.join(wanted)}"
    )


def _plugin_groups() -> list[str]:
    return sorted(
        group
        for group in entry_points().groups
        if group.startswith("vllm.") and group.endswith("_plugins")
        and group != "vllm.endpoint_plugins"
    )  # fmt: skip
