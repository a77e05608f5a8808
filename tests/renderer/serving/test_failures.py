"""What cannot be captured is refused or recorded, never captured wrongly."""

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from vllm_forest_renderer.capture import engine_client
from vllm_forest_renderer.capture.service import CaptureService
from vllm_forest_renderer.errors import StoreUnavailable

from tests.support.engine import EngineServer, wait_until
from tests.support.episodes import END, TOOLS, Episode

pytestmark = pytest.mark.smoke

ASK: Any = {"role": "user", "content": "What is the capital of France?"}
NEXT: Any = {"role": "user", "content": "And of Germany?"}


class FaultyEngine:
    """The real engine client; its outputs are damaged on the way."""

    def __init__(self, inner: Any, damage: Callable[[Any], None]) -> None:
        self._inner, self._damage = inner, damage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, *args: Any, **keywords: Any) -> Any:
        async for output in self._inner.generate(*args, **keywords):
            self._damage(output)
            yield output


@contextlib.contextmanager
def damaged(server: EngineServer, damage: Callable[[Any], None]) -> Iterator[None]:
    client = server.app.state.forest.chat._adapter._serving.engine_client
    before, client._inner = client._inner, FaultyEngine(client._inner, damage)
    try:
        yield
    finally:
        client._inner = before


@pytest.fixture
def service(server: EngineServer) -> CaptureService:
    found: CaptureService = server.app.state.forest.service
    return found


@pytest.fixture
def arrived(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Bodies of the requests that reach the chat route."""
    route = server.app.state.forest.chat
    bodies: list[Any] = []
    handle = route.handle

    async def counting(body: Any, raw_request: Any) -> Any:
        bodies.append(body)
        return await handle(body, raw_request)

    monkeypatch.setattr(route, "handle", counting)
    return bodies


def retrying(episode: Episode) -> openai.OpenAI:
    """A client as users make it: with the SDK's own retries."""
    return openai.OpenAI(base_url=episode.server.base_url(episode.attempt), api_key="unused")


def not_a_number(output: Any) -> None:
    logprobs = output.outputs[0].logprobs
    if logprobs:
        logprobs.logprobs[-1] = float("nan")


def no_ids(output: Any) -> None:
    output.outputs[0].token_ids = []
    output.outputs[0].logprobs = None


def no_logprobs(output: Any) -> None:
    output.outputs[0].logprobs = None


def other_prompt(output: Any) -> None:
    output.prompt_token_ids = [*output.prompt_token_ids, 1]


@pytest.mark.requirement("X16", "X20", "A24", "I10")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (not_a_number, "invalid_logprob"),
        (no_ids, "engine_output_without_tokens"),
        (no_logprobs, "engine_output_without_tokens"),
        (other_prompt, "engine_output_without_tokens"),
    ],
)
def test_damaged_output_is_a_recorded_failure(
    episode: Episode, arrived: list[Any], damage: Any, reason: str, stream: bool
) -> None:
    def ask() -> None:
        answer: Any = retrying(episode).chat.completions.create(
            model="tiny", messages=[ASK], max_tokens=4, stream=stream
        )
        list(answer)

    with damaged(episode.server, damage), pytest.raises(openai.APIError) as failed:
        ask()
    assert reason in str(failed.value) or reason in str(failed.value.body)
    # Exactly one request, whatever the SDK retries on its own.
    assert len(arrived) == 1
    wait_until(lambda: not episode.server.receipt(episode.attempt).pending)
    receipt = episode.server.receipt(episode.attempt)
    assert receipt.calls == ()
    assert [failure.reason for failure in receipt.failures] == [reason]
    message, _ = episode.chat([ASK], episode.ids(f"<think>\n\n</think>\n\nParis{END}"))
    assert message["content"].strip() == "Paris"


