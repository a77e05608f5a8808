"""Restoring an attempt: calls move to a new owner, the old attempt is closed for good."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from forest_schema import Reason, decode_receipt
from forest_schema.control import CONTROL_PREFIX, AttemptOpened, ErrorBody
from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.shards import TOKENS, ShardError
from vllm_forest_renderer.control import ControlServices, ControlToken, control_router
from vllm_forest_renderer.errors import AttemptError, CoordinateError, ForestError

from tests.support.capture import PARTITION, Capture, make_delta

pytestmark = pytest.mark.anyio

TOKEN = "secret-of-the-trainer"


@pytest.fixture
async def client(capture) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    services = ControlServices(capture.ledger, capture.sink, ControlToken(TOKEN), None)
    app.include_router(control_router(lambda request: services))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url=f"http://server{CONTROL_PREFIX}",
        headers={"authorization": f"Bearer {TOKEN}"},
    ) as client:
        yield client


async def _restore(client, attempt, **body) -> str:
    response = await client.post(f"/attempts/{attempt}/restore", json=body)
    assert response.status_code == 200, response.text
    opened = msgspec.json.decode(response.content, type=AttemptOpened)
    assert opened.base_path == f"/v1/forest/{opened.attempt_id}"
    return opened.attempt_id


def _owned_by(attempt, source, *calls):
    return tuple(
        msgspec.structs.replace(
            call, attempt_id=attempt, capture_key=attempt, source_capture_key=source
        )
        for call in calls
    )


async def _verify(capture, calls) -> None:
    """Every delta is there and continues its parent's chain."""
    by_id = {call.call_id: call for call in calls}
    for call in calls:
        parent = by_id[call.parent_call_id].chain_digest if call.parent_call_id else EMPTY_CHAIN
        delta = await capture.sink.get(call.delta)
        assert chain_digest(parent, delta[TOKENS]) == call.chain_digest


@pytest.mark.requirement("I20", "C12", "C17", "C26")
async def test_an_open_attempt_goes_on_under_a_new_owner(client, capture):
    old = await capture.attempt(rollout_id="r7", group_id="g7", metadata={"seed": 4})
    root = await capture.call(old)
    failed = await capture.admit(old)
    await capture.ledger.record_failure(old, failed.call_id, Reason.ENGINE_ERROR)
    child = await capture.call(old, root)
    pending = await capture.admit(old)
    new = await _restore(client, old)

    expected = _owned_by(new, old, root, child)
    assert capture.ledger.calls(new) == expected
    receipt = decode_receipt((await client.get(f"/attempts/{new}/receipt")).content)
    assert receipt.calls == expected
    assert (receipt.rollout_id, receipt.group_id, receipt.metadata) == ("r7", "g7", {"seed": 4})
    assert (receipt.partition, receipt.closed) == (PARTITION, False)
    assert (receipt.failures, receipt.pending) == ((), ())

    after = await capture.call(new, expected[1])
    assert (after.order, after.prev_len, after.source_capture_key) == (4, child.cum_len, None)
    assert capture.ledger.calls(new) == (*expected, after)
    await _verify(capture, capture.ledger.calls(new))
    with pytest.raises(CoordinateError, match="no call of this attempt"):
        await capture.call(new, msgspec.structs.replace(root, call_id=pending.call_id))
    with pytest.raises(CoordinateError, match="no intent of this attempt"):
        await capture.finish(new, pending, expected[0])
    with pytest.raises(AttemptError, match="restored into another attempt"):
        await capture.finish(old, pending, root)


