"""A restored attempt on the real engine: its calls go on exactly, and train as if nothing was."""

from typing import Any

import numpy as np
import openai
import pytest
from forest_schema import Receipt
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import Row
from megatron_forest_trainer.finalize import finalize_rollout
from megatron_forest_trainer.store import open_reader

from tests.support.engine import CONTROL_TOKEN
from tests.support.episodes import END, Episode

ASK = {"role": "user", "content": "What is the capital of France?"}
NEXT = {"role": "user", "content": "And of Germany?"}
REWRITTEN = {"role": "user", "content": "We spoke of capitals. And of Italy?"}


def _move(episode: Episode) -> None:
    """Restore the episode's attempt; its client talks to the restored one."""
    answer = episode.server.control.post(f"/attempts/{episode.attempt}/restore")
    answer.raise_for_status()
    episode.attempt = answer.json()["attempt_id"]
    episode.client = episode.client.with_options(base_url=episode.server.base_url(episode.attempt))


def _play(episode: Episode, *, restore: bool) -> tuple[Receipt, list[Row]]:
    """Two calls and a rewrite, a restoration, then continuations of both branches."""
    spelled = [*episode.spell("hello there"), *episode.ids(END)]
    first, root = episode.chat([ASK], spelled)
    branch, _ = episode.chat([ASK, first, NEXT], [*episode.spell("Berlin"), *episode.ids(END)])
    other, rewrite = episode.chat([REWRITTEN], [*episode.spell("Rome"), *episode.ids(END)])
    if restore:
        old = episode.attempt
        _move(episode)
        with pytest.raises(openai.UnprocessableEntityError, match="restored into another attempt"):
            openai.OpenAI(
                base_url=episode.server.base_url(old), api_key="unused", max_retries=0
            ).chat.completions.create(model="tiny", messages=[ASK])  # type: ignore[list-item]
    (second,) = [
        call
        for call in episode.server.receipt(episode.attempt).calls
        if call.parent_call_id == root.call_id
    ]
    messages = [ASK, first, NEXT, branch, {"role": "user", "content": "Of Spain?"}]
    last, third = episode.chat(messages, [*episode.spell("Madrid"), *episode.ids(END)])
    assert (third.parent_call_id, third.prev_len) == (second.call_id, second.cum_len)
    assert episode.tail_text(second).startswith("\n<|im_start|>user\nOf Spain?")
    messages = [REWRITTEN, other, {"role": "user", "content": "Of Greece?"}]
    end, fourth = episode.chat(messages, [*episode.spell("Athens"), *episode.ids(END)])
    assert fourth.parent_call_id == rewrite.call_id
    receipt: Receipt = episode.server.close(episode.attempt)
    messages_out: list[Any] = [first, branch, other, last, end]
    responses = [
        {"id": call.output.response_id, "choices": [{"message": message}]}
        for call, message in zip(receipt.calls, messages_out, strict=True)
    ]
    with open_reader(url=episode.server.url, control_token=CONTROL_TOKEN) as reader:
        final = finalize_rollout(receipt, {"responses": responses}, reader)
        assert final.verified, final.detail
        return receipt, [assemble(row, reader) for row in final.rows]


@pytest.mark.requirement("I20", "C12", "J6", "F14")
def test_a_restored_rollout_trains_like_an_uninterrupted_one(episode: Episode) -> None:
    whole, expected = _play(episode, restore=False)
    episode.attempt = episode.server.open_attempt()
    episode.client = episode.client.with_options(base_url=episode.server.base_url(episode.attempt))
    receipt, rows = _play(episode, restore=True)
    assert {call.capture_key for call in receipt.calls} == {receipt.attempt_id}
    assert [call.source_capture_key is None for call in receipt.calls] == [False] * 3 + [True] * 2
    assert [call.order for call in receipt.calls] == [call.order for call in whole.calls]
    assert [row.plan.row_id for row in rows] == [row.plan.row_id for row in expected]
    assert len(rows) == 2
    order = {call.call_id: call.order for call in (*whole.calls, *receipt.calls)}
    for row, same in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(row.tokens_T, same.tokens_T)
        np.testing.assert_array_equal(row.loss_mask_T, same.loss_mask_T)
        np.testing.assert_allclose(row.logprobs_T, same.logprobs_T, atol=1e-5)
        owned, owned_there = (
            [(order[s.call_id], s.start, s.end, s.owned) for s in r.plan.spans] for r in (row, same)
        )
        assert owned == owned_there
