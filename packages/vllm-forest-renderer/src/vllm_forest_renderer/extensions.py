"""Entry-point groups through which other packages extend the server.

Guarantees: the built-ins are found the same way as a third party's; a name that two distributions
register is refused with both named; an unknown name is refused with the known ones listed.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

PREFIX_RESOLVERS = "vllm_forest_renderer.prefix_resolvers"
DELTA_SINKS = "vllm_forest_renderer.delta_sinks"
MEDIA_REMAPPERS = "vllm_forest_renderer.media_remappers"


class ExtensionError(ValueError):
    """An extension that cannot be loaded."""


def _origin(entry: EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist is not None else "unknown distribution"
    return f"{distribution} ({entry.value})"


def find_extension(group: str, name: str) -> EntryPoint:
    """The one entry point `name` of `group`, not loaded. Raises `ExtensionError`."""
    # One distribution that is visible twice on sys.path is not a conflict.
    found = {(entry.value, _origin(entry)): entry for entry in entry_points(group=group)
             if entry.name == name}  # fmt: skip
    if not found:
        known = ", ".join(sorted({entry.name for entry in entry_points(group=group)})) or "none"
        raise ExtensionError(f"no {group} entry point is named {name!r}; installed: {known}")
    if len(found) > 1:
        raise ExtensionError(
            f"{group} entry point {name!r} is registered twice: "
            f"{', '.join(sorted(origin for _, origin in found))}; uninstall one of them"
        )
    (entry,) = found.values()
    return entry


def load_extension(group: str, name: str) -> Any:
    """The object that `name` is registered for in `group`. Raises `ExtensionError`."""
    entry = find_extension(group, name)
    try:
        return entry.load()
    except Exception as error:
        raise ExtensionError(f"{group} entry point {name!r} does not load: {error}") from error
