import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema import Reason
from forest_schema.shards import LOGPROBS, TOKENS, ShardError
from megatron_forest_trainer.store import (
    FolderReader,
    HttpReader,
    StoreReader,
    http_source,
    open_reader,
)

from tests.support.forests import Forest

TOKEN = "control-token"


class ShardServer(ThreadingHTTPServer):
    """Serves shard files below `root` by range, as the server's control route does."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requests: list[str] = []
        self.failures: list[int] = []
        """Status codes to answer before anything else."""
        self.whole = False
        """Ignore ranges and answer 200."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ShardServer

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        server = self.server
        server.requests.append(self.headers["Range"])
        if server.failures:
            return self.answer(server.failures.pop(0))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401)
        partition, shard = self.path.removeprefix("/v1/forest/control/shards/").split("/")
        path = server.root / partition / f"{shard}.safetensors"
        if not path.is_file():
            return self.answer(404)
        data = path.read_bytes()
        if server.whole:
            return self.answer(200, data)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, len(data) - 1)
        return self.answer(
            206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}"
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    server = ShardServer(tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["folder", "http"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreReader]:
    if request.param == "folder":
        opened = open_reader(store_path=tmp_path)
    else:
        server = request.getfixturevalue("server")
        opened = open_reader(url=server.url, control_token=TOKEN)
    with opened as reader:
        yield reader


@pytest.mark.requirement("C27", "C4")
def test_every_delta_reads_back_exactly(reader: StoreReader, tmp_path: Path) -> None:
    forest = Forest()
    first = forest.call(prompt=5, generated=3)
    forest.call(first, prompt=0, generated=2)
    forest.write(tmp_path)
    for call in forest.calls:
        delta = reader.read(call.delta)
        assert delta.keys() == {TOKENS, LOGPROBS}
        for name, array in delta.items():
            np.testing.assert_array_equal(array, forest.deltas[call.call_id][name])
            assert array.dtype == forest.deltas[call.call_id][name].dtype
            assert not array.flags.writeable


@pytest.mark.requirement("C27", "F14", "I14")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"store": "other"}, Reason.FOREIGN_SHARD),
        ({"key": "other"}, Reason.FOREIGN_SHARD),
        ({"digest": "0" * 32}, Reason.DIGEST_MISMATCH),
        ({"shard": "missing"}, Reason.UNREADABLE_SHARD),
        ({"partition": "missing"}, Reason.UNREADABLE_SHARD),
        ({"partition": ".."}, Reason.FOREIGN_SHARD),
        ({"shard": "../run-step0/shard0"}, Reason.FOREIGN_SHARD),
        ({"shard": "a/b"}, Reason.FOREIGN_SHARD),
    ],
)
def test_what_a_receipt_does_not_address_is_not_read(
    reader: StoreReader, tmp_path: Path, changes: dict[str, str], reason: Reason
) -> None:
    forest = Forest()
    call = forest.call()
    forest.write(tmp_path)
    with pytest.raises(ShardError) as caught:
        reader.read(msgspec.structs.replace(call.delta, **changes))
    assert caught.value.reason is reason


@pytest.mark.requirement("F14")
def test_a_shard_that_was_moved_between_partitions_is_foreign(
    reader: StoreReader, tmp_path: Path
) -> None:
    forest = Forest()
    call = forest.call()
    path = forest.write(tmp_path)
    (tmp_path / "run-step1").mkdir()
    path.rename(tmp_path / "run-step1" / path.name)
    with pytest.raises(ShardError, match="belongs to store0/run-step0") as caught:
        reader.read(msgspec.structs.replace(call.delta, partition="run-step1"))
    assert caught.value.reason is Reason.FOREIGN_SHARD


