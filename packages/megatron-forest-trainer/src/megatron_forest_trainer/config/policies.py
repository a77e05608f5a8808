"""Finding a selection policy by its name.

Guarantees: a name that cannot be resolved fails at once, with the installed names; two packages
that register the same name are refused; a policy is a synchronous callable.
"""

import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from megatron_forest_trainer.core.selection import SelectionPolicy

GROUP = "megatron_forest_trainer.selection_policies"
"""Entry-point group; the built-in policies are registered through it too."""

DEFAULT = "returned_history"


class PolicyError(ValueError):
    """A policy name that names no usable policy."""


def installed() -> dict[str, EntryPoint]:
    """Registered policies by name. Raises `PolicyError` for a name registered twice."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in found and found[entry.name].value != entry.value:
            raise PolicyError(
                f"two installed packages register the selection policy {entry.name!r}: "
                f"{found[entry.name].value} and {entry.value}; uninstall one"
            )
        found[entry.name] = entry
    return found


def resolve(name: str) -> SelectionPolicy:
    """The policy that `name` means: an installed one, or `module:function`.

    Raises `PolicyError` for an unknown name, a failing import or something that cannot be called.
    """
    if ":" in name:
        policy = _load(name)
    else:
        entry = installed().get(name)
        if entry is None:
            raise PolicyError(
                f"unknown selection policy {name!r}; installed: {', '.join(sorted(installed()))}; "
                "or name a function as module:function"
            )
        policy = _load(entry.value)
    if not callable(policy):
        raise PolicyError(f"{name!r} is a {type(policy).__name__}, not a function")
    if inspect.iscoroutinefunction(policy):
        raise PolicyError(f"{name!r} is asynchronous; a selection policy is an ordinary function")
    return cast(SelectionPolicy, policy)


def _load(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise PolicyError(
            f"cannot import {target!r}: {error}; the module must be importable by the controller"
        ) from error
    return value
