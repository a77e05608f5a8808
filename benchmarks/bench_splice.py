"""One continuation, from the request's messages to the ids that the engine gets.

    pytest benchmarks/bench_splice.py --benchmark-only

The conversation is a tool loop with reasoning, tokenized by Qwen3's tokenizer. Every peer is asked
for the same prompt and must give the same ids.
"""

import asyncio
import importlib
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from forest_schema.items import normalize_chat
from vllm_forest_renderer import compat
from vllm_forest_renderer.context import CURRENT
from vllm_forest_renderer.plugin import wrap_renderers
from vllm_forest_renderer.render_options import render_option_digest
from vllm_forest_renderer.renderer import ForestRenderer
from vllm_forest_renderer.serving.known_histories import KnownHistories
from vllm_forest_renderer.splice import TailProver

from benchmarks.conftest import Report, timed
from benchmarks.figures import Figure, Goal, figure
from benchmarks.histories import MODEL, Captured, captured
from tests.support.episodes import TOOLS
from tests.support.models import load_qwen3_tokenizer, qwen3_config, qwen3_tokenizer_dir

TEMPLATE_OPTIONS: dict[str, Any] = {"add_generation_prompt": True, "tools": TOOLS}
HISTORIES = [1_000, 4_000, 16_000, 65_000, 256_000]
NEW = [64, 270, 2_000]
CALLS = 8
CASES = [
    *((tokens, new, CALLS) for tokens in HISTORIES for new in NEW),
    *((16_000, 270, calls) for calls in (20, 40)),
    (65_000, 270, 200),
]
QUICK = (1_000, 64, 8)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [QUICK] if metafunc.config.getoption("--quick") else CASES
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_qwen3_tokenizer()


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a server of this model renders with, without an engine."""
    model = tmp_path_factory.mktemp("model")
    config = qwen3_config(max_position_embeddings=1 << 20)
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).symlink_to(qwen3_tokenizer_dir() / name)
    wrap_renderers()
    return compat.offline_renderer(str(model))


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="session")
def peer() -> Any:
    """Prime Intellect's `renderers`; None where it is not installed."""
    return importlib.import_module("renderers") if find_spec("renderers") else None


def _talk(tokenizer: Any, params: Any, case: tuple[int, int, int], **options: Any) -> Captured:
    tokens, new, calls = case
    digest = render_option_digest(params, model=MODEL, add_special_tokens=False, **options)
    return captured(tokenizer, tokens=tokens, new=new, calls=calls, options=digest, tools=TOOLS)


def _case(talk: Captured, new: int) -> str:
    return f"{len(talk.tokens):,} tokens in {len(talk.messages)} messages, {new:,} new"


def _rounds(tokens: int, quick: bool) -> int:
    return 2 if quick else 25 if tokens <= 16_000 else 9 if tokens <= 65_000 else 4


# Resolution and splice by themselves: CPU time without the template and without the tokenizer.


@dataclass(frozen=True)
class _TokenizeParams:
    add_special_tokens: bool = False


class _Base:
    """A renderer that times its template and its tokenizer, so that they can be taken out."""

    default_chat_tok_params = _TokenizeParams()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.elsewhere_s = 0.0

    def get_mm_processor(self) -> Any:
        raise ValueError("a model of text has none")

    async def render_chat_async(
        self, conversations: list[Any], chat_params: Any, tok_params: Any, **_: Any
    ) -> Any:
        conversation, prompt = await self.render_messages_async(conversations[0], chat_params)
        return [conversation], [{"type": "token", **prompt}]

    def render_messages(self, messages: list[Any], params: Any) -> Any:
        start = time.thread_time()
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **TEMPLATE_OPTIONS)
        self.elsewhere_s += time.thread_time() - start
        return messages, {"prompt": text}

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        return self.render_messages(messages, params)

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        start = time.thread_time()
        ids = self._tokenizer.encode(prompt["prompt"], add_special_tokens=False)
        self.elsewhere_s += time.thread_time() - start
        return {"prompt_token_ids": ids}


class _Renderer(ForestRenderer, _Base):
    def __init__(self, tokenizer: Any) -> None:
        _Base.__init__(self, tokenizer)  # there is no server to check
        self._prover = TailProver(
            added_tokens=tokenizer.get_added_vocab(),
            end_ids={tokenizer.eos_token_id},
            decode=tokenizer.decode,
        )

    async def _forest_in_thread(self, work: Callable[[], Any]) -> Any:
        return work()  # where its CPU time is counted


class _TimedTokenizer:
    """What `renderers` needs of a tokenizer, without character offsets: its fastest form."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self.decode = tokenizer.decode
        self.elsewhere_s = 0.0

    def encode(self, text: str, **options: Any) -> list[int]:
        start = time.thread_time()
        ids: list[int] = self._tokenizer.encode(text, **options)
        self.elsewhere_s += time.thread_time() - start
        return ids


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing; it may hand the event loop back."""
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine waited")


def _bridge(peer: Any, tokenizer: Any, talk: Captured) -> Any:
    """The peer's continuation: it is handed the captured ids and the new messages only."""
    made = peer.create_renderer(tokenizer, peer.Qwen3RendererConfig())
    at = len(talk.tokens) - talk.records[-1].generated_len
    return partial(
        made.bridge_to_next_turn,
        talk.tokens[:at],
        talk.tokens[at:],
        talk.messages[-1:],
        tools=TOOLS,
    )


