"""Marked copies of messages, rendered to find where a turn ends.

Guarantees: the given messages are never changed; a marked copy differs from its original only in
the turn's last words (or the last tool call's arguments) or in one observation's content, so that
the template takes the same branches for it.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a template may branch on where a turn ends; one proof holds for one shape."""

    content: str
    """`none`, `empty`, `text` or `parts`."""
    reasoning: bool
    tool_calls: bool
    next_role: str
    next_parts: bool
    """The first observation's content is a list of parts."""


def new_mark() -> str:
    """A word that no message contains, made of letters that every template leaves alone."""
    return "Zq" + secrets.token_hex(10)


def turn_shape(messages: Sequence[Message], count: int) -> TurnShape:
    """Shape of the assistant turn `messages[count - 1]` and of what follows it."""
    turn, following = messages[count - 1], messages[count]
    content = turn.get("content")
    if content is None:
        kind = "none"
    elif isinstance(content, str):
        kind = "text" if content else "empty"
    else:
        kind = "parts"
    return TurnShape(
        content=kind,
        reasoning=bool(turn.get("reasoning")),
        tool_calls=bool(turn.get("tool_calls")),
        next_role=str(following.get("role")),
        next_parts=not isinstance(following.get("content"), str | None),
    )


def mark_turn(
    messages: Sequence[Message], count: int, mark: str, *, drop_calls: bool = False
) -> list[Message]:
    """A copy in which the assistant turn `messages[count - 1]` ends with `mark`.

    With tool calls, the last call's arguments become `{mark: ""}`: the text behind the mark is
    then the template's alone. `drop_calls` marks the content and leaves the tool calls out.
    """
    turn = dict(messages[count - 1])
    calls = list(turn.get("tool_calls") or ())
    if drop_calls:
        turn.pop("tool_calls", None)
    if calls and not drop_calls:
        last = dict(calls[-1])
        function = dict(last.get("function") or {})
        as_text = not isinstance(function.get("arguments"), Mapping)
        function["arguments"] = f'{{"{mark}": ""}}' if as_text else {mark: ""}
        last["function"] = function
        turn["tool_calls"] = [*calls[:-1], last]
    else:
        turn["content"] = _appended(turn.get("content"), mark)
    return [*messages[: count - 1], turn, *messages[count:]]


def replace_observation(messages: Sequence[Message], index: int, mark: str) -> list[Message]:
    """A copy in which the content of `messages[index]` is `mark`."""
    observation = dict(messages[index])
    if isinstance(observation.get("content"), str | None):
        observation["content"] = mark
    else:
        observation["content"] = [{"type": "text", "text": mark}]
    return [*messages[:index], observation, *messages[index + 1 :]]


def with_empty_content(messages: Sequence[Message], value: str | None) -> list[Message]:
    """A copy in which null and empty content beside tool calls is `value` in every turn."""
    copies: list[Message] = []
    for message in messages:
        beside_calls = message.get("role") == "assistant" and message.get("tool_calls")
        if beside_calls and not message.get("content"):
            copies.append({**message, "content": value})
        else:
            copies.append(message)
    return copies


def _appended(content: Any, mark: str) -> Any:
    if content is None:
        return mark
    if isinstance(content, str):
        return content + mark
    parts = list(content)
    if parts and isinstance(parts[-1], Mapping) and isinstance(parts[-1].get("text"), str):
        return [*parts[:-1], {**parts[-1], "text": parts[-1]["text"] + mark}]
    return [*parts, {"type": "text", "text": mark}]