@pytest.mark.requirement("K7", "X20", "X17")
@pytest.mark.parametrize(
    ("options", "reason", "param"),
    [
        ({"n": 2}, "unsupported_request", "n"),
        ({"extra_body": {"use_beam_search": True}}, "unsupported_request", "use_beam_search"),
        ({"extra_body": {"echo": True}}, "unsupported_request", "echo"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}},
            "unsupported_request",
            "continue_final_message",
        ),
        (
            {"extra_body": {"truncate_prompt_tokens": 5}},
            "unsupported_request",
            "truncate_prompt_tokens",
        ),
        (
            {"extra_body": {"kv_transfer_params": {"prompt_token_ids": [1]}}},
            "unsupported_request",
            "kv_transfer_params",
        ),
        ({"store": True}, "unsupported_request", "store"),
        ({"messages": []}, "malformed_request", "messages"),
        (
            {"messages": [ASK, {"role": "assistant", "content": "Par"}]},
            "unsupported_request",
            "messages[1]",
        ),
        ({"messages": [{"role": "critic", "content": "x"}]}, "unsupported_item",
         "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url",
             "image_url": {"url": "data:image/png;base64,AA=="}}]}]},
            "unsupported_item",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url",
             "video_url": {"url": "data:video/mp4;base64,AA=="}}]}]},
            "unsupported_item",
            "messages[0].content[0]",
        ),
        ({"temperature": "warm"}, "malformed_request", "temperature"),
        ({"extra_body": {"stream": "no"}}, "malformed_request", "stream"),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, "malformed_request",
         "stream_options"),
        # Refused by validators of vLLM's that raise errors of their own.
        ({"tools": []}, "malformed_request", "tools"),
        ({"tool_choice": "auto"}, "malformed_request", "tool_choice"),
        ({"extra_body": {"cache_salt": ""}}, "malformed_request", "cache_salt"),
        ({"top_logprobs": 500}, "malformed_request", "top_logprobs"),
        ({"model": "other"}, "malformed_request", "model"),
        ({"max_tokens": 100_000}, "malformed_request", "max_tokens"),
        ({"presence_penalty": 0.5}, "unreproducible_sampling", "presence_penalty"),
        ({"extra_body": {"min_p": 0.1}}, "unreproducible_sampling", "min_p"),
        ({"extra_body": {"min_tokens": 3}}, "unreproducible_sampling", "min_tokens"),
        ({"logit_bias": {"5": 1.0}}, "unreproducible_sampling", "logit_bias"),
        (
            {"response_format": {"type": "json_object"}},
            "unreproducible_sampling",
            "structured_outputs",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            "unreproducible_sampling",
            "structured_outputs",
        ),
    ],
)  # fmt: skip
def test_refused_requests_leave_nothing_and_are_not_repeated(
    episode: Episode, arrived: list[Any], options: dict[str, Any], reason: str, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        retrying(episode).chat.completions.create(
            **{"model": "tiny", "messages": [ASK], "max_tokens": 4, **options}
        )
    assert refused.value.response.status_code in (400, 404, 422)
    error: Any = refused.value.response.json()["error"]
    assert (error["type"], error["param"]) == (reason, param)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(arrived) == 1
    receipt = episode.server.receipt(episode.attempt)
    assert (receipt.calls, receipt.failures, receipt.pending) == ((), (), ())


@pytest.mark.requirement("X20")
@pytest.mark.parametrize(
    ("options", "param"),
    [({"tool_choice": "required"}, "tool_choice"), ({"cache_salt": ""}, "cache_salt"),
     ({"stream": 1}, "stream")],
)  # fmt: skip
def test_responses_requests_are_refused_in_the_same_shape(
    episode: Episode, options: dict[str, Any], param: str
) -> None:
    url = episode.server.base_url(episode.attempt)
    for route in ("responses", "measure"):
        answer = httpx.post(f"{url}/{route}", json={"model": "tiny", "input": "hi", **options})
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("malformed_request", param, 400)
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.requirement("X20")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/chat/completions"),
        ("POST", "/chat/completions/"),
        ("POST", "/completions"),
        ("DELETE", "/models"),
        ("TRACE", "/responses/resp_1/cancel"),
    ],
)
def test_what_is_no_route_is_answered_in_the_same_shape(
    episode: Episode, method: str, path: str
) -> None:
    url = episode.server.base_url(episode.attempt) + path
    answer = httpx.request(method, url)
    error = answer.json()["error"]
    assert (error["type"], error["code"], answer.status_code) == ("malformed_request", 404, 404)
    assert path in error["message"]
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.requirement("X20")
def test_request_that_is_nested_too_deeply_is_refused(episode: Episode) -> None:
    url = f"{episode.server.base_url(episode.attempt)}/chat/completions"
    statuses = []
    for depth in (10, 150, 300, 450, 600, 750, 900, 1050, 100_000):
        nested = "[" * depth + "]" * depth
        message = f'{{"role": "user", "content": "x", "acme": {nested}}}'
        body = f'{{"messages": [{message}], "max_tokens": 1}}'
        answer = httpx.post(url, content=body, timeout=60)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert answer.json()["error"]["type"] == "malformed_request", depth
            assert answer.headers["x-should-retry"] == "false"
    assert statuses == [200] * statuses.count(200) + [400] * statuses.count(400)
    assert statuses[-1] == 400
    assert not episode.server.receipt(episode.attempt).failures


