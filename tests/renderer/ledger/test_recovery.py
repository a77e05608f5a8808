"""Start-up: other versions, calls of dead processes, interrupted closings, several processes."""

import asyncio
import json
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import time

import msgspec
import pytest
from forest_schema import Reason, SchemaError
from forest_schema.shards import encode_shard
from vllm_forest_renderer.errors import CoordinateError
from vllm_forest_renderer.ledger import Ledger
from vllm_forest_renderer.process import ProcessIdentity
from vllm_forest_renderer.store import SafetensorsSink

from tests.support.capture import PARTITION, Capture, make_delta

pytestmark = pytest.mark.anyio


def _run_sql(directory, *statements):
    database = sqlite3.connect(directory / "ledger.sqlite")
    for statement in statements:
        database.execute(*statement)
    database.commit()
    database.close()


@pytest.mark.requirement("C7", "C20", "J7")
@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("schema", "2", "version 2"),
        ("schema", "4", "version 4"),
        ("schema", "three", "schema version"),
        ("required_features", '["weight_spans"]', "ReplayContext.items"),
        ("required_features", '["replay_summary","weight_spans","teleport"]', "teleport"),
        ("store", "store_other", "store_other"),
    ],
)
async def test_another_ledger_is_refused_by_name(tmp_path, name, value, named):
    await (await Capture.open(tmp_path)).shutdown()
    _run_sql(tmp_path, ("UPDATE meta SET value = ? WHERE name = ?", (value, name)))
    with pytest.raises(SchemaError, match=named):
        await Capture.open(tmp_path)


@pytest.mark.requirement("C20")
async def test_a_ledger_without_a_column_is_refused_by_name(tmp_path):
    await (await Capture.open(tmp_path)).shutdown()
    _run_sql(tmp_path, ("ALTER TABLE attempts DROP COLUMN successor",))
    with pytest.raises(SchemaError, match=r"attempts\.successor.*state_dir"):
        await Capture.open(tmp_path)


async def test_a_file_of_another_program_is_refused(tmp_path):
    _run_sql(tmp_path, ("CREATE TABLE other (x)",))
    with pytest.raises(SchemaError, match="not a capture ledger"):
        await Capture.open(tmp_path)


@pytest.mark.requirement("C25", "C16", "C18")
async def test_calls_of_a_dead_process_are_lost_and_their_writes_isolated(tmp_path):
    capture = await Capture.open(tmp_path)
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    staged = await capture.admit(attempt)
    ref = await capture.sink.put(PARTITION, staged.call_id, make_delta())
    _run_sql(tmp_path, ("UPDATE owners SET start_ticks = start_ticks + 1",))
    restarted = await Capture.open(tmp_path)
    receipt = await restarted.ledger.receipt(attempt)
    assert [(f.call_id, f.reason) for f in receipt.failures] == [
        (staged.call_id, Reason.PROCESS_LOST)
    ]
    assert receipt.pending == ()
    assert restarted.ledger.calls(attempt) == (root,)
    await restarted.ledger.close(attempt, 0.0)
    await restarted.ledger.cleanup(attempt)
    assert await restarted.sink.get(ref)
    await restarted.ledger.cleanup_partition(PARTITION)
    await restarted.shutdown()
    await capture.shutdown()


@pytest.mark.requirement("C25")
async def test_calls_of_a_living_process_stay_pending(capture):
    attempt = await capture.attempt()
    intent = await capture.admit(attempt)
    second = await Capture.open(capture.directory)
    assert (await second.ledger.receipt(attempt)).pending == (intent.call_id,)
    await second.shutdown()
    await capture.finish(attempt, intent)


async def test_what_an_orderly_shutdown_left_pending_is_lost(tmp_path):
    capture = await Capture.open(tmp_path)
    attempt = await capture.attempt()
    await capture.admit(attempt)
    await capture.shutdown()
    restarted = await Capture.open(tmp_path)
    receipt = await restarted.ledger.receipt(attempt)
    assert [f.reason for f in receipt.failures] == [Reason.PROCESS_LOST]
    await restarted.shutdown()


@pytest.mark.requirement("C25", "I2")
async def test_closing_does_not_wait_for_a_process_that_dies(capture):
    attempt = await capture.attempt()
    await capture.admit(attempt)
    closing = asyncio.create_task(capture.ledger.close(attempt, 60.0))
    await asyncio.sleep(0.05)
    _run_sql(capture.directory, ("UPDATE owners SET pid = 1, start_ticks = 5",))
    receipt = await asyncio.wait_for(closing, 5.0)
    assert [f.reason for f in receipt.failures] == [Reason.PROCESS_LOST]


def test_a_process_is_known_by_boot_pid_and_start_time():
    ours = ProcessIdentity.current()
    assert ours.is_alive()
    assert ProcessIdentity.from_token(ours.token) == ours
    for other in ({"boot_id": "0" * 32}, {"start_ticks": ours.start_ticks + 1}):
        assert not msgspec.structs.replace(ours, **other).is_alive()
    ended = subprocess.Popen(["true"])
    identity = msgspec.structs.replace(ours, pid=ended.pid)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()  # a zombie: not reaped yet
    ended.wait()
    assert not identity.is_alive()


