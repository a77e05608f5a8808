"""`/measure` counts what generation would use, and leaves nothing behind."""

from typing import Any

import httpx
import pytest

from tests.support.episodes import END, TOOLS, Episode

ASK = {"role": "user", "content": "What is the capital of France?"}
NEXT = {"role": "user", "content": "And of Germany?"}


def measure(episode: Episode, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{episode.server.base_url(episode.attempt)}/measure", json={"model": "tiny", **body}
    )


@pytest.mark.smoke
@pytest.mark.requirement("X18", "D1", "D2", "D3", "D4")
def test_count_equals_the_prompt_of_the_call_that_follows(episode: Episode) -> None:
    script = episode.ids(f"<think>\nFrance\n</think>\n\nParis{END}")
    message, first = episode.chat([ASK], script)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for body, continues in [
        ({"messages": [ASK, message, NEXT]}, True),
        ({"messages": [ASK]}, False),
        ({"messages": [ASK], "tools": TOOLS, "tool_choice": "auto"}, False),
        ({"messages": [ASK, message, NEXT], **off}, False),
        ({"messages": [ASK, {"role": "assistant", "content": "Madrid"}, NEXT]}, False),
    ]:
        before = episode.server.receipt(episode.attempt)
        answer = measure(episode, **body)
        assert answer.status_code == 200
        found = answer.json()
        assert found.keys() == {"schema", "count", "continuation", "features"}
        assert "measure_v1" in found["features"]
        assert episode.server.receipt(episode.attempt) == before
        extra = {key: value for key, value in body.items() if key == "chat_template_kwargs"}
        tools = {key: body[key] for key in ("tools", "tool_choice") if key in body}
        _, record = episode.chat(body["messages"], extra_body=extra, **tools)
        assert found["count"] == record.prompt_len == len(episode.served)
        assert found["continuation"] == continues
        assert (record.parent_call_id == first.call_id) == continues


@pytest.mark.requirement("X18", "D4", "A27")
def test_count_of_a_responses_request(episode: Episode) -> None:
    body = {"input": [{"role": "user", "content": "hello"}], "instructions": "Be brief."}
    count = measure(episode, **body).json()["count"]
    answer = episode.client.responses.create(
        model="tiny",
        max_output_tokens=2,
        **body,  # type: ignore[arg-type]
    )
    assert episode.record(answer.id).prompt_len == count


@pytest.mark.requirement("D5")
def test_refuses_as_generation_does(episode: Episode) -> None:
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    message, _ = episode.chat([ASK], script)
    episode.chat([ASK], script)
    twins = measure(episode, messages=[ASK, message, NEXT])
    assert twins.status_code == 400
    assert twins.json()["error"]["type"] == "ambiguous_parent"
    prefill = measure(episode, messages=[ASK, message])
    assert prefill.json()["error"]["type"] == "unsupported_request"
    unknown = httpx.post(f"{episode.server.url}/v1/forest/att_{'0' * 32}/measure", json={})
    assert unknown.json()["error"]["type"] == "attempt_unknown"