@pytest.mark.requirement("X20", "A24")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        # Refused by vLLM's checks of the sampling parameters.
        {"stop_token_ids": [-1]},
        {"logprobs": True, "top_logprobs": 500},
        {"stop": [""]},
        # Numbers that do not fit into the message to the engine.
        {"top_k": 10**20},
        {"priority": 10**20},
        {"vllm_xargs": {"acme": 10**20}},
        {"chat_template_kwargs": {"acme": 10**20}},
    ],
    ids=str,
)
def test_what_the_engine_refuses_is_refused_before_the_admission(
    episode: Episode, options: dict[str, Any], stream: bool
) -> None:
    answer = httpx.post(
        f"{episode.server.base_url(episode.attempt)}/chat/completions",
        json={"model": "tiny", "messages": [ASK], "max_tokens": 2, "stream": stream, **options},
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "malformed_request"
    assert answer.headers["x-should-retry"] == "false"
    receipt = episode.server.receipt(episode.attempt)
    assert (receipt.calls, receipt.failures, receipt.pending) == ((), (), ())


@pytest.fixture
def queue(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> Iterator["Queue"]:
    with monkeypatch.context() as patch:
        yield Queue(server, patch)


class Queue:
    """The engine's queue; `full` says of each question whether there is no room."""

    def __init__(self, server: EngineServer, patch: pytest.MonkeyPatch) -> None:
        self.full: Callable[[], bool] = lambda: False
        self.asked = 0
        real = server.engine.check_admission

        def check(n: int = 1, request_id: str | None = None) -> None:
            # vLLM asks without an id before it renders; its answer is not ours.
            if request_id is not None:
                self.asked += 1
                if self.full():
                    raise importlib.import_module("vllm.exceptions").QueueOverflowError
            real(n, request_id)

        patch.setattr(server.engine, "check_admission", check)


def ask(episode: Episode, route: str = "chat/completions", **options: Any) -> httpx.Response:
    asked: dict[str, Any] = {"messages": [ASK], "max_tokens": 4}
    if route == "responses":
        asked = {"input": "go on", "max_output_tokens": 4}
    url = f"{episode.server.base_url(episode.attempt)}/{route}"
    return httpx.post(url, json={"model": "tiny", **asked, **options}, timeout=60)


@pytest.mark.requirement("X20", "A24")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_a_full_queue_refuses_before_the_admission(
    episode: Episode, queue: Queue, route: str, stream: bool
) -> None:
    queue.full = lambda: True
    refused = ask(episode, route, stream=stream)
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["type"] == "engine_error"
    assert "x-should-retry" not in refused.headers  # a client may send it again
    assert queue.asked == 1
    receipt = episode.server.receipt(episode.attempt)
    assert (receipt.calls, receipt.failures, receipt.pending) == ((), (), ())


@pytest.mark.requirement("X20", "A24")
@pytest.mark.parametrize("stream", [False, True])
def test_an_admitted_call_waits_for_room(episode: Episode, queue: Queue, stream: bool) -> None:
    queue.full = lambda: 1 < queue.asked < 6
    answer = ask(episode, stream=stream)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text
    # Before the intent, four times in vain, once with room, and by the engine itself.
    assert queue.asked == 7
    receipt = episode.server.receipt(episode.attempt)
    assert (len(receipt.calls), receipt.failures, receipt.pending) == (1, (), ())


@pytest.mark.requirement("X20", "A24", "I10")
def test_an_admitted_call_does_not_wait_for_ever(
    episode: Episode, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_QUEUE_WAIT_S", 0.05)
    queue.full = lambda: queue.asked > 1
    refused = ask(episode)
    assert refused.status_code == 503
    assert refused.headers["x-should-retry"] == "false"
    (failure,) = episode.server.receipt(episode.attempt).failures
    assert failure.reason == "engine_error"
    queue.full = lambda: False
    assert ask(episode).status_code == 200


@pytest.mark.requirement("X20", "A24")
def test_calls_that_are_being_admitted_count(
    episode: Episode, queue: Queue, service: CaptureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode.server.engine.scheduler_config, "max_num_queued_reqs", 2)
    record = service._ledger.record_intent

    async def record_once_all_have_asked(*arguments: Any, **keywords: Any) -> Any:
        while queue.asked < 6:
            await asyncio.sleep(0.01)
        return await record(*arguments, **keywords)

    monkeypatch.setattr(service._ledger, "record_intent", record_once_all_have_asked)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(partial(ask, episode), ["chat/completions", "responses"] * 3))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]
    receipt = episode.server.receipt(episode.attempt)
    assert (len(receipt.calls), receipt.failures, receipt.pending) == (2, (), ())


@pytest.mark.requirement("I10", "X20")
@pytest.mark.parametrize("stream", [False, True])
def test_calls_end_with_the_task_that_takes_outputs_apart(episode: Episode, stream: bool) -> None:
    """A server that is stopped cancels it; its clients must not wait for ever."""
    engine, loop = episode.server.engine, episode.server._loop
    running = engine.output_processor.request_states
    before = set(running)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, episode, stream=stream, max_tokens=3000, ignore_eos=True)
        wait_until(lambda: bool(set(running) - before))
        loop.call_soon_threadsafe(engine.output_handler.cancel)
        try:
            answer = asked.result(30)
        finally:
            engine.output_handler = None  # the next request starts another one
            ended = asyncio.run_coroutine_threadsafe(
                engine.abort(list(set(running) - before), internal=True), loop
            )
            ended.result(30)
    assert answer.status_code == (200 if stream and "choices" in answer.text else 500)
    assert '"type":"engine_error"' in answer.text
    wait_until(lambda: not episode.server.receipt(episode.attempt).pending)
    (failure,) = episode.server.receipt(episode.attempt).failures
    assert failure.reason == "engine_error"
    assert ask(episode).status_code == 200


