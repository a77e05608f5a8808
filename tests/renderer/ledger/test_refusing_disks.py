"""A disk that is full, read-only or remote: 503-style refusals, nothing acknowledged is lost."""

import asyncio
import contextlib
import resource
import sqlite3
import subprocess
from pathlib import Path

import pytest
from forest_schema import Reason
from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.ledger import database
from vllm_forest_renderer.ledger.database import check_local, file_system
from vllm_forest_renderer.store import SafetensorsSink

from tests.support.capture import PARTITION, Capture, make_delta

pytestmark = pytest.mark.anyio


@contextlib.contextmanager
def largest_file(size: int):
    """Files that grow beyond `size` bytes fail to, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """Mounts tmpfs file systems of a given size; skips where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(name: str, size: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
            capture_output=True,
        )
        if made.returncode:
            pytest.skip("mounting a file system is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _refusal(error: pytest.ExceptionInfo[StoreUnavailable]) -> None:
    assert error.value.reason is Reason.STORE_UNAVAILABLE


async def test_a_delta_that_does_not_fit_is_refused_and_leaves_nothing(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    intent = await capture.admit(attempt)
    with largest_file(64 << 10), pytest.raises(StoreUnavailable) as refused:
        await capture.sink.put(PARTITION, intent.call_id, make_delta(100_000, 10))
    _refusal(refused)
    assert capture.files() == [f"{root.delta.shard}.safetensors"]
    child = await capture.finish(attempt, intent, root)
    receipt = await capture.ledger.close(attempt, 1.0)
    assert [c.call_id for c in receipt.calls] == [root.call_id, child.call_id]


async def test_a_ledger_that_cannot_grow_refuses_and_loses_nothing(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    intent = await capture.admit(attempt)
    delta = make_delta()
    with largest_file(4096):
        for operation in (
            capture.admit(attempt),
            capture.ledger.record_failure(attempt, intent.call_id, Reason.ENGINE_ERROR),
            capture.attempt(),
            capture.ledger.close(attempt, 0.0),
            capture.ledger.cleanup(attempt),
        ):
            with pytest.raises(StoreUnavailable) as refused:
                await operation
            _refusal(refused)
        assert capture.ledger.calls(attempt) == (root,)
    # The failure that could not be written is made up for, before anything else is.
    with pytest.raises(Exception, match="failure"):
        await capture.finish(attempt, intent, root, delta=delta)
    receipt = await capture.ledger.close(attempt, 0.0)
    assert receipt.pending == ()
    assert [f.reason for f in receipt.failures] == [Reason.ENGINE_ERROR]
    assert [c.call_id for c in receipt.calls] == [root.call_id]


async def test_sealing_on_a_full_disk_keeps_every_delta_and_can_be_repeated(capture):
    attempt = await capture.attempt()
    calls = [await capture.call(attempt, delta=make_delta(4000, 2000)) for _ in range(8)]
    with largest_file(64 << 10):
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await capture.ledger.close(attempt, 0.0)
    for call in calls:
        await capture.sink.get(call.delta)
    assert len(await capture.settled()) == 8
    receipt = await capture.ledger.close(attempt, 0.0)
    assert [c.call_id for c in receipt.calls] == [c.call_id for c in calls]
    assert len(await capture.settled()) == 1


async def test_a_seal_whose_ledger_commit_fails_keeps_both_copies_until_it_succeeds(capture):
    attempt = await capture.attempt()
    calls = [await capture.call(attempt) for _ in range(4)]

    seal = capture.sink.seal

    async def seal_on_the_last_space(partition, refs):
        sealed = await seal(partition, refs)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return sealed

    capture.sink.seal = seal_on_the_last_space
    with largest_file(1 << 30), pytest.raises(StoreUnavailable):
        await capture.ledger.close(attempt, 0.0)
    capture.sink.seal = seal
    assert len(await capture.settled()) == 5
    for call in calls:
        await capture.sink.get(call.delta)
    receipt = await capture.ledger.close(attempt, 0.0)
    assert len({call.delta.shard for call in receipt.calls}) == 1
    assert len(await capture.settled()) == 1
    for call in receipt.calls:
        await capture.sink.get(call.delta)


async def test_a_full_disk_refuses_until_there_is_space_again(small_disk):
    disk = small_disk("disk", "3m")
    capture = await Capture.open(disk)
    attempt = await capture.attempt()
    filler = disk / "filler"
    filler.write_bytes(b"x" * (1 << 20))
    parent, calls, refused = None, [], 0
    while refused < 5:
        try:
            parent = await capture.call(attempt, parent, delta=make_delta(8000, 4000))
            calls.append(parent)
        except StoreUnavailable:
            refused += 1
    filler.unlink()
    parent = await capture.call(attempt, parent)
    calls.append(parent)
    await capture.shutdown()
    reopened = await Capture.open(disk)
    assert reopened.ledger.calls(attempt) == tuple(calls)
    for call in calls:
        await reopened.sink.get(call.delta)
    await reopened.shutdown()


async def test_a_read_only_store_refuses_puts_and_serves_reads(small_disk, tmp_path):
    disk = small_disk("store", "4m")
    sink = SafetensorsSink(disk)
    await sink.prepare(PARTITION)
    ref = await sink.put(PARTITION, "call_1", make_delta())
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StoreUnavailable) as refused:
        await sink.put(PARTITION, "call_2", make_delta())
    _refusal(refused)
    with pytest.raises(StoreUnavailable):
        await sink.prepare("another")
    with pytest.raises(StoreUnavailable):
        await sink.delete([ref])
    assert await sink.get(ref)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert await sink.put(PARTITION, "call_2", make_delta())
    await sink.shutdown()


async def test_a_server_does_not_start_on_a_read_only_disk(small_disk):
    disk = small_disk("disk", "4m")
    await (await Capture.open(disk)).shutdown()
    empty = small_disk("empty", "1m")
    for folder in (disk, empty):
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(StoreUnavailable):
            await Capture.open(folder)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "fuse", "9p", "lustre"])
def test_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(database, "file_system", lambda folder: kind)
    with pytest.raises(StoreUnavailable, match=kind):
        check_local(tmp_path)


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\n"
        "tmpfs /data tmpfs rw 0 0\n"
        "server:/x /data/shared nfs4 rw 0 0\n"
        "server:/y /data/with\\040space cifs rw 0 0\n"
        "overlay /data overlay rw 0 0\n"
    )
    for folder, kind in (
        ("/", "ext4"),
        ("/database", "ext4"),
        ("/data", "overlay"),
        ("/data/local", "overlay"),
        ("/data/shared", "nfs4"),
        ("/data/shared/deep", "nfs4"),
        ("/data/sharedx", "overlay"),
        ("/data/with space/x", "cifs"),
    ):
        assert file_system(Path(folder), mounts) == kind
    assert file_system(Path("/proc")) == "proc"


async def test_the_event_loop_goes_on_while_the_disk_is_slow(capture, monkeypatch):
    from vllm_forest_renderer.store import files

    fsync = files.os.fsync

    def slow(descriptor):
        import time

        time.sleep(0.2)
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", slow)
    attempt = await capture.attempt()
    loop = asyncio.get_running_loop()
    call = asyncio.create_task(capture.call(attempt))
    longest, last = 0.0, loop.time()
    while not call.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, loop.time() - last), loop.time()
    assert longest < 0.1
    await call


async def test_the_ledger_file_is_private_and_wal_with_full_sync(capture):
    path = capture.directory / "ledger.sqlite"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)
    synchronous = await capture.ledger._write(
        lambda db: db.execute("PRAGMA synchronous").fetchone()
    )
    assert synchronous == (2,)
