"""Speed of the serving side, as ratios against its peers in the same run.

    pytest benchmarks/bench_serving.py -o addopts= --benchmark-only [--benchmark-json=FILE]

Our work and its peers take turns, so that other load meets all of them; medians are compared. A
table of figures and goals is printed at the end. A missed goal is marked, it fails nothing.
"""

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from forest_schema.items import normalize_chat
from vllm_forest_renderer import compat
from vllm_forest_renderer.context import CURRENT
from vllm_forest_renderer.render_options import render_option_digest
from vllm_forest_renderer.renderer import ForestRenderer
from vllm_forest_renderer.splice import TailProver

from benchmarks.histories import MODEL, captured
from tests.support.capture import Capture, make_delta
from tests.support.engine import EngineServer
from tests.support.episodes import TOOLS
from tests.support.models import CACHE, load_qwen3_tokenizer, make_qwen3_model

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
def tokenizer() -> Any:
    return load_qwen3_tokenizer()


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


# 1. Resolution and splice by themselves


@dataclass(frozen=True)
class _TokenizeParams:
    add_special_tokens: bool = False


class _Base:
    """A renderer that times its template and its tokenizer, so that they can be taken out."""

    default_chat_tok_params = _TokenizeParams()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.template_s = self.tokenize_s = 0.0

    async def render_chat_async(
        self, conversations: list[Any], chat_params: Any, tok_params: Any
    ) -> Any:
        conversation, prompt = await self.render_messages_async(conversations[0], chat_params)
        return [conversation], [{"type": "token", **prompt}]

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        start = time.thread_time()
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, tools=TOOLS
        )
        self.template_s += time.thread_time() - start
        return messages, {"prompt": text}

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        start = time.thread_time()
        ids = self._tokenizer.encode(prompt["prompt"], add_special_tokens=False)
        self.tokenize_s += time.thread_time() - start
        return {"prompt_token_ids": ids}


class _Renderer(ForestRenderer, _Base):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._prover = TailProver(
            added_tokens=tokenizer.get_added_vocab(),
            end_ids={tokenizer.eos_token_id},
            decode=tokenizer.decode,
        )


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine waited")


@pytest.mark.parametrize(
    ("tokens", "calls"),
    [(1_000, 8), (4_000, 8), (16_000, 8), (65_000, 8), (65_000, 200)],
    ids=lambda value: str(value),
)
def test_splice(benchmark: Any, table: Table, tokenizer: Any, tokens: int, calls: int) -> None:
    params = compat.chat_params(None, TOOLS)
    digest = render_option_digest(
        params, model=MODEL, add_special_tokens=False, takes_api_fields=True
    )
    talk = captured(tokenizer, tokens=tokens, calls=calls, options=digest, tools=TOOLS)
    renderer = _Renderer(tokenizer)
    clock = time.thread_time  # CPU time: nothing here waits
    ours, normalising, copying, tokenizing = [], [], [], []

    def peers() -> None:
        start = clock()
        list(talk.tokens)
        copying.append(clock() - start)
        start = clock()
        normalize_chat(talk.messages)
        normalising.append(clock() - start)

    def continuation() -> None:
        call = talk.call()
        CURRENT.set(call)
        renderer.template_s = renderer.tokenize_s = 0.0
        start = clock()
        _finish(renderer.render_chat_async([talk.messages], params))
        spent = clock() - start
        CURRENT.set(None)
        assert call.predecessor is not None
        ours.append(spent - renderer.template_s - renderer.tokenize_s)
        tokenizing.append(renderer.tokenize_s)

    benchmark.pedantic(continuation, setup=peers, rounds=60, warmup_rounds=3)
    items, length = len(talk.messages), len(talk.tokens)
    name = f"splice, {length} tokens, {items} items:"
    cost, copied = median(ours) * 1e3, median(copying) * 1e3
    digesting = median(normalising) * 1e3
    table.add(f"{name} with digests", cost + digesting, "ms", 0.3 + 0.004 * items)
    table.add("  of which normalising and digesting the items", digesting, "ms")
    table.add("  of which resolve + splice", cost, "ms", 0.3 + 0.004 * items)
    table.add("  resolve + splice, beyond copying the ids", cost - copied, "ms")
    table.add("  resolve + splice against copying the ids", cost / copied, "x")
    table.add("  tokenizing the tail", median(tokenizing) * 1e3, "ms")
    benchmark.extra_info |= {"tokens": length, "items": items}
    benchmark.extra_info |= {"digest_ms": digesting, "splice_ms": cost, "copy_ms": copied}


# 2. The whole render step


@pytest.mark.parametrize("calls", [10, 20, 40])
def test_render(
    benchmark: Any, table: Table, tokenizer: Any, server: EngineServer, calls: int
) -> None:
    """16k tokens of history in more or fewer messages: the template is rendered either way."""
    renderer = server.engine.renderer
    params = compat.chat_params(tokenizer.chat_template, TOOLS)
    digest = render_option_digest(
        params,
        model=MODEL,
        add_special_tokens=renderer.default_chat_tok_params.add_special_tokens,
        takes_api_fields=not isinstance(renderer, compat.HfRenderer),
    )
    talk = captured(tokenizer, tokens=16_000, calls=calls, options=digest, tools=TOOLS)

    async def render(call: Any) -> tuple[float, float]:
        """Wall time, and CPU time of the process with the renderer's threads."""
        messages = copy.deepcopy(talk.messages)  # vLLM decodes tool arguments in place
        CURRENT.set(call)
        start, cpu = time.perf_counter(), time.process_time()
        await renderer.render_chat_async([messages], params)
        return time.perf_counter() - start, time.process_time() - cpu

    ours: list[tuple[float, float]] = []
    stock: list[tuple[float, float]] = []

    def continuation() -> None:
        call = talk.call()
        ours.append(server.run(render(call)))
        assert call.predecessor is not None

    benchmark.pedantic(
        continuation,
        setup=lambda: stock.append(server.run(render(None))),
        rounds=40,
        warmup_rounds=3,
    )
    our_wall, our_cpu = (median(values) * 1e3 for values in zip(*ours, strict=True))
    stock_wall, stock_cpu = (median(values) * 1e3 for values in zip(*stock, strict=True))
    name = f"render, {len(talk.tokens)} tokens, {len(talk.messages)} messages:"
    table.add(f"{name} captured", our_wall, "ms")
    table.add("  stock vLLM", stock_wall, "ms")
    table.add("  captured against stock, wall time", our_wall / stock_wall, "x", 0.1)
    table.add("  captured against stock, CPU time", our_cpu / stock_cpu, "x", 0.1)
    benchmark.extra_info |= {"stock_ms": stock_wall, "ours_ms": our_wall}


# 3 and 4. Requests through the server, and how long its event loop is held up


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


# 5. Durable capture


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