@pytest.mark.requirement("X20", "A24", "A20")
def test_spliced_prompt_beyond_the_context_is_refused_before_the_admission(
    episode: Episode,
) -> None:
    # The template drops this reasoning: only the spliced prompt is too long.
    script = episode.ids("<think>\n" + "so " * 3000 + f"\n</think>\n\nParis{END}")
    message, _ = episode.chat([ASK], script)
    message.pop("reasoning", None)
    long = {"role": "user", "content": "and " * 1200}
    url = episode.server.base_url(episode.attempt)
    body = {"model": "tiny", "messages": [ASK, message, long], "max_tokens": 2}
    for route in ("chat/completions", "measure"):
        answer = httpx.post(f"{url}/{route}", json=body)
        assert answer.status_code == 400, answer.text
        assert "4096" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
    receipt = episode.server.receipt(episode.attempt)
    assert (len(receipt.calls), receipt.failures, receipt.pending) == (1, (), ())


@pytest.mark.requirement("C22")
def test_allowed_unreproducible_sampling_marks_the_record(
    episode: Episode, service: CaptureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_allow_unreproducible", True)
    _, record = episode.chat([ASK], presence_penalty=0.5)
    assert not record.sampling.reproducible
    assert record.sampling.presence_penalty == 0.5
    _, plain = episode.chat([ASK])
    assert plain.sampling.reproducible


@pytest.mark.requirement("C22")
def test_custom_logits_processor_is_refused(
    episode: Episode, service: CaptureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_server_changes", ("logits processor acme:Processor",))
    with pytest.raises(openai.BadRequestError, match="logits processor acme:Processor"):
        episode.chat([ASK])


@pytest.mark.requirement("X17")
def test_unknown_fields_are_treated_as_vllm_does(episode: Episode) -> None:
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    message, first = episode.chat([ASK], script, extra_body={"acme_option": 3})
    assert episode.served == episode.ids(episode.template([ASK]))
    _, second = episode.chat([ASK, message, NEXT])
    assert second.parent_call_id == first.call_id
    # A field of a message that templates may print is part of the message.
    named = {**ASK, "name": "ann"}
    _, third = episode.chat([named, message, NEXT])
    assert (third.parent_call_id, third.root_reason) == (None, "no_match")


@pytest.mark.requirement("A24", "X20")
def test_store_that_refuses_the_intent_invites_a_retry(
    episode: Episode, service: CaptureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Any, **keywords: Any) -> Any:
        raise StoreUnavailable("ledger: No space left on device")

    monkeypatch.setattr(service._ledger, "record_intent", refuse)
    url = f"{episode.server.base_url(episode.attempt)}/chat/completions"
    answer = httpx.post(url, json={"model": "tiny", "messages": [ASK]})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "store_unavailable"
    assert "x-should-retry" not in answer.headers


@pytest.mark.requirement("C15", "C16", "I10")
def test_store_that_refuses_the_delta_fails_the_call(
    episode: Episode, service: CaptureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Any, **keywords: Any) -> Any:
        raise StoreUnavailable("delta store: No space left on device")

    monkeypatch.setattr(service._sink, "put", refuse)
    url = f"{episode.server.base_url(episode.attempt)}/chat/completions"
    answer = httpx.post(url, json={"model": "tiny", "messages": [ASK], "max_tokens": 2})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "staging_failed"
    assert answer.headers["x-should-retry"] == "false"
    receipt = episode.server.receipt(episode.attempt)
    assert [failure.reason for failure in receipt.failures] == ["staging_failed"]
    assert (receipt.calls, receipt.pending) == ((), ())


@pytest.mark.requirement("C11", "C24", "G14", "XF2")
@pytest.mark.parametrize(("reason", "status"), [("length", "incomplete"), ("abort", "failed")])
def test_tool_call_does_not_hide_that_the_generation_was_interrupted(
    episode: Episode, server: EngineServer, reason: str, status: str
) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
    script = episode.ids(f"<think>\n\n</think>\n\n{call}\nAnd then")

    def interrupt(output: Any) -> None:
        for completion in output.outputs:
            if completion.finish_reason is not None:
                completion.finish_reason = reason

    with damaged(server, interrupt):
        message, record = episode.chat([ASK], script, tools=TOOLS)
    assert len(message["tool_calls"]) == 1
    assert (record.finish_reason, record.status) == (reason, status)


@pytest.mark.requirement("XF5", "I1", "I2", "C18")
def test_call_that_finishes_after_the_close_stays_isolated(episode: Episode) -> None:
    server = episode.server
    url = f"{server.base_url(episode.attempt)}/chat/completions"
    answers: list[httpx.Response] = []
    body = {"model": "tiny", "messages": [ASK], "max_tokens": 200, "ignore_eos": True}
    late = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=120)))
    late.start()
    wait_until(lambda: len(server.receipt(episode.attempt).pending) == 1)
    receipt = server.close(episode.attempt, wait_s=0)
    assert receipt.closed
    assert len(receipt.pending) == 1
    late.join(120)
    (answer,) = answers
    assert answer.json()["error"]["type"] == "attempt_closed"
    assert answer.headers["x-should-retry"] == "false"
    after = server.receipt(episode.attempt)
    assert after.calls == ()
    again = httpx.post(url, json=body)
    assert (again.status_code, again.json()["error"]["type"]) == (422, "attempt_closed")


