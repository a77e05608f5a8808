"""The control routes over HTTP: token, bodies, ranges, errors, nothing by guessing."""

import logging
from collections.abc import AsyncIterator

import httpx
import msgspec
import numpy as np
import pytest
from fastapi import FastAPI
from forest_schema import Reason, Receipt, decode_receipt
from forest_schema.control import (
    CONTROL_PREFIX,
    CONTROL_TOKEN_HEADER,
    AttemptOpened,
    CleanupReport,
    EngineState,
    ErrorBody,
    Handshake,
    WeightUpdate,
)
from forest_schema.shards import ShardReader
from hypothesis import given
from hypothesis import strategies as st
from vllm_forest_renderer.control import ControlServices, ControlToken, control_router, load_token
from vllm_forest_renderer.control.messages import MAX_BODY
from vllm_forest_renderer.control.ranges import UnsatisfiableRange, parse_range
from vllm_forest_renderer.errors import ForestError

from tests.support.capture import PARTITION, make_delta

pytestmark = pytest.mark.anyio

TOKEN = "secret-of-the-trainer"


class Engine:
    """Engine controls that only remember."""

    def __init__(self) -> None:
        self.state = EngineState(paused=False, weight_version="v0")

    async def handshake(self) -> Handshake:
        return Handshake(
            renderer_version="0",
            vllm_version="0",
            store="store_x",
            model="tiny",
            model_digest="",
            tokenizer_digest="",
            template_digest="",
            max_model_len=1,
            logprobs_mode="processed_logprobs",
            weight_version=self.state.weight_version,
            features=("chat",),
        )

    async def pause(self) -> EngineState:
        self.state = msgspec.structs.replace(self.state, paused=True)
        return self.state

    async def resume(self) -> EngineState:
        self.state = msgspec.structs.replace(self.state, paused=False)
        return self.state

    async def update_weights(self, update: WeightUpdate) -> EngineState:
        if update.path == "/nowhere":
            raise ForestError(Reason.MALFORMED_REQUEST, "path: no weights there", param="path")
        if update.path == "/broken":
            raise KeyError("a bug")
        self.state = msgspec.structs.replace(self.state, weight_version=update.version)
        return self.state


@pytest.fixture
async def client(capture) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    services = ControlServices(capture.ledger, capture.sink, ControlToken(TOKEN), Engine())
    app.include_router(control_router(lambda request: services))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url=f"http://server{CONTROL_PREFIX}",
        headers={"authorization": f"Bearer {TOKEN}"},
    ) as client:
        yield client


def _refused(response: httpx.Response, status: int, reason: Reason, param: str | None = None):
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert (response.status_code, error.type, error.code) == (status, reason, status)
    assert error.param == param
    assert response.headers["x-should-retry"] == "false"
    return error


async def _open(client: httpx.AsyncClient, **changes) -> AttemptOpened:
    body = {"rollout_id": "r1", "group_id": "g1", "partition": PARTITION} | changes
    response = await client.post("/attempts", json=body)
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=AttemptOpened)


@pytest.mark.requirement("C26", "I1", "I7")
async def test_an_attempt_from_open_to_teardown(client, capture):
    opened = await _open(client, metadata={"seed": 4})
    assert opened.base_path == f"/v1/forest/{opened.attempt_id}"
    root = await capture.call(opened.attempt_id)
    child = await capture.call(opened.attempt_id, root)
    path = f"/attempts/{opened.attempt_id}"
    before = decode_receipt((await client.get(f"{path}/receipt")).content)
    assert not before.closed
    closed = decode_receipt((await client.post(f"{path}/close", json={"wait_s": 1})).content)
    assert [c.call_id for c in closed.calls] == [root.call_id, child.call_id]
    assert (closed.rollout_id, closed.group_id, closed.metadata) == ("r1", "g1", {"seed": 4})
    again = await client.post(f"{path}/close")
    assert msgspec.json.decode(again.content, type=Receipt) == closed
    report = msgspec.json.decode((await client.delete(path)).content, type=CleanupReport)
    assert report == CleanupReport(removed_calls=2, removed_shards=1)
    _refused(await client.get(f"{path}/receipt"), 422, Reason.ATTEMPT_CLOSED, "attempt")
    removed = await client.delete(f"/partitions/{PARTITION}")
    assert removed.status_code == 200
    assert not (capture.directory / "store" / PARTITION).exists()


