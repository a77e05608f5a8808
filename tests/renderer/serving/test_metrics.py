"""Metrics on vLLM's own `/metrics`."""

import re
from typing import Any

import httpx
import openai
import pytest

from tests.support.engine import EngineServer
from tests.support.episodes import END, Episode

ASK: Any = {"role": "user", "content": "What is the capital of France?"}
NEXT: Any = {"role": "user", "content": "And of Germany?"}


def values(server: EngineServer) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r"^(forest_\S+) (\S+)$", text, flags=re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.requirement("C24")
def test_calls_are_counted(episode: Episode, server: EngineServer) -> None:
    before = values(server)
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    message, first = episode.chat([ASK], script)
    _, second = episode.chat([ASK, message, NEXT])
    with pytest.raises(openai.BadRequestError):
        episode.chat([ASK], n=2)

    def change(name: str) -> float:
        return values(server)[name] - before.get(name, 0)

    assert change('forest_call_intents_total{api="chat"}') == 2
    assert change('forest_calls_committed_total{api="chat"}') == 2
    assert change('forest_root_calls_total{reason="no_match"}') == 1
    assert change("forest_continuation_calls_total") == 1
    assert change("forest_spliced_tokens_total") == first.cum_len
    assert change("forest_generated_tokens_total") == first.generated_len + second.generated_len
    assert change('forest_refused_requests_total{reason="unsupported_request"}') == 1
    assert change("forest_ledger_commit_seconds_count") >= 4
