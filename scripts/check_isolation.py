"""Run inside a fresh environment: one wheel is installed, the other side is absent.

Guarantees: exits non-zero unless the wheel's modules import, its entry points are found by name
and load, and the other side's packages are really missing.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from importlib.metadata import entry_points

SIDES = {
    "serving": {
        "package": "vllm_forest_renderer",
        "absent": ("megatron", "megatron_forest_trainer"),
        "entry_points": {
            "vllm.general_plugins": ("forest_renderer",),
            "vllm.endpoint_plugins": ("forest_endpoints",),
            "vllm_forest_renderer.prefix_resolvers": ("source_history",),
            "vllm_forest_renderer.delta_sinks": ("safetensors",),
        },
    },
    "training": {
        "package": "megatron_forest_trainer",
        "absent": ("vllm", "vllm_forest_renderer"),
        "entry_points": {
            "megatron_forest_trainer.selection_policies": ("returned_history",),
            "megatron_forest_trainer.harnesses": ("simple_agent_with_compaction",),
        },
    },
}


def check_registration() -> None:
    """Load the plugins as vLLM does and check what they registered."""
    os.environ["VLLM_PLUGINS"] = "forest_renderer,forest_endpoints"
    from vllm.plugins import load_general_plugins
    from vllm.renderers.registry import RENDERER_REGISTRY

    load_general_plugins()
    renderer = RENDERER_REGISTRY.load_renderer_cls("hf")
    bases = [base.__module__ for base in renderer.__mro__]
    if not any(module.startswith("vllm_forest_renderer") for module in bases):
        sys.exit(f"the hf renderer is {renderer}, which the plugin did not wrap")


def main(side: str) -> None:
    """Check the side that is installed here."""
    expected = SIDES[side]
    for name in expected["absent"]:
        if importlib.util.find_spec(name) is not None:
            sys.exit(f"{name} is installed: this environment is not isolated")
    package = importlib.import_module(expected["package"])
    modules = [
        module.name
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.endswith("__main__")
    ]
    for module in modules:
        importlib.import_module(module)
    for group, names in expected["entry_points"].items():
        found = {point.name: point for point in entry_points(group=group)}
        for name in names:
            if name not in found:
                sys.exit(f"entry point {group}:{name} is missing")
            found[name].load()
    if side == "serving":
        check_registration()
    print(f"{side}: {len(modules)} modules import, entry points load")


if __name__ == "__main__":
    main(sys.argv[1])