async def test_the_engine_routes_call_the_engine(client):
    handshake = msgspec.json.decode((await client.get("/handshake")).content, type=Handshake)
    assert handshake.model == "tiny"
    assert (await client.post("/pause")).json()["paused"] is True
    updated = await client.post("/weights", json={"path": "/w", "version": "v1"})
    assert updated.json() == {"schema": 3, "paused": True, "weight_version": "v1"}
    assert (await client.post("/resume")).json()["paused"] is False
    refused = await client.post("/weights", json={"path": "/nowhere", "version": "v2"})
    _refused(refused, 400, Reason.MALFORMED_REQUEST, "path")


ROUTES = [
    ("GET", "/handshake"),
    ("POST", "/attempts"),
    ("POST", "/attempts/{attempt}/close"),
    ("GET", "/attempts/{attempt}/receipt"),
    ("POST", "/attempts/{attempt}/restore"),
    ("DELETE", "/attempts/{attempt}"),
    ("DELETE", f"/partitions/{PARTITION}"),
    ("GET", f"/shards/{PARTITION}/x"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/weights"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_the_token(client, capture, method, path):
    attempt = await capture.attempt()
    await capture.call(attempt)
    del client.headers["authorization"]
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {TOKEN}", CONTROL_TOKEN_HEADER: "wrong"},
        {CONTROL_TOKEN_HEADER: ""},
    ):
        response = await client.request(method, path.format(attempt=attempt), headers=headers)
        error = _refused(response, 401, Reason.CONTROL_TOKEN_REQUIRED, "authorization")
        assert TOKEN not in error.message
    assert len(capture.ledger.calls(attempt)) == 1


async def test_the_token_has_a_header_of_its_own_beside_an_api_key(client):
    response = await client.get(
        "/handshake",
        headers={"authorization": "Bearer api-key", CONTROL_TOKEN_HEADER: TOKEN},
    )
    assert response.status_code == 200


async def test_the_routes_are_those_of_the_schema(client):
    import forest_schema.control

    app = client._transport.app
    found = {
        f"{method} {route.path.removeprefix(CONTROL_PREFIX)}"
        for route in app.routes
        if route.path.startswith(CONTROL_PREFIX)
        for method in route.methods
    }
    assert len(found) == len(ROUTES)
    for route in found:
        method, path = route.split()
        assert any(
            line.startswith(f"| {method} ") and f"`{path}`" in line
            for line in forest_schema.control.__doc__.splitlines()
        ), f"{route} is not in the table"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b'{"rollout_id": "r", "group_id": "g"}', "body"),
        (b'{"rollout_id": "r", "group_id": "g", "partition": "p", "parent": "x"}', "body"),
        (b'{"rollout_id": 1, "group_id": "g", "partition": "p"}', "body"),
        (b'{"rollout_id": "r", "group_id": "g", "partition": "../p"}', "partition"),
        (b'{"rollout_id": "r", "group_id": "g", "partition": "/etc"}', "partition"),
        (b'{"rollout_id": "", "group_id": "g", "partition": "p"}', "rollout_id"),
        (b'{"rollout_id": "r\\u0000", "group_id": "g", "partition": "p"}', "rollout_id"),
        (b'{"rollout_id": "r", "group_id": "a\\nb", "partition": "p"}', "group_id"),
        (b'{"rollout_id": "r", "group_id": "%s", "partition": "p"}' % (b"g" * 257), "group_id"),
    ],
)
async def test_malformed_bodies_are_refused(client, capture, body, param):
    _refused(await client.post("/attempts", content=body), 400, Reason.MALFORMED_REQUEST, param)
    assert capture.files() == []


