"""A harness that says what it is told to, one request after the other."""

import asyncio
import itertools
from typing import Any

import openai
from megatron_forest_trainer.controller.rollouts import rollout_seed

_GENERATION = {
    rollout_seed(0, f"step{step:06d}-g{group:04d}", index): index
    for step, group, index in itertools.product(range(6), range(6), range(6))
}
"""Sampling seed -> number of the generation in its group: all that a harness can tell it by."""


class Scripted:
    """Follows the scripts of each task, one per generation.

    A script's lines are sent as user messages of a growing history. `rewrite` forgets the history,
    `lie` changes the last answer in what is returned, `break` raises, `sleep` never comes back,
    `unplug` fails below the client's own errors,
    `shrug LINE` goes on where LINE is refused.
    """

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def __call__(
        self,
        client: openai.AsyncOpenAI,
        task: dict[str, Any],
        *,
        model: str,
        sampling: dict[str, Any],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        script = task["scripts"][_GENERATION[sampling["seed"]]]
        self.seeds.append(sampling["seed"])
        messages: list[Any] = []
        responses: list[dict[str, Any]] = []
        for line in script:
            if line == "rewrite":
                messages = []
                continue
            if line == "lie":
                responses[-1]["choices"][0]["message"]["content"] = "never generated"
                continue
            if line == "break":
                raise ValueError("scripted bug")
            if line == "sleep":
                await asyncio.sleep(3600)
            if line == "unplug":
                await client._client.get("http://127.0.0.1:9")
            shrug = line.startswith("shrug ")
            messages.append({"role": "user", "content": line.removeprefix("shrug ")})
            try:
                answer = await client.chat.completions.create(model=model, messages=messages)
            except openai.APIStatusError:
                if not shrug:
                    raise
                messages.pop()
                continue
            responses.append(answer.model_dump())
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return {"responses": responses, "reward": float(len(script)), **task["extra"]}
