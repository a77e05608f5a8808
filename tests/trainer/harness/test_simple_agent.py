"""The example agent against a scripted OpenAI server, through the stock client."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from megatron_forest_trainer.harness.compaction import HIDDEN
from megatron_forest_trainer.harness.environment import OptionsError
from megatron_forest_trainer.harness.simple_agent import (
    Outcome,
    check_options,
    simple_agent_with_compaction,
)

from tests.support.thread_server import free_port

ENVIRONMENT = "tests.trainer.harness.agents:Counter"
SELECT = "tests.trainer.harness.agents:no_bad_words"


class Script:
    """Answers of the model in order (`call`, text, or `drop` for a torn connection)."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.measured: list[list[str]] = []

    def lengths(self, messages: list[dict[str, Any]]) -> int:
        return sum(len(str(m.get("content") or "")) for m in messages)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> JSONResponse:
            body = await request.json()
            self.requests.append(body)
            number = len(self.requests)
            answer = self.answers[number - 1]
            if answer == "drop":
                raise ConnectionError
            message: dict[str, Any] = {"role": "assistant", "content": answer}
            if answer.startswith("call"):
                arguments = answer.removeprefix("call") or "{}"
                call = {"name": "add", "arguments": arguments}
                message = {
                    "role": "assistant",
                    "content": None,
                    "reasoning": f"think {number}",
                    "tool_calls": [{"id": f"t{number}", "type": "function", "function": call}],
                }
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return JSONResponse(
                {
                    "id": f"r{number}",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                }
            )

        @app.post("/v1/measure")
        async def measure(request: Request) -> dict[str, Any]:
            body = await request.json()
            assert "temperature" in body
            self.measured.append([str(m.get("content")) for m in body["messages"]])
            return {"count": self.lengths(body["messages"])}

        return app


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(script.app(), host="127.0.0.1", port=port, log_level="critical")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        pass
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join(10)


def run(url: str, *, seed: int = 5, keep: int | None = None, **options: Any) -> dict[str, Any]:
    async def episode() -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            history = {"keep_rounds": keep, **options.pop("context_history", {})}
            return await simple_agent_with_compaction(
                client,
                {"start": 1},
                model="m",
                sampling={"temperature": 1.0, "seed": seed, "extra_body": {"top_k": 9}},
                options={
                    "environment": ENVIRONMENT,
                    "context_history": history,
                    **options,
                },
            )

    return asyncio.run(episode())


def contents(request: dict[str, Any]) -> list[str]:
    return [m["content"] for m in request["messages"] if m["role"] == "tool"]


@pytest.mark.requirement("E11", "A1", "E33")
def test_the_whole_accepted_history_comes_back_although_results_were_hidden(script, url):
    script.answers = ["call", "call", "call", "done"]
    result = run(url, keep=1)
    assert result["outcome"] == Outcome.ANSWERED
    assert [r["id"] for r in result["responses"]] == ["r1", "r2", "r3", "r4"]
    assert result["terminal_response_id"] == "r4"
    assert result["reward"] == 1.0
    assert contents(script.requests[-1]) == [HIDDEN, HIDDEN, "result 3"]
    sent = script.requests[1]["messages"][1]
    assert sent["reasoning"] == "think 1"
    assert sent["tool_calls"][0]["id"] == "t1"
    fields = set().union(*(request.keys() for request in script.requests))
    assert fields == {"messages", "model", "temperature", "seed", "top_k", "tools"}


def test_every_call_has_its_own_reproducible_seed(script, url):
    script.answers = ["call", "done"] * 2
    run(url)
    run(url)
    seeds = [request["seed"] for request in script.requests]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


@pytest.mark.requirement("I15")
def test_a_rejected_response_leaves_no_trace(script, url):
    script.answers = ["bad", "call", "bad", "done"]
    result = run(url, select_response=SELECT, max_response_retries=1)
    assert [r["id"] for r in result["responses"]] == ["r2", "r4"]
    assert script.requests[0]["messages"] == script.requests[1]["messages"]
    assert script.requests[0]["seed"] != script.requests[1]["seed"]
    assert "bad" not in json.dumps(script.requests[-1]["messages"])
    assert result["model_calls"] == 4


@pytest.mark.requirement("I15", "I19")
def test_limits_end_the_episode_with_a_name(script, url):
    script.answers = ["bad", "bad"]
    result = run(url, select_response=SELECT, max_response_retries=1)
    assert (result["outcome"], result["reward"]) == (Outcome.NO_ACCEPTED_RESPONSE, 0.0)
    script.requests.clear()
    script.answers = ["call"] * 3
    result = run(url, max_model_calls=3)
    assert (result["outcome"], len(result["responses"])) == (Outcome.MAX_MODEL_CALLS, 3)


@pytest.mark.requirement("I19")
def test_the_guard_measures_compacts_and_measures_again(script, url):
    # "start 1" is 7 characters long, "result n" 8, the hidden marker 8, so hiding cannot help.
    script.answers = ["call"] * 9
    result = run(url, context_history={"max_prompt_tokens": 20})
    assert result["outcome"] == Outcome.CONTEXT_EXCEEDED
    assert [r["id"] for r in result["responses"]] == ["r1", "r2"]
    assert script.measured[-2][-1] == HIDDEN or script.measured[-2][-1] == "result 2"
    assert script.measured[-1].count(HIDDEN) == 2


@pytest.mark.requirement("I19")
def test_compaction_that_helps_lets_the_episode_go_on(script, url, monkeypatch):
    monkeypatch.setattr(
        script, "lengths", lambda messages: sum(m.get("content") != HIDDEN for m in messages)
    )
    script.answers = ["call", "call", "call", "done"]
    # Each round adds an assistant message and a result: 1, 3, 5 and 7 visible messages.
    result = run(url, context_history={"max_prompt_tokens": 6})
    assert result["outcome"] == Outcome.ANSWERED
    assert contents(script.requests[-1]) == [HIDDEN, HIDDEN, "result 3"]
    script.requests.clear()
    result = run(url, context_history={"max_prompt_tokens": 6, "on_exceed": "stop"})
    assert result["outcome"] == Outcome.CONTEXT_EXCEEDED


def test_arguments_that_are_no_object_are_told_to_the_model(script, url):
    script.answers = ["call{", "call[1]", "done"]
    run(url)
    first, second = contents(script.requests[-1])
    assert first.startswith("error: the arguments are not JSON")
    assert second == "error: the arguments are not a JSON object"


@pytest.mark.requirement("I16")
def test_a_torn_connection_closes_the_client_and_is_not_retried(script, url):
    async def episode() -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0, timeout=5
        )
        with contextlib.suppress(openai.APIConnectionError):
            await simple_agent_with_compaction(
                client,
                {"start": 1},
                model="m",
                sampling={},
                options={"environment": ENVIRONMENT},
            )
        return client

    assert asyncio.run(episode()).is_closed()


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "missing required field `environment`"),
        ({"environment": "nowhere:x"}, "cannot load 'nowhere:x'"),
        ({"environment": "json"}, "is not module:name"),
        ({"environment": "tests.trainer.harness.agents:NOT_CALLABLE"}, "is not callable"),
        ({"environment": ENVIRONMENT, "colour": 1}, "unknown field `colour`"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(OptionsError, match=message):
        check_options(options)
