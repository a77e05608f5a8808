"""The task of the example: follow a chain of boxes with a tool and report what the last one holds.

Guarantees: a task is plain data made from a seed; the same seed gives the same tasks. A box holds
the name of the next box, the last one a digit: the tool is needed, the number of rounds is the
length of the chain, and only the newest result matters, so an agent whose old tool results are
hidden can still succeed. The reward is 1.0 for exactly the digit, else 0.0.
"""

import random
from collections.abc import Iterator
from typing import Any

COLOURS = ("red", "blue", "green", "pink", "gray", "gold", "black", "white", "brown", "lime")
SYSTEM = "Open the boxes one after the other. Answer with the digit."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "open",
            "description": "look into a box",
            "parameters": {
                "type": "object",
                "properties": {"box": {"type": "string", "description": "colour of the box"}},
                "required": ["box"],
            },
        },
    }
]
CHAIN_LENGTH = 3


def make_task(rng: random.Random) -> dict[str, Any]:
    """One task: `boxes` maps a colour to its content, `first` is where the chain starts."""
    chain = rng.sample(COLOURS, CHAIN_LENGTH)
    digit = str(rng.randrange(10))
    boxes = dict(zip(chain, [*chain[1:], digit], strict=True))
    return {"first": chain[0], "boxes": boxes, "answer": digit}


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Endless tasks of one seed."""
    rng = random.Random(seed)
    while True:
        yield make_task(rng)


class BoxTask:
    """The environment of one task: the opening, the tool and the reward."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation before the first model call."""
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"start:{self._task['first']}"},
        ]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tool schemas of the Chat Completions API."""
        return TOOLS

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Content of a box; an error text where the call makes no sense."""
        if name != "open":
            return "error: unknown tool"
        return self._task["boxes"].get(arguments.get("box"), "error: no such box")

    def reward(self, answer: str | None) -> float:
        """1.0 for the digit, else 0.0; None is an episode without an answer."""
        return float(answer is not None and answer.strip() == self._task["answer"])
