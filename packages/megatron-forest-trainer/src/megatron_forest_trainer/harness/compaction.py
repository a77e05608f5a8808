"""Recency compaction: old tool results are hidden from the next model call.

Guarantees: pure; the history itself is never changed; a tool round is one assistant message with
tool calls and the results that answer it; every message stays in place, only contents change, so
that the conversation remains valid for any chat template.
"""

from collections.abc import Sequence
from typing import Any

HIDDEN = "[hidden]"
"""Content of a hidden tool result."""


def tool_rounds(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Positions of the assistant messages that call tools."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("tool_calls")
    ]


def hide_old_results(
    messages: Sequence[dict[str, Any]], keep_rounds: int | None
) -> list[dict[str, Any]]:
    """The messages with all tool results hidden but those of the newest `keep_rounds` rounds.

    None keeps all.
    """
    rounds = tool_rounds(messages)
    if keep_rounds is None or len(rounds) <= keep_rounds:
        return list(messages)
    visible_from = rounds[-keep_rounds] if keep_rounds else len(messages)
    return [
        {**message, "content": HIDDEN}
        if message["role"] == "tool" and index < visible_from
        else message
        for index, message in enumerate(messages)
    ]
