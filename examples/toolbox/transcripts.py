"""Scripted episodes of the box task, good and bad, that the tiny model is pre-trained on.

Guarantees: a step holds the messages exactly as the harness sends them, old tool results hidden by
the harness's own rule, and the text that the model is to generate. The bad habits are what the
reinforcement learning has to take away.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from megatron_forest_trainer.harness.compaction import hide_old_results
from toolbox.task import BoxTask, make_task


@dataclass(frozen=True)
class Habits:
    """Probability of each bad habit, drawn anew for every model call."""

    hasty: float = 0.2
    """Answers with a guessed digit before the last box."""
    malformed: float = 0.1
    """Calls the tool without `arguments`."""


@dataclass(frozen=True)
class Step:
    """One model call of an episode."""

    messages: list[dict[str, Any]]
    """What the harness sends."""
    answer: str
    """What the model generates, without the end-of-turn token."""


def call_text(box: str) -> str:
    """A tool call as the model writes it."""
    arguments = json.dumps({"box": box})
    return f'<tool_call>{{"name": "open", "arguments": {arguments}}}</tool_call>'


def episode(rng: random.Random, habits: Habits, keep_rounds: int) -> list[Step]:
    """One scripted episode, ended by an answer or by a malformed call."""
    task = make_task(rng)
    world = BoxTask(task)
    history = list(world.messages)
    steps: list[Step] = []
    found = task["first"]
    while True:
        sent = hide_old_results(history, keep_rounds)
        if found.isdigit():
            steps.append(Step(sent, f"<think>done</think>{found}"))
            return steps
        draw = rng.random()
        if draw < habits.hasty:
            steps.append(Step(sent, f"<think>guess</think>{rng.randrange(10)}"))
            return steps
        if draw > 1 - habits.malformed:
            text = f'<tool_call>{{"name": "open", "box": "{found}"}}</tool_call>'
            steps.append(Step(sent, f"<think>open</think>{text}"))
            return steps
        steps.append(Step(sent, f"<think>open</think>{call_text(found)}"))
        call_id = f"call{len(steps)}"
        history.append(
            {
                "role": "assistant",
                "content": None,
                "reasoning": "open",
                "tool_calls": [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": "open", "arguments": json.dumps({"box": found})},
                    }
                ],
            }
        )
        found = world.call("open", {"box": found})
        history.append({"role": "tool", "tool_call_id": call_id, "content": found})