@pytest.mark.requirement("A16")
def test_missing_evidence_of_the_parent_is_an_error(
    episode: Episode, service: CaptureService, server: EngineServer
) -> None:
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    message, first = episode.chat([ASK], script)
    service._prefixes._histories.clear()
    # Cold, the history comes from the store.
    _, second = episode.chat([ASK, message, NEXT])
    assert second.parent_call_id == first.call_id
    service._prefixes._histories.clear()
    sink = server.app.state.forest.control.sink
    path: Path = sink.shard_path(first.delta.partition, first.delta.shard)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(openai.BadRequestError) as refused:
        episode.chat([ASK, message, NEXT])
    error: Any = refused.value.response.json()["error"]
    assert error["type"] == "missing_parent_evidence"
    path.write_bytes(data)
    receipt = server.receipt(episode.attempt)
    assert len(receipt.calls) == 2
    assert receipt.failures == ()


@pytest.mark.requirement("A2", "A1")
def test_attempts_are_separate(episode: Episode, server: EngineServer) -> None:
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    message, _ = episode.chat([ASK], script)
    other = openai.OpenAI(
        base_url=server.base_url(server.open_attempt()), api_key="unused", max_retries=0
    )
    other.chat.completions.create(
        model="tiny",
        messages=[ASK, message, NEXT],
        max_tokens=2,  # type: ignore[list-item]
    )
    assert len(server.receipt(episode.attempt).calls) == 1
    for attempt in ("att_" + "0" * 32, "att_zz", "..", "control"):
        answer = httpx.post(f"{server.url}/v1/forest/{attempt}/chat/completions", json={})
        assert 400 <= answer.status_code < 500
        assert "Paris" not in answer.text


