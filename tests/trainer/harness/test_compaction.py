"""Recency compaction against a slow reading of its rule."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.harness.compaction import HIDDEN, hide_old_results, tool_rounds


def conversation(shape: list[int | None]) -> list[dict[str, Any]]:
    """Per element one assistant turn: None answers, a number calls that many tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for turn, calls in enumerate(shape):
        if calls is None:
            messages.append({"role": "assistant", "content": f"a{turn}"})
            messages.append({"role": "user", "content": f"u{turn}"})
            continue
        ids = [f"{turn}.{n}" for n in range(calls)]
        messages.append({"role": "assistant", "tool_calls": [{"id": i} for i in ids]})
        messages.extend({"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in ids)
    return messages


shapes = st.lists(st.none() | st.integers(1, 3), max_size=6)


@given(shapes, st.none() | st.integers(0, 7))
def test_exactly_the_results_of_older_rounds_are_hidden(shape, keep):
    messages = conversation(shape)
    sent = hide_old_results(messages, keep)
    turns = [turn for turn, calls in enumerate(shape) if calls is not None]
    visible = turns if keep is None else turns[max(0, len(turns) - keep) :]
    for before, after in zip(messages, sent, strict=True):
        if before["role"] == "tool" and int(before["tool_call_id"].split(".")[0]) not in visible:
            assert after == {**before, "content": HIDDEN}
        else:
            assert after == before
    assert messages == conversation(shape)


@given(shapes)
def test_rounds_are_the_assistant_messages_with_calls(shape):
    assert len(tool_rounds(conversation(shape))) == sum(calls is not None for calls in shape)


@pytest.mark.requirement("E11")
def test_the_history_is_not_shortened():
    messages = conversation([1, 1, 1])
    assert len(hide_old_results(messages, 1)) == len(messages)
    assert [m["content"] for m in hide_old_results(messages, 1) if m["role"] == "tool"] == [
        HIDDEN,
        HIDDEN,
        "r2.0",
    ]