@pytest.mark.parametrize("wait_s", ["-1", "1e9", "null", '"now"'])
async def test_the_wait_is_bounded(client, capture, wait_s):
    attempt = await capture.attempt()
    response = await client.post(
        f"/attempts/{attempt}/close", content=f'{{"wait_s": {wait_s}}}'.encode()
    )
    assert response.status_code == 400
    assert await capture.admit(attempt)


async def test_half_a_surrogate_pair_is_named(client):
    body = b'{"rollout_id": "r", "group_id": "g", "partition": "p", "metadata": {"a": "\\ud800"}}'
    error = _refused(
        await client.post("/attempts", content=body), 400, Reason.MALFORMED_REQUEST, "body"
    )
    assert "surrogate" in error.message
    cut = await client.post("/attempts", content=body[:-1])
    assert "truncated" in _refused(cut, 400, Reason.MALFORMED_REQUEST, "body").message


async def test_an_error_that_nobody_expected_has_the_shape_of_the_others(client, caplog):
    error = _refused(
        await client.post("/weights", json={"path": "/broken", "version": "v1"}),
        500,
        Reason.ENGINE_ERROR,
    )
    assert "KeyError" in error.message
    assert "POST /v1/forest/control/weights failed" in caplog.text


async def test_bodies_are_bounded_while_they_are_read(client):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    response = await client.post("/attempts", content=endless())
    _refused(response, 400, Reason.MALFORMED_REQUEST, "body")
    assert sent <= MAX_BODY + (2 << 16)


@pytest.mark.parametrize(
    "attempt", ["att_" + "0" * 32, "att_x", "x", "..%2f..", "att_" + "0" * 31 + "%00"]
)
async def test_guessed_attempts_are_unknown(client, capture, attempt):
    real = await capture.attempt()
    await capture.call(real)
    for method, path in (("POST", "/close"), ("GET", "/receipt"), ("DELETE", "")):
        response = await client.request(method, f"/attempts/{attempt}{path}")
        if response.status_code != 404:  # a name with a slash is no route at all
            _refused(response, 422, Reason.ATTEMPT_UNKNOWN, "attempt")
        assert real not in response.text


@pytest.mark.requirement("C27")
async def test_tensors_are_readable_through_ranges(client, capture):
    attempt = await capture.attempt()
    delta = make_delta(5000, 100)
    record = await capture.call(attempt, delta=delta)
    url = f"/shards/{record.delta.partition}/{record.delta.shard}"
    whole = await client.get(url)
    assert whole.status_code == 200
    path = capture.sink.shard_path(PARTITION, record.delta.shard)
    assert whole.content == path.read_bytes()
    pieces: dict[tuple[int, int], bytes] = {}

    class Missing(Exception):
        pass

    class Ranges:
        def size(self):
            return len(whole.content)

        def read(self, offset, length):
            if (offset, length) not in pieces:
                raise Missing(offset, length)
            return memoryview(pieces[offset, length])

    for _ in range(5):  # fetch what the reader asks for until it is satisfied
        try:
            stored = ShardReader(Ranges(), shard=record.delta.shard).read(record.delta)
            break
        except Missing as missing:
            offset, length = missing.args
            response = await client.get(
                url, headers={"range": f"bytes={offset}-{offset + length - 1}"}
            )
            assert response.status_code == 206
            pieces[offset, length] = response.content
    assert np.array_equal(stored["tokens"], delta["tokens"])


