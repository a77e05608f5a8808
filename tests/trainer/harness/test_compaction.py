"""Which tool results the next call still sees."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.harness.compaction import HIDDEN, hide_old_results, tool_rounds

KINDS = st.lists(st.sampled_from(["user", "answer", "round", "two-tool round"]), max_size=8)


def conversation(kinds: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds):
        if kind in ("user", "answer"):
            role = "user" if kind == "user" else "assistant"
            messages.append({"role": role, "content": f"text {number}"})
            continue
        ids = [f"{number}.{i}" for i in range(2 if kind == "two-tool round" else 1)]
        calls = [{"id": call_id} for call_id in ids]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in ids]
    return messages


@given(KINDS, st.one_of(st.none(), st.integers(0, 9)))
def test_only_the_newest_rounds_stay_visible(kinds: list[str], keep: int | None) -> None:
    messages = conversation(kinds)
    before = copy.deepcopy(messages)

    sent = hide_old_results(messages, keep)

    rounds = [number for number, kind in enumerate(kinds) if "round" in kind]
    visible = rounds if keep is None else rounds[len(rounds) - min(keep, len(rounds)) :]
    expected = copy.deepcopy(before)
    for message in expected:
        if message["role"] == "tool" and int(message["tool_call_id"].split(".")[0]) not in visible:
            message["content"] = HIDDEN
    assert sent == expected
    assert messages == before
    assert len(tool_rounds(messages)) == len(rounds)


@pytest.mark.parametrize(("keep", "hidden"), [(1, [True, False]), (0, [True, True])])
def test_a_round_is_hidden_with_all_its_results(keep: int, hidden: list[bool]) -> None:
    sent = hide_old_results(conversation(["user", "two-tool round", "round"]), keep)
    contents = [m["content"] == HIDDEN for m in sent if m["role"] == "tool"]
    assert contents == [hidden[0], hidden[0], hidden[1]]
