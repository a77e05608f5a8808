"""Weight updates of the running engine over the control routes."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from forest_schema.model_files import model_digests
from forest_schema.shards import LOGPROBS
from safetensors.numpy import load_file, save_file
from vllm_forest_renderer import compat

from tests.support.byte_model import make_byte_model
from tests.support.engine import EngineServer, wait_until
from tests.support.episodes import Episode

ASK = {"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 12}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def other_weights(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    shutil.copy(qwen3_dir / "config.json", directory)
    weights = load_file(qwen3_dir / "model.safetensors")
    changed = {
        name: array * np.float32(1.5) if "proj" in name else array
        for name, array in weights.items()
    }
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def restored(server: EngineServer, qwen3_dir: Path) -> Iterator[None]:
    yield
    answer = server.control.post("/weights", json={"path": str(qwen3_dir), "version": "default"})
    assert answer.json() == {"schema": 3, "paused": False, "weight_version": "default"}


def update(server: EngineServer, path: Path, version: str) -> dict[str, Any]:
    answer = server.control.post("/weights", json={"path": str(path), "version": version})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def sampled(episode: Episode) -> tuple[list[int], list[float], Any]:
    _, record = episode.chat([ASK], **GREEDY)
    tokens, logprobs = episode.delta(record)
    return tokens[record.prompt_delta_len :], logprobs, record


@pytest.mark.smoke
@pytest.mark.requirement("C23")
@pytest.mark.usefixtures("restored")
def test_update_changes_weights_and_leaves_no_stale_cache(
    episode: Episode, qwen3_dir: Path, other_weights: Path
) -> None:
    before = sampled(episode)
    again = sampled(episode)
    # The prefix cache is in use, so a stale one would show.
    assert again[2].cached_prompt_tokens > 0
    state = update(episode.server, other_weights, "step-1")
    assert state == {"schema": 3, "paused": False, "weight_version": "step-1"}
    after = sampled(episode)
    assert after[2].cached_prompt_tokens == 0
    assert after[1] != before[1]
    assert [span.version for span in after[2].weight_spans] == ["step-1"]
    update(episode.server, qwen3_dir, "step-2")
    back = sampled(episode)
    assert back[0] == before[0]
    np.testing.assert_allclose(back[1], before[1], atol=1e-5)


@pytest.mark.requirement("K13")
@pytest.mark.parametrize(
    ("kind", "told"), [({"tied": True}, "lm_head.weight"), ({"mixture": True}, "experts")]
)
def test_a_model_whose_reload_on_the_cpu_is_not_exact_refuses_updates(
    tmp_path: Path, kind: dict[str, bool], told: str
) -> None:
    model = make_byte_model(tmp_path / "model", **kind)
    with EngineServer(model, forest={"state_dir": str(tmp_path / "state")}) as server:
        assert "weights" not in server.control.get("/handshake").json()["features"]
        answer = server.control.post("/weights", json={"path": str(model), "version": "step-1"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "unsupported_request"
        assert told in answer.json()["error"]["message"]


@pytest.mark.smoke
@pytest.mark.requirement("C23")
@pytest.mark.usefixtures("restored")
def test_generation_in_flight_names_the_weights_of_each_token(
    episode: Episode, other_weights: Path
) -> None:
    server = episode.server
    result: list[Any] = []
    long = threading.Thread(
        target=lambda: result.append(
            episode.chat([ASK], max_tokens=250, extra_body={"ignore_eos": True})
        )
    )
    long.start()
    wait_until(lambda: len(server.receipt(episode.attempt).pending) == 1)
    time.sleep(0.3)  # Some tokens with the old weights.
    assert server.control.post("/pause").json()["paused"]
    update(server, other_weights, "step-1")
    # Paused before, paused afterwards.
    assert server.control.post("/resume").json() == {
        "schema": 3,
        "paused": False,
        "weight_version": "step-1",
    }
    long.join(300)
    ((_, record),) = result
    assert record.generated_len == 250
    # An engine that does not label tokens finishes what is in flight before it takes new weights.
    expected = ["default", "step-1"] if compat.labels_tokens_with_versions() else ["default"]
    assert [span.version for span in record.weight_spans] == expected
    starts = [span.start for span in record.weight_spans]
    ends = [span.end for span in record.weight_spans]
    assert starts[0] == 0
    assert ends == [*starts[1:], 250]


@pytest.fixture
def unlabelled(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an engine that does not say which weights made a token."""
    monkeypatch.setattr(server.app.state.forest.control.engine, "labels_tokens", False)