@pytest.mark.requirement("C26")
async def test_a_seal_that_a_crash_interrupted_is_finished_without_copies(tmp_path):
    capture = await Capture.open(tmp_path)
    attempt, bystander = await capture.attempt(), await capture.attempt()
    (calls, kept) = await asyncio.gather(_chain(capture, attempt, 4), _chain(capture, bystander, 4))
    await capture.ledger.close(bystander, 0.0)
    await capture.sink.seal(PARTITION, [call.delta for call in calls])
    await capture.shutdown()
    _run_sql(
        tmp_path,
        ("UPDATE attempts SET state = 'sealing', sealer = 1 WHERE attempt_id = ?", (attempt,)),
    )
    restarted = await Capture.open(tmp_path)
    receipt = await restarted.ledger.close(attempt, 0.0)
    assert [c.call_id for c in receipt.calls] == [c.call_id for c in calls]
    for call in receipt.calls + (await restarted.ledger.receipt(bystander)).calls:
        await restarted.sink.get(call.delta)
    assert len(kept) == 4
    assert len(await restarted.settled()) == 2
    await restarted.shutdown()


async def test_cleanup_of_an_interrupted_seal_removes_the_copies_too(tmp_path):
    capture = await Capture.open(tmp_path)
    attempt = await capture.attempt()
    calls = await _chain(capture, attempt, 3)
    await capture.sink.seal(PARTITION, [call.delta for call in calls])
    await capture.shutdown()
    _run_sql(tmp_path, ("UPDATE attempts SET state = 'sealing', sealer = 1",))
    restarted = await Capture.open(tmp_path)
    report = await restarted.ledger.cleanup(attempt)
    assert report.removed_calls == 3
    assert await restarted.settled() == []
    await restarted.shutdown()


async def test_deltas_that_a_crash_left_as_garbage_go_at_the_next_start(tmp_path):
    capture = await Capture.open(tmp_path)
    attempt = await capture.attempt()
    calls = await _chain(capture, attempt, 3)
    folder, copy = tmp_path / "store" / PARTITION, tmp_path / "copy"
    shutil.copytree(folder, copy)
    await capture.ledger.close(attempt, 0.0)
    await capture.settled()
    for call in calls:  # the swap is durable, the deletion is not
        shutil.copy(copy / f"{call.delta.shard}.safetensors", folder)
        _run_sql(
            tmp_path,
            (
                "INSERT OR IGNORE INTO garbage VALUES (?, ?, ?, ?, ?)",
                msgspec.structs.astuple(call.delta),
            ),
        )
    await capture.shutdown()
    restarted = await Capture.open(tmp_path)
    assert len(await restarted.settled()) == 1
    for call in (await restarted.ledger.receipt(attempt)).calls:
        await restarted.sink.get(call.delta)
    await restarted.shutdown()


async def test_a_torn_shard_is_never_accepted(capture):
    """A shard that a power cut tore, under its final name: refused by get and by commit."""
    attempt = await capture.attempt()
    intent, delta = await capture.admit(attempt), make_delta()
    ref = await capture.sink.put(PARTITION, intent.call_id, delta)
    path = capture.sink.shard_path(PARTITION, ref.shard)
    whole = path.read_bytes()
    assert whole == encode_shard(
        {intent.call_id: delta}, store=capture.sink.store_id, partition=PARTITION
    )
    fresh = SafetensorsSink(capture.sink.directory)
    ledger = await Ledger.open(capture.directory / "ledger.sqlite", fresh)
    from tests.support.capture import make_record

    record = make_record(attempt, intent, ref, delta)
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CoordinateError, match="delta"):
            await ledger.commit(record)
    path.write_bytes(whole)
    await ledger.commit(record)
    await ledger.shutdown()
    await fresh.shutdown()


async def _chain(capture, attempt, length):
    parent, calls = None, []
    for _ in range(length):
        parent = await capture.call(attempt, parent)
        calls.append(parent)
    return calls


def _serve(directory, attempt, calls, start, results):
    """One API-server process: concurrent chains in a shared attempt."""

    async def serve():
        capture = await Capture.open(directory)
        start.wait()
        began = time.perf_counter()
        chains = await asyncio.gather(*(_chain(capture, attempt, calls) for _ in range(4)))
        seconds = time.perf_counter() - began
        await capture.shutdown()
        return {"calls": [[c.call_id for c in chain] for chain in chains], "seconds": seconds}

    results.put(json.dumps(asyncio.run(serve())))


@pytest.mark.requirement("A25")
async def test_processes_of_one_host_share_ledger_and_shards(capture):
    attempt = await capture.attempt()
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(2), spawn.Queue()
    workers = [
        spawn.Process(target=_serve, args=(capture.directory, attempt, 25, start, results))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    found = [json.loads(await asyncio.to_thread(results.get, timeout=60)) for _ in workers]
    for worker in workers:
        worker.join()
    served = {call for result in found for chain in result["calls"] for call in chain}
    assert len(served) == 200
    calls = capture.ledger.calls(attempt)
    assert {c.call_id for c in calls} == served
    receipt = await capture.ledger.close(attempt, 1.0)
    assert [c.order for c in receipt.calls] == list(range(200))
    assert len(await capture.settled()) == 1
    for call in receipt.calls:
        await capture.sink.get(call.delta)
