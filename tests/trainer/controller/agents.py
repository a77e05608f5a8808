"""Harnesses that a training process finds by name."""

from typing import Any

import openai


async def babble(
    client: openai.AsyncOpenAI,
    task: dict[str, Any],
    *,
    model: str,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Four short turns; the history is forgotten after the second. The reward counts low bytes."""
    messages: list[Any] = []
    responses: list[dict[str, Any]] = []
    for turn in range(4):
        if turn == 2:
            messages = []
        messages.append({"role": "user", "content": f"{task['say']} {turn}"})
        answer = await client.chat.completions.create(
            model=model, messages=messages, **{**sampling, "seed": sampling["seed"] + turn}
        )
        responses.append(answer.model_dump())
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    said = "".join(r["choices"][0]["message"]["content"] or "" for r in responses)
    return {
        "responses": responses,
        "reward": sum(c.isascii() for c in said) / max(1, len(said)),
    }


async def say_four(
    client: openai.AsyncOpenAI,
    task: dict[str, Any],
    *,
    model: str,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Three independent scripted turns; the reward is the parity of the rollout's seed."""
    responses = []
    for verb, tokens in (("say", 4), ("say", 5), (task.get("last", "say"), 6)):
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"{verb} {tokens}"}]
        )
        responses.append(answer.model_dump())
    return {"responses": responses, "reward": float(sampling["seed"] % 2)}


async def branch(
    client: openai.AsyncOpenAI,
    task: dict[str, Any],
    *,
    model: str,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Two scripted continuations of one turn; the reward is the parity of the rollout's seed."""
    history: list[Any] = [{"role": "user", "content": "say 5"}]
    first = await client.chat.completions.create(model=model, messages=history)
    history.append({"role": "assistant", "content": first.choices[0].message.content})
    responses = [first.model_dump()]
    for tokens in (4, 6):
        answer = await client.chat.completions.create(
            model=model, messages=[*history, {"role": "user", "content": f"say {tokens}"}]
        )
        responses.append(answer.model_dump())
    return {"responses": responses, "reward": float(sampling["seed"] % 2)}


async def broken(*_: Any, **__: Any) -> dict[str, Any]:
    """A harness with a bug."""
    raise KeyError("scripted bug")
