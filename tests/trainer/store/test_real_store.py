"""What the server's ledger and store write, read by the trainer in both ways."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from forest_schema import Receipt
from forest_schema.items import output_evidence
from forest_schema.shards import LOGPROBS, TOKENS, Delta, ShardError
from megatron_forest_trainer.finalize import finalize_rollout
from megatron_forest_trainer.store import open_reader
from vllm_forest_renderer.control import ControlServices, ControlToken, control_router

from tests.support.capture import Capture, make_delta

TOKEN = "secret-of-the-trainer"
KEY = "key-of-the-api"


class Captured:
    """A rollout that a real server side captured, sealed and serves."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.deltas = [make_delta(40, 20, seed=seed) for seed in range(4)]
        self.receipt: Receipt
        self.url = ""
        self._ready = threading.Event()
        self._folder = folder
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        capture = await Capture.open(self._folder)
        attempt = await capture.attempt()
        parent = None
        for number, delta in enumerate(self.deltas):
            message = {"role": "assistant", "content": f"answer {number}"}
            output = output_evidence(f"resp{number}", [message], api="chat")
            parent = await capture.call(attempt, parent, delta=delta, output=output)
        self.receipt = await capture.ledger.close(attempt, 1.0)
        services = ControlServices(
            capture.ledger,
            capture.sink,
            ControlToken(TOKEN),
            None,  # type: ignore[arg-type]  # the shard route needs no engine
        )
        app = FastAPI()
        app.include_router(control_router(lambda request: services))
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await serving
        await capture.shutdown()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    captured = Captured(tmp_path_factory.mktemp("server"))
    yield captured
    captured.stop()


@pytest.mark.requirement("C27", "C26")
@pytest.mark.parametrize("way", ["folder", "http", "http behind an API key"])
def test_a_sealed_attempt_becomes_verified_rows(captured: Captured, way: str) -> None:
    key = KEY if "key" in way else None
    where = (
        {"store_path": captured.store}
        if way == "folder"
        else {"url": captured.url, "control_token": TOKEN, "api_key": key}
    )
    receipt = captured.receipt
    assert len({call.delta.shard for call in receipt.calls}) == 1
    assert [call.delta_len for call in receipt.calls] == [40] * 4
    responses = [
        {
            "id": call.output.response_id,
            "choices": [{"message": {"role": "assistant", "content": f"answer {call.order}"}}],
        }
        for call in receipt.calls
    ]
    with open_reader(**where) as reader:  # type: ignore[arg-type]
        final = finalize_rollout(receipt, {"responses": responses}, reader)
        for call, delta in zip(receipt.calls, captured.deltas, strict=True):
            np.testing.assert_array_equal(reader.read(call.delta)[TOKENS], delta[TOKENS])
    assert final.verified
    assert [row.length for row in final.rows] == [160]
    assert final.generated_tokens == 80


async def _capture_chain(folder: Path, deltas: list[Delta]) -> Receipt:
    """Calls that each continue the one before."""
    capture = await Capture.open(folder)
    attempt = await capture.attempt()
    parent = None
    for delta in deltas:
        parent = await capture.call(attempt, parent, delta=delta)
    receipt = await capture.ledger.close(attempt, 1.0)
    await capture.shutdown()
    return receipt


@pytest.mark.requirement("C5")
def test_twenty_calls_store_twenty_small_deltas(tmp_path: Path) -> None:
    deltas = [make_delta(40, 20, seed=seed) for seed in range(20)]
    calls = asyncio.run(_capture_chain(tmp_path, deltas)).calls
    assert [call.cum_len for call in calls] == list(range(40, 801, 40))
    with open_reader(store_path=tmp_path / "store") as reader:
        for call, delta in zip(calls, deltas, strict=True):
            stored = reader.read(call.delta)
            assert {name: array.shape for name, array in stored.items()} == {
                TOKENS: (40,),
                LOGPROBS: (20,),
            }
            np.testing.assert_array_equal(stored[TOKENS], delta[TOKENS])
    # The file holds nothing else: its data grow with the number of calls, not with contexts.
    (shard,) = (tmp_path / "store").rglob("*.safetensors")
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    assert shard.stat().st_size == 8 + header + 20 * (40 + 20) * 4


@pytest.mark.requirement("C27")
def test_the_shard_route_needs_the_control_token(captured: Captured) -> None:
    ref = captured.receipt.calls[0].delta
    with (
        open_reader(url=captured.url, control_token="guess") as reader,
        pytest.raises(ShardError, match=r"answered 40[13]; check server\.control_token_file"),
    ):
        reader.read(ref)