@pytest.mark.requirement("I14")
@pytest.mark.parametrize("damage", ["byte", "torn", "empty", "text"])
def test_a_damaged_shard_is_refused_whole(reader: StoreReader, tmp_path: Path, damage: str) -> None:
    forest = Forest()
    call = forest.call()
    path = forest.write(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    bodies = {"byte": data, "torn": data[:-3], "empty": b"", "text": b"not a shard at all"}
    path.write_bytes(bodies[damage])
    with pytest.raises(ShardError) as caught:
        reader.read(call.delta)
    expected = Reason.DIGEST_MISMATCH if damage == "byte" else Reason.UNREADABLE_SHARD
    assert caught.value.reason is expected


def test_arrays_outlive_their_reader(tmp_path: Path) -> None:
    forest = Forest()
    call = forest.call()
    forest.write(tmp_path)
    with FolderReader(tmp_path) as reader:
        tokens = reader.read(call.delta)[TOKENS]
    np.testing.assert_array_equal(tokens, forest.deltas[call.call_id][TOKENS])


def test_a_missing_folder_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"server\.store_path"):
        FolderReader(tmp_path / "nowhere")


def test_a_reader_needs_a_folder_or_a_server() -> None:
    with pytest.raises(ValueError, match=r"server\.store_path, or by server\.url"):
        open_reader(url="http://127.0.0.1:1")


# HTTP


@pytest.mark.requirement("C27")
def test_each_block_is_fetched_once(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_source, "BLOCK", 1000)
    forest = Forest()
    for _ in range(30):
        forest.call(prompt=40, generated=20)
    size = len(forest.write(tmp_path).read_bytes())
    with HttpReader(server.url, TOKEN) as reader:
        for _ in range(2):
            for call in forest.calls:
                np.testing.assert_array_equal(
                    reader.read(call.delta)[TOKENS], forest.deltas[call.call_id][TOKENS]
                )
    asked = [tuple(map(int, r.removeprefix("bytes=").split("-"))) for r in server.requests]
    assert sum(last + 1 - first for first, last in asked) <= size + 1000


def test_a_server_that_ignores_ranges_works(server: ShardServer, tmp_path: Path) -> None:
    server.whole = True
    forest = Forest()
    call = forest.call()
    forest.write(tmp_path)
    with HttpReader(server.url, TOKEN) as reader:
        assert len(reader.read(call.delta)[TOKENS]) == call.delta_len


def test_passing_failures_are_retried(server: ShardServer, tmp_path: Path) -> None:
    server.failures = [503, 500]
    forest = Forest()
    call = forest.call()
    forest.write(tmp_path)
    with HttpReader(server.url, TOKEN) as reader:
        assert len(reader.read(call.delta)[TOKENS]) == call.delta_len
    assert server.failures == []


@pytest.mark.requirement("I14")
@pytest.mark.parametrize(
    ("failures", "token", "message"),
    [
        ([503] * 9, TOKEN, "answered 503 .5 tries."),
        ([], "wrong", "answered 401; check server.control_token_file"),
        ([416], TOKEN, "answered 416"),
    ],
)
def test_lasting_failures_stop_the_run(
    server: ShardServer, tmp_path: Path, failures: list[int], token: str, message: str
) -> None:
    server.failures = failures
    forest = Forest()
    call = forest.call()
    forest.write(tmp_path)
    with (
        HttpReader(server.url, token) as reader,
        pytest.raises(ShardError, match=message) as caught,
    ):
        reader.read(call.delta)
    assert caught.value.reason is Reason.UNREADABLE_SHARD


def test_an_unreachable_server_is_an_unreadable_shard(server: ShardServer) -> None:
    call = Forest().call()
    url = server.url
    server.server_close()
    with HttpReader(url, TOKEN) as reader, pytest.raises(ShardError, match="not reachable"):
        reader.read(call.delta)


@pytest.mark.requirement("I14")
def test_a_shard_whose_length_changes_is_refused(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_source, "BLOCK", 256)
    forest = Forest()
    for _ in range(20):
        forest.call()
    path = forest.write(tmp_path)
    with HttpReader(server.url, TOKEN) as reader:
        reader.read(forest.calls[0].delta)
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(ShardError, match="changed its length"):
            reader.read(forest.calls[-1].delta)