@pytest.mark.requirement("I20", "C17")
@pytest.mark.parametrize("closed", [False, True])
async def test_the_old_attempt_is_refused_by_name(client, capture, closed):
    old = await capture.attempt()
    await capture.call(old)
    pending = await capture.admit(old)
    if closed:
        await capture.ledger.close(old, 0.0)
    new = await _restore(client, old)
    again = await client.post(f"/attempts/{old}/restore")
    error = msgspec.json.decode(again.content, type=ErrorBody).error
    assert (again.status_code, error.type, error.param) == (422, Reason.ATTEMPT_CLOSED, "attempt")
    assert f"restored already, as {new}" in error.message

    for refused in (
        lambda: capture.admit(old),
        lambda: capture.ledger.close(old, 0.0),
        lambda: capture.ledger.receipt(old),
        lambda: asyncio.to_thread(capture.ledger.calls, old),
    ):
        with pytest.raises(AttemptError, match="restored into another attempt") as raised:
            await refused()
        assert raised.value.reason is Reason.ATTEMPT_CLOSED
        assert new not in str(raised.value)  # its id is the new harness's right
    report = await capture.ledger.cleanup(old)
    assert (report.removed_calls, report.kept_pending) == (0, (pending.call_id,))
    assert len(capture.ledger.calls(new)) == 1
    await _verify(capture, capture.ledger.calls(new))
    deleted = await capture.attempt()
    await capture.ledger.cleanup(deleted)
    with pytest.raises(AttemptError, match="it is deleted"):
        await capture.ledger.restore(deleted)
    unknown = await client.post(f"/attempts/att_{'0' * 32}/restore")
    assert unknown.json()["error"]["type"] == Reason.ATTEMPT_UNKNOWN


@pytest.mark.requirement("I20", "C26", "C12")
async def test_a_closed_attempt_is_restored_again_and_again(client, capture):
    first = current = await capture.attempt()
    await capture.call(current)
    for _ in range(3):
        await capture.ledger.close(current, 0.0)
        current = await _restore(client, current)
        calls = capture.ledger.calls(current)
        assert calls[0].source_capture_key == first
        await capture.call(current, calls[-1])
    receipt = await capture.ledger.close(current, 0.0)
    assert [call.order for call in receipt.calls] == [0, 1, 2, 3]
    assert {call.capture_key for call in receipt.calls} == {current}
    assert len({call.source_capture_key for call in receipt.calls}) == 4
    # Every delta lies in one shard, and no shard of an earlier owner is left.
    assert await capture.settled() == [f"{receipt.calls[0].delta.shard}.safetensors"]
    await _verify(capture, receipt.calls)
    assert (await capture.ledger.cleanup(current)).removed_shards == 1
    assert await capture.settled() == []


@pytest.mark.requirement("I20", "C12")
async def test_only_the_named_calls_go_on(client, capture):
    old = await capture.attempt()
    root = await capture.call(old)
    child = await capture.call(old, root)
    later = await capture.call(old, child)
    pending = await capture.admit(old)
    for named, why in (
        ([child.call_id], f"parent {root.call_id}"),
        ([root.call_id, pending.call_id], f"{pending.call_id} is no committed call"),
        ([root.call_id, "call_x"], "call_x is no committed call"),
    ):
        refused = await client.post(f"/attempts/{old}/restore", json={"calls": named})
        error = msgspec.json.decode(refused.content, type=ErrorBody).error
        assert (refused.status_code, error.type) == (400, Reason.MALFORMED_REQUEST)
        assert (why in error.message, error.param) == (True, "calls")
        assert capture.ledger.calls(old) == (root, child, later)
    new = await _restore(client, old, calls=[child.call_id, root.call_id])
    expected = _owned_by(new, old, root, child)
    assert capture.ledger.calls(new) == expected
    assert len(await capture.settled()) == 2
    with pytest.raises(ShardError):
        await capture.sink.get(later.delta)
    await _verify(capture, expected)
    none = await _restore(client, new, calls=[])
    assert capture.ledger.calls(none) == ()
    assert await capture.settled() == []


@pytest.mark.requirement("I20", "I9")
async def test_a_cancellation_after_the_commit_goes_along(capture):
    old = await capture.attempt()
    call = await capture.call(old)
    reason = Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
    await capture.ledger.record_failure(old, call.call_id, reason)
    new = (await capture.ledger.restore(old)).attempt_id
    (failure,) = (await capture.ledger.receipt(new)).failures
    assert (failure.call_id, failure.had_committed_capture) == (call.call_id, True)


@pytest.mark.requirement("I20")
async def test_a_closing_ends_before_its_calls_move(capture):
    old = await capture.attempt()
    root = await capture.call(old)
    await capture.call(old, root)
    pending = await capture.admit(old)
    closing = asyncio.create_task(capture.ledger.close(old, 60.0))
    await asyncio.sleep(0.02)
    new = (await asyncio.wait_for(capture.ledger.restore(old), 5.0)).attempt_id
    with pytest.raises(AttemptError):
        await capture.finish(old, pending, root)
    calls = capture.ledger.calls(new)
    assert len({call.delta.shard for call in calls}) == 1  # sealed by the closing
    await asyncio.wait([closing])
    await capture.settled()
    await _verify(capture, calls)


