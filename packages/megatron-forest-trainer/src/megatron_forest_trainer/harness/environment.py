"""What the example agent needs of a task: an opening, tools and a reward.

Guarantees: an environment is found by `module:name` and is any callable that turns one task (a
JSON object) into an `Environment`.
"""

import pkgutil
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Message = dict[str, Any]
"""A message of the Chat Completions API."""


class Environment(Protocol):
    """One task of one rollout."""

    @property
    def messages(self) -> list[Message]:
        """The conversation before the first model call."""
        ...

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tool schemas of the Chat Completions API; may be empty."""
        ...

    def call(self, name: str, arguments: dict[str, Any]) -> str | Awaitable[str]:
        """Result of a tool call; errors that the model should see are results too."""
        ...

    def reward(self, answer: str | None) -> float | Awaitable[float]:
        """Reward of the episode; `answer` is None when the agent gave none."""
        ...


class OptionsError(ValueError):
    """An option of the example agent that names nothing usable."""


def load(option: str, target: str) -> Callable[..., Any]:
    """The callable `module:name`. Raises `OptionsError` naming the option."""
    if ":" not in target:
        raise OptionsError(f"harness.options.{option}: {target!r} is not module:name")
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionsError(f"harness.options.{option}: cannot load {target!r}: {error}") from error
    if not callable(found):
        raise OptionsError(f"harness.options.{option}: {target!r} is not callable")
    return found
