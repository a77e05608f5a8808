"""Streams: the stock client accepts them, and their end waits for the capture."""

import asyncio
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from forest_schema import CompletionStatus

from tests.support.engine import EngineServer, wait_until
from tests.support.episodes import END, TOOLS, Episode

ASK: Any = {"role": "user", "content": "What is the capital of France?"}
NEXT: Any = {"role": "user", "content": "And of Germany?"}


@pytest.fixture(params=["incremental", "buffered"])
def chat_stream(request: pytest.FixtureRequest, server: EngineServer) -> Any:
    adapter = server.app.state.forest.chat._adapter
    before, adapter._incremental = adapter._incremental, request.param == "incremental"
    yield request.param
    adapter._incremental = before


def assembled(stream: Any) -> tuple[dict[str, Any], str, Any, str]:
    """(message, finish reason, usage, response id) as a client adds the chunks up."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    finish, usage, ids = "", None, set()
    for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            delta = choice.delta.to_dict()
            for key in ("content", "reasoning"):
                if delta.get(key) is not None:
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    part["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.get("id") or call["id"]
                call["function"]["name"] += part["function"].get("name") or ""
                call["function"]["arguments"] += part["function"].get("arguments") or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    (response_id,) = ids
    return message, finish, usage, response_id


@pytest.mark.smoke
@pytest.mark.requirement("X15", "A20")
@pytest.mark.usefixtures("chat_stream")
def test_streamed_tool_call_is_captured_and_continued(episode: Episode) -> None:
    script = [
        *episode.ids("<think>\nneed it\n</think>\n\n"),
        *episode.ids('<tool_call>\n{"name": "search", "arguments": '),
        *episode.spell('{"query": "x"}'),
        *episode.ids("}\n</tool_call>" + END),
    ]
    stream = episode.client.chat.completions.create(
        model="tiny",
        messages=[ASK],
        tools=TOOLS,
        tool_choice="auto",
        max_tokens=len(script),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {"force": script}},
    )
    message, finish, usage, response_id = assembled(stream)
    assert finish == "tool_calls"
    record = episode.record(response_id)
    tokens, logprobs = episode.delta(record)
    assert tokens[record.prompt_delta_len :] == script
    assert (usage.prompt_tokens, usage.completion_tokens) == (record.prompt_len, len(script))
    assert len(logprobs) == len(script)
    assert record.finish_reason == "tool_calls"
    observed: Any = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": "result",
    }
    _, second = episode.chat([ASK, message, observed], tools=TOOLS, tool_choice="auto")
    assert second.parent_call_id == record.call_id
    assert not second.used_null_empty_equivalence or message["content"] is None


@pytest.mark.requirement("X15")
@pytest.mark.usefixtures("chat_stream")
def test_spliced_prompt_does_not_close_the_next_reasoning(episode: Episode) -> None:
    script = episode.ids(f"<think>\nFrance\n</think>\n\nParis{END}")
    message, first = episode.chat([ASK], script)
    again = episode.ids(f"<think>\nGermany\n</think>\n\nBerlin{END}")
    stream = episode.client.chat.completions.create(
        model="tiny",
        messages=[ASK, message, NEXT],  # type: ignore[list-item]
        max_tokens=len(again),
        stream=True,
        extra_body={"vllm_xargs": {"force": again}},
    )
    answer, finish, _, response_id = assembled(stream)
    assert episode.record(response_id).parent_call_id == first.call_id
    assert (answer["reasoning"].strip(), answer["content"].strip()) == ("Germany", "Berlin")
    assert finish == "stop"


def test_tokens_flow_before_the_end_is_captured(episode: Episode) -> None:
    stream = episode.client.chat.completions.create(
        model="tiny",
        messages=[ASK],
        max_tokens=100,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    seen_early = 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].finish_reason is None:
            if not episode.server.receipt(episode.attempt).calls:
                seen_early += 1
        elif chunk.choices:
            # The finish reason goes out after the commit.
            assert len(episode.server.receipt(episode.attempt).calls) == 1
            break
    assert seen_early > 10
    stream.close()


@pytest.mark.requirement("C24", "I10")
@pytest.mark.usefixtures("chat_stream")
def test_client_that_leaves_a_stream_leaves_a_recorded_failure(episode: Episode) -> None:
    server = episode.server
    body = {
        "model": "tiny",
        "messages": [ASK],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{server.base_url(episode.attempt)}/chat/completions"
    with httpx.Client() as client, client.stream("POST", url, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        wait_until(lambda: len(server.receipt(episode.attempt).pending) == 1)
        time.sleep(0.2)
    wait_until(lambda: len(server.receipt(episode.attempt).failures) == 1)
    receipt = server.receipt(episode.attempt)
    assert (receipt.calls, receipt.pending) == ((), ())
    assert receipt.failures[0].reason == "client_disconnected"
    wait_until(lambda: not server.engine.output_processor.has_unfinished_requests())


@pytest.mark.requirement("C24", "I10")
def test_client_that_leaves_a_plain_request(episode: Episode) -> None:
    server = episode.server
    url = f"{server.base_url(episode.attempt)}/chat/completions"
    body = {"model": "tiny", "messages": [ASK], "max_tokens": 3000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.5)
    wait_until(lambda: len(server.receipt(episode.attempt).failures) == 1)
    receipt = server.receipt(episode.attempt)
    assert (receipt.calls, receipt.pending) == ((), ())
    assert receipt.failures[0].reason == "client_disconnected"


@pytest.mark.requirement("I9", "C24", "C16")
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_its_answer_is_committed(
    episode: Episode, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    server = episode.server
    service = server.app.state.forest.service
    put, reached = service._sink.put, threading.Event()

    async def slow_put(*arguments: Any) -> Any:
        reached.set()
        await asyncio.sleep(1.0)
        return await put(*arguments)

    monkeypatch.setattr(service._sink, "put", slow_put)
    body = {"model": "tiny", "messages": [ASK], "max_tokens": 2, "stream": stream}
    url = f"{server.base_url(episode.attempt)}/chat/completions"

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            request = asyncio.create_task(client.post(url, json=body))
            await asyncio.to_thread(reached.wait, 60)
            request.cancel()

    asyncio.run(leave())
    wait_until(lambda: len(server.receipt(episode.attempt).failures) == 1)
    receipt = server.receipt(episode.attempt)
    assert len(receipt.calls) == 1
    (failure,) = receipt.failures
    assert failure.reason == "request_finished_without_staged_coordinates"
    assert failure.had_committed_capture


@pytest.mark.requirement("X20")
@pytest.mark.usefixtures("chat_stream")
def test_refused_stream_is_a_plain_error(episode: Episode) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        episode.client.chat.completions.create(
            model="tiny", messages=[ASK], stream=True, presence_penalty=0.5
        )
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert refused.value.response.json()["error"]["type"] == "unreproducible_sampling"
    receipt = episode.server.receipt(episode.attempt)
    assert (receipt.calls, receipt.failures, receipt.pending) == ((), (), ())


@pytest.mark.requirement("XF2", "C24")
@pytest.mark.usefixtures("chat_stream")
def test_aborted_generation_is_no_parent(episode: Episode) -> None:
    server = episode.server
    results: list[Any] = []

    def call() -> None:
        stream = episode.client.chat.completions.create(
            model="tiny",
            messages=[ASK],
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        results.append(assembled(stream))

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: len(server.receipt(episode.attempt).pending) == 1)
    time.sleep(0.3)
    server.run(server.engine.pause_generation(mode="abort", clear_cache=False))
    thread.join(60)
    server.run(server.engine.resume_generation())
    ((message, finish, _, response_id),) = results
    assert finish == "abort"
    aborted = episode.record(response_id)
    assert aborted.status is CompletionStatus.FAILED
    _, second = episode.chat([ASK, message, NEXT])
    assert (second.parent_call_id, second.root_reason) == (None, "no_match")


@pytest.mark.requirement("A28")
def test_buffered_stream_keeps_the_connection_alive(episode: Episode) -> None:
    server = episode.server
    route = server.app.state.forest.responses
    before, route._keep_alive_s = route._keep_alive_s, 0.01
    try:
        body = {
            "model": "tiny",
            "input": "hi",
            "max_output_tokens": 100,
            "stream": True,
            "ignore_eos": True,
        }
        url = f"{server.base_url(episode.attempt)}/responses"
        with httpx.Client(timeout=60) as client, client.stream("POST", url, json=body) as answer:
            lines = list(answer.iter_lines())
    finally:
        route._keep_alive_s = before
    assert lines.count(": keep-alive") > 2
    assert lines.index(": keep-alive") < lines.index("event: response.created")
