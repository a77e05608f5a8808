"""The stock server process with the plugins by entry point alone, driven by the stock client."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from forest_schema import decode_receipt
from forest_schema.control import CONTROL_TOKEN_HEADER
from forest_schema.shards import ShardReader

from tests.support.engine import PLUGINS, server_arguments
from tests.support.http_shard import HttpShard
from tests.support.third_party import LOG_VARIABLE, install_resolver
from tests.support.thread_server import free_port

API_KEY = "an-api-key"
START_SECONDS = 400


@pytest.fixture(scope="module")
def started(
    qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, str]]:
    """(URL, state directory, log) of a running server process."""
    state = tmp_path_factory.mktemp("stock")
    site = tmp_path_factory.mktemp("site")
    install_resolver(
        tmp_path_factory.mktemp("build"), site, distribution="acme-resolver", name="counting"
    )
    log = state / "server.log"
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "FOREST_PREFIX_RESOLVER": "counting",
        LOG_VARIABLE: str(state / "resolver.log"),
        "VLLM_PLUGINS": PLUGINS,
        "VLLM_LOGGING_LEVEL": "INFO",
        "FOREST_STATE_DIR": str(state),
        "FOREST_STATE_DIRECTORY": "a misspelt setting",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry",
                *server_arguments(qwen3_dir, port), "--api-key", API_KEY, "--api-server-count", "2",
            ],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url, state, log.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.requirement("A29", "A1", "A2", "C26", "C27", "A24")
def test_from_open_to_shards_over_http(started: tuple[str, Path, str]) -> None:
    url, state, log = started
    assert "capturing chat completions and responses of tiny under /v1/forest/{attempt}" in log
    assert re.search(r"FOREST_STATE_DIRECTORY.*FOREST_STATE_DIR", log)
    token = (state / "control-token").read_text().strip()
    assert token not in log
    assert (state / "control-token").stat().st_mode & 0o777 == 0o600
    control = httpx.Client(
        base_url=f"{url}/v1/forest/control",
        headers={"Authorization": f"Bearer {API_KEY}", CONTROL_TOKEN_HEADER: token},
    )
    opened = control.post(
        "/attempts", json={"rollout_id": "r", "group_id": "g", "partition": "run-step0"}
    ).json()
    base = f"{url}{opened['base_path']}"
    # A connection per call, so that calls meet either of the two API-server processes.
    client = openai.OpenAI(
        base_url=base, api_key=API_KEY, max_retries=0, default_headers={"Connection": "close"}
    )
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for turn in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, seed=turn
        )
        messages += [answer.choices[0].message, {"role": "user", "content": f"go on {turn}"}]

    receipt = decode_receipt(control.post(f"/attempts/{opened['attempt_id']}/close").content)
    assert receipt.closed
    assert [call.parent_call_id for call in receipt.calls] == [
        None,
        receipt.calls[0].call_id,
        receipt.calls[1].call_id,
    ]
    # The resolver of the other package's wheel was asked.
    assert (state / "resolver.log").read_text().splitlines() == [
        "1 items, 0 calls",
        "3 items, 1 calls",
        "5 items, 2 calls",
    ]
    shards = {call.delta.shard for call in receipt.calls}
    assert len(shards) == 1
    source = HttpShard(control, f"/shards/run-step0/{shards.pop()}")
    reader = ShardReader(source, shard="one")
    for call in receipt.calls:
        delta = reader.read(call.delta)
        assert len(delta["tokens"]) == call.delta_len
        assert len(delta["logprobs"]) == call.generated_len

    with pytest.raises(openai.UnprocessableEntityError, match="attempt"):
        client.chat.completions.create(model="tiny", messages=messages)


@pytest.mark.requirement("K13")
def test_api_key_alone_opens_nothing(started: tuple[str, Path, str]) -> None:
    url, _, _ = started
    key = {"Authorization": f"Bearer {API_KEY}"}
    for method, path in [
        ("GET", "/handshake"),
        ("POST", "/attempts"),
        ("POST", "/pause"),
        ("POST", "/weights"),
        ("DELETE", "/partitions/run-step0"),
    ]:
        answer = httpx.request(method, f"{url}/v1/forest/control{path}", headers=key)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "control_token_required"
    unguarded = httpx.post(f"{url}/v1/forest/att_{'0' * 32}/chat/completions", json={})
    assert unguarded.status_code == 401
