"""Finding the user's harness by name.

Guarantees: `module:function` or the name of an entry point of the group
`megatron_forest_trainer.harnesses`; a wrong name, a failing import, a name that two packages claim
or a target that is not an async function is refused when the configuration is validated.
"""

import importlib
import inspect
from importlib import metadata
from typing import Any, Protocol

import openai

ENTRY_POINT_GROUP = "megatron_forest_trainer.harnesses"


class Harness(Protocol):
    """An episode: from a client and a task to the ordinary output and a reward.

    A harness may carry an attribute `check_options(options)`, which raises `ValueError` for
    options that cannot work; it is called before the first rollout.
    """

    async def __call__(
        self,
        client: openai.AsyncOpenAI,
        task: dict[str, Any],
        *,
        model: str,
        sampling: dict[str, Any],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Run the task; the result holds at least `responses` (or `response`) and `reward`."""
        ...


class HarnessNotFound(ValueError):
    """`harness.target` names nothing that can be run."""


def resolve_harness(target: str) -> Harness:
    """The harness that `target` names. Raises `HarnessNotFound`."""
    found = _from_module(target) if ":" in target else _from_entry_points(target)
    if not inspect.iscoroutinefunction(found) and not inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        raise HarnessNotFound(f"harness.target {target!r} is not an async function: {found!r}")
    return found


def _from_module(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise HarnessNotFound(
            f"harness.target {target!r}: cannot import {module_name!r}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise HarnessNotFound(
            f"harness.target {target!r}: {module_name} has no attribute {attribute!r}"
        ) from None


def _from_entry_points(name: str) -> Any:
    points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    matching = [point for point in points if point.name == name]
    if not matching:
        known = ", ".join(sorted({point.name for point in points})) or "none"
        raise HarnessNotFound(
            f"harness.target {name!r} is no installed harness (installed: {known}); use one of "
            "them or module:function"
        )
    if len(matching) > 1:
        owners = ", ".join(sorted(point.dist.name if point.dist else "?" for point in matching))
        raise HarnessNotFound(f"harness.target {name!r} is claimed by several packages: {owners}")
    try:
        return matching[0].load()
    except (ImportError, AttributeError) as error:
        raise HarnessNotFound(
            f"harness.target {name!r}: cannot load {matching[0].value}: {error}"
        ) from error