@pytest.mark.requirement("I20", "C26")
async def test_an_interrupted_seal_leaves_no_copies_and_takes_none_away(tmp_path):
    capture = await Capture.open(tmp_path)
    old = await capture.attempt()
    root = await capture.call(old)
    child = await capture.call(old, root)
    await capture.sink.seal(PARTITION, [root.delta, child.delta])
    await capture.shutdown()
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute("UPDATE attempts SET state = 'sealing', sealer = 1")
    database.commit()
    database.close()
    capture = await Capture.open(tmp_path)
    listing = asyncio.Event()
    stored = capture.sink.list

    async def slowly(partition):  # another task closes the restored attempt meanwhile
        listing.set()
        await asyncio.sleep(0.05)
        return await stored(partition)

    capture.sink.list = slowly
    closing = asyncio.create_task(capture.ledger.close(old, 0.0))
    await listing.wait()
    new = (await capture.ledger.restore(old)).attempt_id
    await capture.call(new, capture.ledger.calls(new)[-1])
    receipt = await capture.ledger.close(new, 0.0)
    await asyncio.wait([closing])
    assert await capture.settled() == [f"{receipt.calls[0].delta.shard}.safetensors"]
    await _verify(capture, receipt.calls)
    await capture.shutdown()


@pytest.mark.requirement("I20", "C26")
async def test_teardown_of_the_partition_takes_both_attempts(capture):
    old = await capture.attempt()
    await capture.call(old)
    new = (await capture.ledger.restore(old)).attempt_id
    await capture.ledger.cleanup_partition(PARTITION)
    for attempt in (old, new):
        with pytest.raises(ForestError):
            await capture.ledger.restore(attempt)
    assert capture.files() == []


def _run_and_kill(directory: Path, seed: int) -> tuple[dict[str, list[str]], set[str]]:
    """Kill a process in the middle of its attempts; attempt -> acknowledged calls, and those
    that it may have cleaned.
    """
    forker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.crash", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert forker.stdin is not None
    assert forker.stdout is not None
    committed: dict[str, list[str]] = {}
    cleaning: set[str] = set()
    forker.stdin.write(f"{seed} {PARTITION}\n")
    forker.stdin.flush()
    pid = json.loads(forker.stdout.readline())["pid"]
    facts = random.Random(seed).randint(20, 60)
    while "dead" not in (fact := json.loads(forker.stdout.readline())):
        facts -= 1
        if facts == 0:
            os.kill(pid, signal.SIGKILL)
        calls = committed.setdefault(fact["attempt"], [])
        if fact["fact"] == "committed":
            calls.append(fact["call"])
        elif fact["fact"] == "cleaning":
            cleaning.add(fact["attempt"])
    forker.stdin.close()
    assert forker.wait(10) == 0
    return committed, cleaning


@pytest.mark.requirement("I20", "J6", "C17", "C25")
async def test_attempts_that_a_kill_interrupted_are_restored(tmp_path):
    restored = lost = 0
    for seed in range(3):
        committed, cleaning = await asyncio.to_thread(_run_and_kill, tmp_path, seed)
        capture = await Capture.open(tmp_path)
        for old in committed.keys() - cleaning:
            before = await capture.ledger.receipt(old)
            assert before.pending == ()
            lost += sum(failure.reason == Reason.PROCESS_LOST for failure in before.failures)
            new = (await capture.ledger.restore(old)).attempt_id
            calls = capture.ledger.calls(new)
            assert {call.call_id for call in calls} >= set(committed[old])
            assert {call.call_id for call in calls} == {call.call_id for call in before.calls}
            if calls:
                await capture.call(new, calls[-1], delta=make_delta(20, 10))
            receipt = await capture.ledger.close(new, 0.0)
            assert receipt.failures == ()
            assert len({call.delta.shard for call in receipt.calls}) <= 1
            await _verify(capture, receipt.calls)
            restored += len(calls)
        await capture.settled()
        await capture.shutdown()
    assert restored > 10
    assert lost > 0
