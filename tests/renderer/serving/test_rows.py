"""What the trainer makes of calls that a real engine served and the server captured."""

from typing import Any

import pytest
from megatron_forest_trainer.core.forest import build_rows

from tests.support.episodes import Episode, think


@pytest.mark.requirement("X13")
def test_three_calls_become_one_row_with_each_span_once(episode: Episode) -> None:
    scripts = [
        think(episode, f"thought {name}", episode.spell(name))
        for name in ("Paris", "Berlin", "Madrid")
    ]
    messages: list[dict[str, Any]] = []
    calls = []
    for country, script in zip(("France", "Germany", "Spain"), scripts, strict=True):
        messages.append({"role": "user", "content": f"What is the capital of {country}?"})
        message, call = episode.chat(messages, script)
        messages.append(message)
        calls.append(call)
    receipt = episode.server.close(episode.attempt)
    assert [call.call_id for call in receipt.calls] == [call.call_id for call in calls]
    assert [call.parent_call_id for call in calls] == [None, *(c.call_id for c in calls[:2])]
    tokens = episode.history(receipt.calls[-1])
    for call, script in zip(calls, scripts, strict=True):
        size = len(script)
        found = [at for at in range(len(tokens)) if tokens[at : at + size] == script]
        assert found == [call.cum_len - size] == [call.prompt_len]
    (row,) = build_rows(receipt.calls, group_id=receipt.group_id, rollout_id=receipt.rollout_id)
    assert row.length == len(tokens)
    assert [(s.call_id, tokens[s.start : s.end], s.owned) for s in row.spans] == [
        (call.call_id, script, True) for call, script in zip(calls, scripts, strict=True)
    ]
