"""Routed experts of a real engine, against a forward pass of transformers over the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from forest_schema import CallRecord
from forest_schema.routes import ROUTES
from numpy.typing import NDArray

from tests.support.engine import EngineServer, returns_routes_on_cpu, scripted_engine
from tests.support.episodes import END, Episode
from tests.support.models import make_qwen3_model, qwen3_moe_config

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(
        not returns_routes_on_cpu(), reason="this vLLM returns routed experts on a GPU only"
    ),
]

ASK = {"role": "user", "content": "What is the capital of France?"}
NEXT = {"role": "user", "content": "And of Germany?"}


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_model(tmp_path_factory.mktemp("moe"), config=qwen3_moe_config())


@pytest.fixture(scope="module")
def moe_prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "prompts.jsonl"


@pytest.fixture(scope="module")
def moe_server(
    moe_dir: Path, moe_prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    with scripted_engine(
        moe_dir,
        tmp_path_factory.mktemp("state"),
        "--enable-return-routed-experts",
        prompts_file=moe_prompts_file,
    ) as running:
        yield running


@pytest.fixture
def moe(moe_server: EngineServer, tokenizer: Any, moe_prompts_file: Path) -> Episode:
    return Episode(moe_server, tokenizer, moe_prompts_file)


@pytest.fixture(scope="module")
def oracle(moe_dir: Path) -> Any:
    """Tokens -> the experts of each token and layer, `[tokens, layers, top_k]`, sorted."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)

    def routes(tokens: list[int]) -> NDArray[Any]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
        experts = [layer.topk(2, dim=-1).indices.numpy() for layer in logits]
        return np.sort(np.stack(experts, axis=1), axis=-1)

    return routes


def stored(episode: Episode, call: CallRecord) -> NDArray[Any]:
    """Routes of one call's delta, each token's experts sorted."""
    sink = episode.server.app.state.forest.control.sink
    return np.sort(episode.server.run(sink.get(call.delta))[ROUTES], axis=-1)


@pytest.mark.requirement("C3", "F11", "XR1")
def test_the_deltas_of_a_conversation_join_to_what_the_model_computes(
    moe: Episode, oracle: Any
) -> None:
    history: list[Any] = [ASK]
    calls = []
    for answer in ("hello there", "Berlin", "so"):
        message, call = moe.chat(history, [*moe.spell(answer), *moe.ids(END)])
        calls.append(call)
        history += [message, NEXT]
    assert [call.parent_call_id for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    for call in calls:
        assert call.routes is not None
        assert (call.routes.layers, call.routes.top_k, call.routes.experts) == (2, 2, 8)
        assert "routes" in call.required_features
    joined = np.concatenate([stored(moe, call) for call in calls])
    assert joined.dtype == np.uint8
    tokens = moe.history(calls[-1])
    # No row for the very last token: no forward pass took it in.
    assert len(joined) == calls[-1].cum_len - 1 == len(tokens) - 1
    np.testing.assert_array_equal(joined, oracle(tokens)[:-1])
    # A later identical prompt is served from the prefix cache, and its rows are all there.
    _, again = moe.chat([ASK, *history[1:3]], max_tokens=2)
    assert again.cached_prompt_tokens
    assert again.parent_call_id == calls[0].call_id
    rows = oracle(moe.history(again))
    np.testing.assert_array_equal(stored(moe, again), rows[calls[0].cum_len - 1 : -1])


@pytest.mark.requirement("F11", "XR1")
def test_each_branch_brings_its_own_row_of_the_parents_last_token(
    moe: Episode, oracle: Any
) -> None:
    message, parent = moe.chat([ASK], [*moe.ids("Paris"), *moe.ids(END)])
    other = {"role": "user", "content": "Why?"}
    branches = [moe.chat([ASK, message, turn])[1] for turn in (NEXT, other)]
    expected = oracle(moe.history(parent))
    for branch in branches:
        assert branch.parent_call_id == parent.call_id
        assert branch.routes is not None
        assert branch.routes.first == parent.cum_len - 1
        np.testing.assert_array_equal(stored(moe, branch)[0], expected[-1])


@pytest.mark.requirement("K13")
def test_the_handshake_says_that_routes_are_captured(moe_server: EngineServer) -> None:
    assert "routes" in moe_server.control.get("/handshake").json()["features"]


@pytest.mark.requirement("C3")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_carries_no_routes(moe: Episode, stream: bool) -> None:
    body = {"model": "tiny", "messages": [ASK], "max_tokens": 3, "stream": stream}
    url = f"{moe.server.base_url(moe.attempt)}/chat/completions"
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200
    assert '"routed_experts":"' not in answer.text.replace(" ", "")
    (call,) = moe.server.receipt(moe.attempt).calls
    assert len(stored(moe, call)) == call.cum_len - 1


@pytest.mark.requirement("XR2")
def test_rows_that_do_not_fit_are_a_recorded_failure(
    moe: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_forest_renderer.capture.generation import Generation

    add = Generation.add

    def losing_a_row(self: Generation, output: Any) -> None:
        add(self, output)
        if self.routes is not None:
            self.routes = self.routes[1:]

    monkeypatch.setattr(Generation, "add", losing_a_row)
    url = f"{moe.server.base_url(moe.attempt)}/chat/completions"
    answer = httpx.post(url, json={"model": "tiny", "messages": [ASK], "max_tokens": 2}, timeout=60)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "invalid_routes"
    receipt = moe.server.receipt(moe.attempt)
    assert receipt.calls == ()
    assert [failure.reason for failure in receipt.failures] == ["invalid_routes"]