async def test_ranges_of_a_shard(client, capture):
    record = await capture.call(await capture.attempt())
    url = f"/shards/{PARTITION}/{record.delta.shard}"
    data = (await client.get(url)).content
    size = len(data)
    for header, start, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, size),
        ("bytes=-7", size - 7, size),
        (f"bytes=3-{size + 100}", 3, size),
        (f"bytes=-{size + 100}", 0, size),
    ):
        response = await client.get(url, headers={"range": header})
        assert response.status_code == 206
        assert response.content == data[start:end]
        assert response.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert response.headers["content-length"] == str(end - start)
    huge = "9" * 5000
    for header in (
        f"bytes={size}-", "bytes=-0", "bytes=5-4", "bytes=0-1,3-4", "lines=1-2", "-",
        f"bytes={huge}-", f"bytes=0-{huge}", f"bytes=-{huge}",
    ):  # fmt: skip
        response = await client.get(url, headers={"range": header})
        _refused(response, 400, Reason.MALFORMED_REQUEST, "range")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/shards/{PARTITION}/absent", 404),
        ("/shards/absent/absent", 404),
        ("/shards/..%2f..%2fetc/passwd", 404),
        (f"/shards/{PARTITION}/..%2f..%2fledger", 404),
        ("/shards/../ledger", 404),
        (f"/shards/{PARTITION}/%2e%2e", 400),
        (f"/shards/%2e%2e/{PARTITION}", 400),
        ("/shards/.hidden/x", 400),
        ("/shards/store.json/x", 400),
        (f"/shards/{PARTITION}/x%00y", 400),
    ],
)
async def test_no_path_leaves_the_store(client, capture, path, status):
    await capture.attempt()
    response = await client.get(path)
    assert response.status_code == status
    assert str(capture.directory) not in response.text


async def test_a_damaged_delta_is_named_by_its_reason(client, capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    await capture.call(attempt, root)
    path = capture.sink.shard_path(PARTITION, root.delta.shard)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    response = await client.post(f"/attempts/{attempt}/close", json={"wait_s": 0})
    _refused(response, 500, Reason.DIGEST_MISMATCH)
    data[-1] ^= 1
    path.write_bytes(data)
    assert (await client.post(f"/attempts/{attempt}/close", json={"wait_s": 0})).status_code == 200


async def test_a_full_store_is_503_and_may_be_retried(client, capture, monkeypatch):
    from tests.renderer.ledger.test_refusing_disks import largest_file

    with largest_file(4096):
        response = await client.post(
            "/attempts", json={"rollout_id": "r", "group_id": "g", "partition": PARTITION}
        )
    error = msgspec.json.decode(response.content, type=ErrorBody).error
    assert (response.status_code, error.type) == (503, Reason.STORE_UNAVAILABLE)
    assert "x-should-retry" not in response.headers
    await _open(client)


@given(st.integers(1, 50), st.integers(0, 60) | st.none(), st.integers(0, 60) | st.none())
def test_a_range_is_the_slice_that_it_names(size, first, last):
    """Oracle: byte positions that satisfy the header's inequality."""
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if first is None:
        wanted = [n for n in range(size) if last is not None and n >= size - last]
    else:
        wanted = [n for n in range(size) if n >= first and (last is None or n <= last)]
    if not wanted:
        with pytest.raises(UnsatisfiableRange):
            parse_range(header, size)
    else:
        assert parse_range(header, size) == (wanted[0], wanted[-1] + 1)


def test_a_generated_token_is_private_and_stays(tmp_path, caplog):
    path = tmp_path / "control-token"
    with caplog.at_level(logging.INFO):
        token = load_token(None, path)
    secret = path.read_text().strip()
    assert len(secret) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert str(path) in caplog.text
    assert secret not in caplog.text
    token.check({"authorization": f"Bearer {secret}"})
    load_token(None, path).check({"authorization": f"bearer {secret}"})
    assert [p.name for p in tmp_path.iterdir()] == ["control-token"]


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path):
    path = tmp_path / "control-token"
    load_token(None, path)
    path.chmod(0o644)
    with pytest.raises(ForestError, match="chmod 600"):
        load_token(None, path)
    for weak in ("", "short"):
        with pytest.raises(ForestError) as refused:
            load_token(weak, path)
        assert refused.value.reason is Reason.CONFIGURATION