@pytest.mark.requirement("A25", "A2", "A24")
def test_calls_of_one_attempt_overlap(episode: Episode, server: EngineServer) -> None:
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    message, first = episode.chat([ASK], script)

    def branch(number: int) -> None:
        episode.client.chat.completions.create(
            model="tiny",
            messages=[ASK, message, {"role": "user", "content": f"branch {number}"}],  # type: ignore[list-item]
            max_tokens=20,
            seed=number,
        )

    threads = [threading.Thread(target=branch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        receipt = server.close(episode.attempt)
    assert len(receipt.calls) == 7
    assert {call.parent_call_id for call in receipt.calls[1:]} == {first.call_id}
    assert sorted(call.order for call in receipt.calls) == list(range(7))
    assert len({call.call_id for call in receipt.calls}) == 7


@pytest.mark.requirement("X2", "A21")
@pytest.mark.parametrize(
    ("stops", "closing"),
    [({"stop": ["lin"]}, END + "\n"), ({"extra_body": {"stop_token_ids": "last"}}, END + "\n")],
)
def test_turns_that_stop_otherwise_are_closed_by_the_template(
    episode: Episode, stops: dict[str, Any], closing: str
) -> None:
    script = episode.ids("<think>\n\n</think>\n\nBerlin")
    if "extra_body" in stops:
        stops = {"extra_body": {"stop_token_ids": [script[-1]]}}
    message, first = episode.chat([ASK], script, max_tokens=50, **stops)
    assert first.finish_reason == "stop"
    assert first.stop_reason in ("lin", script[-1])
    _, second = episode.chat([ASK, message, NEXT])
    assert second.parent_call_id == first.call_id
    assert episode.tail_text(first).startswith(closing + "<|im_start|>user\nAnd of")