@pytest.mark.smoke
@pytest.mark.requirement("C23")
@pytest.mark.usefixtures("restored", "unlabelled")
def test_without_labels_generations_and_updates_exclude_each_other(
    server: EngineServer, qwen3_dir: Path, other_weights: Path
) -> None:
    attempt = server.open_attempt()
    url = f"{server.base_url(attempt)}/chat/completions"
    answers: list[httpx.Response] = []
    stop = threading.Event()

    def ask(length: int, stream: bool) -> None:
        body = {"messages": [ASK], "max_tokens": length, "ignore_eos": True, "temperature": 0}
        while not stop.is_set():
            answers.append(httpx.post(url, json=body | {"stream": stream}, timeout=120))

    askers = [
        threading.Thread(target=ask, args=(length, stream))
        for length, stream in ((1, False), (2, True), (3, False), (40, False))
    ]
    for asker in askers:
        asker.start()
    for step in range(8):
        seen = len(answers)
        wait_until(lambda seen=seen: len(answers) > seen)  # type: ignore[misc]
        update(server, (other_weights, qwen3_dir)[step % 2], f"step-{step}")
        # A call that comes while the engine is paused waits without being admitted.
        if step == 4:
            server.control.post("/pause").raise_for_status()
            wait_until(lambda: not server.receipt(attempt).pending)
            server.control.post("/resume").raise_for_status()
    stop.set()
    for asker in askers:
        asker.join(120)
    assert {answer.status_code for answer in answers} == {200}
    receipt = server.close(attempt)
    assert (receipt.failures, receipt.pending) == ((), ())
    assert len(receipt.calls) == len(answers)
    # Each call names one version, and its log-probabilities are those of that version's weights.
    sink = server.app.state.forest.control.sink
    versions = set()
    values: dict[bool, set[float]] = {False: set(), True: set()}
    for call in receipt.calls:
        (span,) = call.weight_spans
        assert (span.start, span.end) == (0, call.generated_len)
        versions.add(span.version)
        others = span.version != "default" and int(span.version.removeprefix("step-")) % 2 == 0
        values[others].add(round(float(server.run(sink.get(call.delta))[LOGPROBS][0]), 3))
    assert len(versions) >= 8
    assert [len(found) for found in values.values()] == [1, 1]
    assert values[False] != values[True]


@pytest.mark.requirement("C23")
@pytest.mark.usefixtures("restored")
def test_update_that_fails_leaves_the_engine_paused(
    episode: Episode, qwen3_dir: Path, other_weights: Path, tmp_path: Path
) -> None:
    server = episode.server
    shutil.copy(qwen3_dir / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    answer = server.control.post("/weights", json={"path": str(tmp_path), "version": "step-1"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "engine_error"
    assert server.control.post("/resume").status_code == 500
    assert server.run(server.engine.is_paused())
    # Another process of the server would know as much: the engine holds the state.
    assert server.control.get("/handshake").json()["weight_version"] == "loading step-1"
    state = update(server, other_weights, "step-2")
    assert state == {"schema": 3, "paused": False, "weight_version": "step-2"}
    assert [span.version for span in sampled(episode)[2].weight_spans] == ["step-2"]


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({}, "path"),
        ({"path": "a" * 5000}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"version": ""}, "version"),
        ({"version": "loading x"}, "version"),
    ],
)
def test_update_that_cannot_work_changes_nothing(
    server: EngineServer, tmp_path: Path, change: dict[str, str], param: str
) -> None:
    body = {"path": str(tmp_path), "version": "x", **change}
    answer = server.control.post("/weights", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "malformed_request"
    assert answer.json()["error"]["param"] == param
    assert answer.headers["x-should-retry"] == "false"
    assert server.control.get("/handshake").json()["weight_version"] == "default"


@pytest.mark.requirement("K13")
def test_handshake_reports_what_the_trainer_compares(server: EngineServer, qwen3_dir: Path) -> None:
    found = server.control.get("/handshake").json()
    expected = model_digests(qwen3_dir)
    assert found["model_digest"] == expected.model
    assert found["tokenizer_digest"] == expected.tokenizer
    assert found["template_digest"] == expected.template
    assert found["processor_digest"] is None
    assert found["logprobs_mode"] == "processed_logprobs"
    assert (found["schema"], found["normalization_version"], found["digest_version"]) == (3, 1, 1)
    assert {"chat", "weights"} <= set(found["features"])
    assert (found["model"], found["max_model_len"]) == ("tiny", 4096)