def _splice_goals(row: Figure, case: tuple[int, int, int], messages: int) -> Iterator[Goal]:
    """The goal is one for 65k tokens of history; a longer one may cost its copy beside it."""
    tokens, new, _ = case
    allowed = 0.3 + 0.004 * messages
    if new > 270:
        return
    if tokens <= 65_000:
        yield Goal("0.3 ms + 4 us per message", row.ours.median, allowed)
    else:
        beside = row.ours.median - row.other("copy of the ids").spread.median
        yield Goal("0.3 ms + 4 us per message beside the copy", beside, allowed)


def test_resolution_and_splice(
    report: Report, tokenizer: Any, peer: Any, case: tuple[int, int, int], quick: bool
) -> None:
    params = compat.chat_params(None, TOOLS)
    talk = _talk(tokenizer, params, case, takes_api_fields=True)
    renderer, timing = _Renderer(tokenizer), _TimedTokenizer(tokenizer)
    bridge = _bridge(peer, timing, talk) if peer else None
    clock = time.thread_time  # nothing here waits, and other load does not count
    served: list[list[int]] = []
    digesting: list[float] = []
    body = json.dumps(talk.messages)

    def continuation() -> float:
        known, messages = KnownHistories("chat"), json.loads(body)
        _finish(known.normalize("att", json.loads(body)[:-2]))  # the request of the captured call
        renderer.elsewhere_s, start = 0.0, clock()
        call = talk.call(_finish(known.normalize("att", messages)))
        digesting.append(clock() - start)
        CURRENT.set(call)
        _finish(renderer.render_chat_async([talk.messages], params))
        spent = clock() - start
        CURRENT.set(None)
        assert call.predecessor is not None
        served[:] = [call.prompt_tokens or []]
        return spent - renderer.elsewhere_s

    def bridged() -> float:
        timing.elsewhere_s, start = 0.0, clock()
        answer = bridge()  # type: ignore[misc]
        spent = clock() - start
        assert not served or answer.token_ids == served[0]
        return spent - timing.elsewhere_s

    rounds = 2 if quick else 30
    row = report.compare(
        "Resolution and splice",
        _case(talk, case[1]),
        continuation,
        peers={"renderers' bridge": bridged} if peer else {},
        limits={"copy of the ids": timed(lambda: list(talk.tokens), clock)},
        rounds=rounds,
        x=len(talk.tokens) if case[1:] == (270, CALLS) else None,
        x_label="tokens of history",
        headline="splice of 270 tokens onto 65k" if case == (65_000, 270, CALLS) else "",
    )
    report.add(row, *_splice_goals(row, case, len(talk.messages)))
    report.add(
        figure(
            "Resolution and splice",
            "  of which normalising and digesting the messages",
            "ms",
            [1e3 * seconds for seconds in digesting[-rounds:]],
        )
    )
    whole = timed(lambda: normalize_chat(talk.messages), clock)
    report.add(
        figure(
            "Resolution and splice",
            "  of the first request of an attempt, which is read whole",
            "ms",
            [1e3 * whole() for _ in range(rounds)],
        )
    )


# The whole render step, with the template and the tokenizer.


def test_render(
    report: Report,
    tokenizer: Any,
    renderer: Any,
    loop: asyncio.AbstractEventLoop,
    peer: Any,
    case: tuple[int, int, int],
    quick: bool,
) -> None:
    """Wall time on a warm event loop; the threads of vLLM's renderer included."""
    params = compat.chat_params(tokenizer.chat_template, TOOLS)
    talk = _talk(
        tokenizer, params, case, takes_api_fields=not isinstance(renderer, compat.HfRenderer)
    )
    shown = [
        {**message, "reasoning_content": message.get("reasoning")} for message in talk.messages
    ]
    answers: dict[str, list[int]] = {}
    body = json.dumps(talk.messages)

    async def render(known: KnownHistories | None) -> float:
        messages = json.loads(body)  # vLLM decodes tool arguments in place
        start = time.perf_counter()
        call = talk.call(await known.normalize("att", messages)) if known is not None else None
        CURRENT.set(call)
        _, (prompt,) = await renderer.render_chat_async([messages], params)
        spent = time.perf_counter() - start
        assert call is None or call.predecessor is not None
        answers["stock" if call is None else "ours"] = prompt["prompt_token_ids"]
        return spent

    def continuation() -> float:
        known = KnownHistories("chat")
        _finish(known.normalize("att", json.loads(body)[:-2]))  # the request of the captured call
        return loop.run_until_complete(render(known))

    def transformers() -> None:
        answers["transformers"] = tokenizer.apply_chat_template(shown, **TEMPLATE_OPTIONS)[
            "input_ids"
        ]

    peers = {
        "stock vLLM": lambda: loop.run_until_complete(render(None)),
        "transformers": timed(transformers),
    }
    if peer is not None:
        whole = peer.create_renderer(tokenizer, peer.Qwen3RendererConfig())

        def rendered() -> None:
            answers["renderers"] = whole.render_ids(shown, tools=TOOLS, add_generation_prompt=True)

        peers["renderers' full render"] = timed(rendered)
        peers["renderers' bridge"] = timed(_bridge(peer, tokenizer, talk))

    row = report.compare(
        "Whole render step",
        _case(talk, case[1]),
        continuation,
        peers=peers,
        limits={"copy of the ids": timed(lambda: list(talk.tokens))},
        rounds=_rounds(case[0], quick),
        warmup=1,
        x=len(talk.tokens) if case[1:] == (270, CALLS) else None,
        x_label="tokens of history",
        headline="whole render step at 16k tokens" if case == (16_000, 270, CALLS) else "",
    )
    goals = [Goal("0.1 of stock vLLM", row.other("stock vLLM").ratio, 0.1)]
    report.add(row, *(goals if case[0] == 16_000 else ()))
    assert all(ids == answers["ours"] for ids in answers.values()), "the peers rendered other ids"
