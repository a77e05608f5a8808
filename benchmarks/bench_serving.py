"""Speed of the serving side, as ratios against its peers in the same run.

    pytest benchmarks/bench_serving.py -o addopts= --benchmark-only [--benchmark-json=FILE]

Our work and its peers take turns, so that other load meets all of them; medians are compared. A
table of figures and goals is printed at the end. A missed goal is marked, it fails nothing.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.histories import MODEL
from tests.support.capture import Capture, make_delta
from tests.support.engine import EngineServer
from tests.support.models import CACHE, make_qwen3_model

CONCURRENT = 8
GENERATED = 64


@dataclass
class Table:
    """Lines of the printed report."""

    lines: list[str] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, goal: float | None = None) -> None:
        """One figure; `goal` is the highest value that reaches it."""
        shown = "" if goal is None else f"goal <= {goal:.3g}{'  MISSED' * (value > goal)}"
        self.lines.append(f"{what:66s} {value:9.3f} {unit:3s} {shown}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("serving")
        for line in self.lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    made = Table()
    request.config.pluginmanager.register(made)
    return made


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    directory = CACHE / "qwen3-tiny-untied"
    if not (directory / "model.safetensors").is_file():
        make_qwen3_model(directory)
    state = str(tmp_path_factory.mktemp("state"))
    with EngineServer(
        directory, "--max-model-len", "32768", forest={"state_dir": state}
    ) as running:
        yield running


# Requests through the server, and how long its event loop is held up


class _Ticker:
    """Asks for the event loop every millisecond and notes what it got."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self.wall: list[float] = []
        self.cpu: list[float] = []

    async def _tick(self) -> None:
        while not self._stop.is_set():
            start, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.wall.append(time.perf_counter() - start - 0.001)
            self.cpu.append(time.thread_time() - cpu)

    def __enter__(self) -> "_Ticker":
        self._task = asyncio.run_coroutine_threadsafe(self._tick(), self._server._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._task.result(30)


@dataclass
class _Route:
    """One way to ask, and what was measured of it."""

    urls: list[str]
    extra: dict[str, Any]
    rates: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    """CPU seconds of the API server's process per request."""
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@pytest.fixture
def load() -> Iterator[Callable[[list[Any]], dict[str, Any]]]:
    script = Path(__file__).with_name("load.py")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(requests: list[Any]) -> dict[str, Any]:
            process.stdin.write(json.dumps(requests) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            answer: dict[str, Any] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            return answer

        yield ask
        process.stdin.close()


def test_server(benchmark: Any, table: Table, server: EngineServer, load: Any) -> None:
    stock = [f"{server.url}/v1/chat/completions"] * CONCURRENT
    attempts = [server.open_attempt("bench") for _ in range(CONCURRENT)]
    routes = {
        "plain": _Route(stock, {}),
        "logprobs=0": _Route(stock, {"logprobs": True, "top_logprobs": 0}),
        "captured": _Route([f"{server.base_url(a)}/chat/completions" for a in attempts], {}),
    }
    asked = 0

    def ask(route: _Route) -> None:
        nonlocal asked
        requests = []
        for url in route.urls:
            asked += 1
            message = {"role": "user", "content": f"{asked:06d} " + "tell me more " * 60}
            body = {"model": MODEL, "messages": [message], "max_tokens": GENERATED}
            requests.append((url, body | route.extra))
        with _Ticker(server) as ticker:
            start = time.process_time()
            answer = load(requests)
            route.spent.append((time.process_time() - start) / len(requests))
        route.rates.append(answer["tokens"] / answer["seconds"])
        route.each += answer["each"]
        if len(route.rates) > 1:  # the first round warms up
            route.wall += ticker.wall
            route.cpu += ticker.cpu

    def peers() -> None:
        ask(routes["plain"])
        ask(routes["logprobs=0"])

    benchmark.pedantic(lambda: ask(routes["captured"]), setup=peers, rounds=10, warmup_rounds=1)
    name = f"server, {CONCURRENT} requests x {GENERATED} tokens:"
    rates = {which: median(route.rates[1:]) for which, route in routes.items()}
    for which, route in routes.items():
        table.add(f"{name} {which}", rates[which], "t/s")
        table.add("  one request", median(route.each[CONCURRENT:]) * 1e3, "ms")
        table.add("  CPU time of the API server for it", median(route.spent[1:]) * 1e3, "ms")
        table.add("  event loop busy between two 1 ms ticks, longest", max(route.cpu) * 1e3, "ms")
        table.add("  event loop busy, 99.9th percentile", _high(route.cpu) * 1e3, "ms")
        table.add("  event loop late, longest", max(route.wall) * 1e3, "ms")
        table.add("  event loop late, 99.9th percentile", _high(route.wall) * 1e3, "ms")
    # Pairs of neighbouring rounds: a slow drift of the machine's load cancels.
    pairs = zip(routes["logprobs=0"].rates[1:], routes["captured"].rates[1:], strict=True)
    loss = 1 - median(ours / peer for peer, ours in pairs)
    table.add("  captured: throughput lost against logprobs=0", loss * 100, "%", 2.0)
    benchmark.extra_info |= {"tokens_per_s": rates, "loss": loss}


def _high(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.999)]


# Durable capture


@pytest.mark.parametrize("overlapping", [1, 8, 32])
def test_durable(benchmark: Any, table: Table, tmp_path: Path, overlapping: int) -> None:
    """Intent, delta and record of a call of 330 tokens against writing and flushing the delta."""
    delta = make_delta(330, 60)
    payload = b"".join(array.tobytes() for array in delta.values())
    loop = asyncio.new_event_loop()
    capture = loop.run_until_complete(Capture.open(tmp_path))
    attempt = loop.run_until_complete(capture.attempt())
    raw: list[float] = []
    ours: list[float] = []

    def write() -> None:
        start = time.perf_counter()
        for _ in range(overlapping):
            descriptor = os.open(tmp_path / f"raw-{len(raw)}", os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, payload)
            os.fsync(descriptor)
            os.close(descriptor)
        raw.append((time.perf_counter() - start) / overlapping)

    async def calls() -> None:
        await asyncio.gather(*(capture.call(attempt, delta=delta) for _ in range(overlapping)))

    def ask() -> None:
        start = time.perf_counter()
        loop.run_until_complete(calls())
        ours.append((time.perf_counter() - start) / overlapping)

    benchmark.pedantic(ask, setup=write, rounds=25, warmup_rounds=2)
    loop.run_until_complete(capture.shutdown())
    loop.close()
    name = f"durable capture, {overlapping} overlapping:"
    table.add(f"{name} one call", median(ours) * 1e3, "ms")
    table.add("  write + fsync of its bytes", median(raw) * 1e3, "ms")
    table.add("  against it", median(ours) / median(raw), "x")
    benchmark.extra_info |= {"call_ms": median(ours) * 1e3, "raw_ms": median(raw) * 1e3}
