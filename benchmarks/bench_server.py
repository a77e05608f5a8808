"""Tool conversations of 20 turns through the server: captured, stock with logprobs, plain.

    pytest benchmarks/bench_server.py --benchmark-only

Every turn is reasoning and a tool call, written by a logits processor that makes all routes
generate the same tokens, then a tool's output. The routes take turns inside every turn of the
conversation, in changing order, so that other load meets all of them. Another process sends.
"""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conftest import Report
from benchmarks.figures import Figure, Goal, figure
from benchmarks.histories import MODEL, tool_rounds, words
from tests.support.engine import EngineServer, scripted_engine
from tests.support.episodes import TOOLS
from tests.support.models import CACHE, load_qwen3_tokenizer, make_qwen3_model

TURNS = 20
CASES = [(1, 0, 2), (8, 0, 1), (32, 0, 1), (1, 200, 1)]
"""Concurrent conversations, rounds of tool calls before their first requests, how often held."""
OBSERVATION = 100
"""Tokens of a tool's output."""
CAPTURED, STOCK, PLAIN = "captured", "stock, logprobs=0", "stock, plain"
LOGPROBS = {"logprobs": True, "top_logprobs": 0}

Load = Callable[[list[tuple[str, dict[str, Any]]]], dict[str, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [(2, 4, 1)] if metafunc.config.getoption("--quick") else CASES
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    directory = CACHE / "qwen3-tiny-untied"
    if not (directory / "model.safetensors").is_file():
        make_qwen3_model(directory)
    with scripted_engine(
        directory,
        tmp_path_factory.mktemp("state"),
        "--max-model-len", "32768",
        "--max-num-seqs", "32",
        "--kv-cache-memory-bytes", str(1 << 30),
        "--reasoning-parser", "qwen3",
        "--enable-auto-tool-choice",
        "--tool-call-parser", "hermes",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="session")
def load() -> Iterator[Load]:
    script = Path(__file__).with_name("load.py")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, answered = process.stdin, process.stdout

        def ask(requests: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
            given.write(json.dumps(requests) + "\n")
            given.flush()
            answer: dict[str, Any] = json.loads(answered.readline())
            return answer

        yield ask
        given.close()


@dataclass
class Steps:
    """CPU seconds of the steps of an event loop."""

    requests: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    """Of the one task that takes the engine's outputs of all requests apart, which is vLLM's."""

    def clear(self) -> None:
        """Forget all of them."""
        self.requests.clear()
        self.outputs.clear()


def _takes_outputs(handle: Handle) -> bool:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    if not isinstance(task, asyncio.Task):
        return False
    return getattr(task.get_coro(), "__qualname__", "").endswith("output_handler")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, server: EngineServer) -> Iterator[Steps]:
    """The steps of the server's event loop, appended as they run.

    Without Python's garbage collections: they meet every route, and a full one is the longest.
    """
    taken = Steps()
    run, loop, thread = Handle._run, server._loop, server._thread
    begun = collecting = 0.0

    def collected(phase: str, _: dict[str, int]) -> None:
        nonlocal begun, collecting
        if threading.current_thread() is not thread:
            return
        if phase == "start":
            begun = time.thread_time()
        else:
            collecting += time.thread_time() - begun

    def timed_run(self: Any) -> None:
        nonlocal collecting
        if self._loop is not loop:
            return run(self)
        kind = taken.outputs if _takes_outputs(self) else taken.requests
        collecting, start = 0.0, time.thread_time()
        run(self)
        kind.append(time.thread_time() - start - collecting)
        return None

    monkeypatch.setattr(Handle, "_run", timed_run)
    gc.callbacks.append(collected)
    yield taken
    gc.callbacks.remove(collected)


@dataclass
class Route:
    """One way to ask, and what was measured of it."""

    urls: list[str]
    """Of each conversation's requests."""
    extra: dict[str, Any] = field(default_factory=dict)
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    """Requests per second of each turn."""
    first: list[float] = field(default_factory=list)
    """Milliseconds to the first chunk of each request."""
    cached: list[float] = field(default_factory=list)
    """Prompt tokens of each request whose keys and values were cached."""
    cpu: list[float] = field(default_factory=list)
    """Milliseconds of CPU of the API server's process per request of each turn."""
    steps: list[float] = field(default_factory=list)
    """Milliseconds of CPU of each step of the event loop that belongs to requests."""
    outputs: list[float] = field(default_factory=list)
    """Milliseconds of CPU of each step that takes the engine's outputs apart."""


@dataclass
class Talks:
    """Conversations that are held on every route in step."""

    tokenizer: Any
    load: Load
    steps: Steps

    def turn(self, route: Route, number: int, *, measured: bool) -> None:
        """Ask every conversation's next turn at once, and append what comes back."""
        script = self.tokenizer.encode(
            f"<think>\nstep {number}\n</think>\n\n<tool_call>\n"
            f'{{"name": "search", "arguments": {{"query": "{number}"}}}}\n</tool_call><|im_end|>',
            add_special_tokens=False,
        )
        requests = [
            (
                url,
                {
                    "model": MODEL,
                    "messages": messages,
                    "tools": TOOLS,
                    "max_tokens": len(script),
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "vllm_xargs": {"force": script},
                    **route.extra,
                },
            )
            for url, messages in zip(route.urls, route.conversations, strict=True)
        ]
        self.steps.clear()
        cpu = time.process_time()
        answer = self.load(requests)
        cpu = time.process_time() - cpu
        for messages, request in zip(route.conversations, answer["requests"], strict=True):
            message = request["message"]
            (call,) = message["tool_calls"]
            output = {"role": "tool", "tool_call_id": call["id"]}
            messages += [message, output | {"content": words(OBSERVATION, number)}]
        if not measured:
            return
        route.rate.append(len(requests) / answer["seconds"])
        route.cpu.append(1e3 * cpu / len(requests))
        route.steps += [1e3 * step for step in self.steps.requests]
        route.outputs += [1e3 * step for step in self.steps.outputs]
        for request in answer["requests"]:
            route.first.append(1e3 * request["first"])
            details = request["usage"].get("prompt_tokens_details") or {}
            route.cached.append(details.get("cached_tokens") or 0)


def test_conversations(
    report: Report,
    server: EngineServer,
    load: Load,
    steps: Steps,
    case: tuple[int, int, int],
    quick: bool,
) -> None:
    concurrent, rounds, held = case
    stock = f"{server.url}/v1/chat/completions"
    routes = {
        CAPTURED: Route([]),
        STOCK: Route([stock] * concurrent, LOGPROBS),
        PLAIN: Route([stock] * concurrent),
    }
    talks = Talks(load_qwen3_tokenizer(), load, steps)
    turns = 3 if quick else TURNS

    def converse() -> None:
        for talk in range(held):
            routes[CAPTURED].urls = [
                f"{server.base_url(server.open_attempt('bench'))}/chat/completions"
                for _ in range(concurrent)
            ]
            for name, route in routes.items():
                # Their first words differ, so that no route finds another's prefix cached.
                route.conversations = [
                    [
                        {"role": "user", "content": f"{name} {talk} {case} {n}: go on"},
                        *(tool_rounds(rounds, 10, OBSERVATION) if rounds else ()),
                    ]
                    for n in range(concurrent)
                ]
            for number in range(turns):
                names = list(routes)
                for name in names[number % 3 :] + names[: number % 3]:
                    talks.turn(routes[name], number, measured=number > 0)

    report.benchmark.pedantic(converse, rounds=1)
    for row, goals in _rows(routes, concurrent, rounds):
        report.add(row, *goals)


def _rows(
    routes: dict[str, Route], concurrent: int, rounds: int
) -> Iterator[tuple[Figure, list[Goal]]]:
    def row(case: str, unit: str, of: Callable[[Route], list[float]], **labels: Any) -> Figure:
        peers = {name: of(route) for name, route in routes.items() if name != CAPTURED}
        return figure("Server", case, unit, of(routes[CAPTURED]), peers=peers, **labels)

    case = f"{concurrent} conversations at once"
    rate = row(
        f"{case}, after {2 * rounds + 2} messages" if rounds else case,
        "requests/s",
        lambda route: route.rate,
        x=None if rounds else concurrent,
        x_label="conversations at once",
        headline=f"{concurrent} tool conversations at once" if concurrent == 8 else "",
    )
    lost = 100 * (1 - rate.other(STOCK).ratio)
    yield rate, [Goal("2 % lost against logprobs=0", lost, 2.0)]
    yield row("  time to first token", "ms", lambda route: route.first), []
    yield row("  cached tokens of a prompt", "tokens", lambda route: route.cached), []
    yield row("  CPU of the API server per request", "ms", lambda route: route.cpu), []
    yield row("  event-loop step of a request, 99.9th percentile", "ms", _high), []
    longest = row("  event-loop step of a request, longest", "ms", lambda route: [max(route.steps)])
    stock = max(other.spread.median for other in longest.others)
    yield longest, [Goal("2 ms above stock's", longest.ours.median - stock, 2.0)]
    outputs = "  event-loop step that takes outputs apart, longest"
    yield row(outputs, "ms", lambda route: [max(route.outputs)]), []


def _high(route: Route) -> list[float]:
    return [sorted(route.steps)[int(len(route.steps) * 0.999)]]
