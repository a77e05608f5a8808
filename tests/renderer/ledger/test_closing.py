"""Close, seal, receipt, cleanup and teardown of attempts."""

import asyncio
import time

import msgspec
import pytest
from forest_schema import Reason, decode_receipt
from forest_schema.shards import ShardError
from vllm_forest_renderer.errors import AttemptError, ForestError, StoreUnavailable

from tests.support.capture import PARTITION, Capture, make_delta

pytestmark = pytest.mark.anyio


async def _chain(capture: Capture, attempt: str, length: int):
    parent, calls = None, []
    for _ in range(length):
        parent = await capture.call(attempt, parent)
        calls.append(parent)
    return calls


@pytest.mark.requirement("I1")
async def test_closing_refuses_later_calls_at_once(capture):
    attempt = await capture.attempt()
    pending = await capture.admit(attempt)
    closing = asyncio.create_task(capture.ledger.close(attempt, 30.0))
    await asyncio.sleep(0.02)
    for _ in range(2):
        with pytest.raises(AttemptError) as refused:
            await capture.admit(attempt)
        assert refused.value.reason is Reason.ATTEMPT_CLOSED
    with pytest.raises(AttemptError):
        capture.ledger.calls(attempt)
    admitted = await capture.finish(attempt, pending)
    receipt = await closing
    assert [c.call_id for c in receipt.calls] == [admitted.call_id]
    assert receipt.closed


@pytest.mark.requirement("I2", "C15")
async def test_the_wait_is_bounded_and_what_is_pending_stays_pending(capture):
    attempt = await capture.attempt()
    done = await capture.call(attempt)
    pending = await capture.admit(attempt)
    started = time.monotonic()
    receipt = await capture.ledger.close(attempt, 0.2)
    assert 0.2 <= time.monotonic() - started < 2.0
    assert receipt.pending == (pending.call_id,)
    assert [c.call_id for c in receipt.calls] == [done.call_id]


@pytest.mark.requirement("I2", "C16")
async def test_a_recorded_failure_ends_the_wait(capture):
    attempt = await capture.attempt()
    pending = await capture.admit(attempt)
    closing = asyncio.create_task(capture.ledger.close(attempt, 30.0))
    await asyncio.sleep(0.02)
    await capture.ledger.record_failure(attempt, pending.call_id, Reason.ENGINE_ERROR)
    receipt = await asyncio.wait_for(closing, 2.0)
    assert receipt.pending == ()
    assert receipt.failures[0].reason == Reason.ENGINE_ERROR


@pytest.mark.requirement("XF5", "C18", "C17")
async def test_a_capture_after_the_seal_is_isolated(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    late = await capture.admit(attempt)
    before = await capture.ledger.close(attempt, 0.0)
    with pytest.raises(AttemptError) as refused:
        await capture.finish(attempt, late, root)
    assert refused.value.reason is Reason.ATTEMPT_CLOSED
    assert await capture.ledger.receipt(attempt) == before
    assert before.pending == (late.call_id,)
    assert capture.ledger.calls(await capture.attempt()) == ()
    report = await capture.ledger.cleanup(attempt)
    assert report.kept_pending == (late.call_id,)
    assert len(await capture.settled()) == 1  # the late delta, until the partition goes
    await capture.ledger.cleanup_partition(PARTITION)
    assert capture.files() == []


@pytest.mark.requirement("C26")
async def test_closing_seals_the_deltas_into_one_shard(capture):
    attempt, other = await capture.attempt(), await capture.attempt()
    calls, others = await asyncio.gather(_chain(capture, attempt, 6), _chain(capture, other, 6))
    deltas = [await capture.sink.get(c.delta) for c in calls]
    receipt = await capture.ledger.close(attempt, 1.0)
    assert len({c.delta.shard for c in receipt.calls}) == 1
    assert {ref.key for ref in await capture.sink.list(PARTITION)} == {
        c.call_id for c in calls + others
    }
    for before, call, delta in zip(calls, receipt.calls, deltas, strict=True):
        sealed = await capture.sink.get(call.delta)
        assert {n: a.tolist() for n, a in sealed.items()} == {
            n: a.tolist() for n, a in delta.items()
        }
        assert call.delta.digest == before.delta.digest
    for call in others:  # what another attempt shares a shard with stays readable
        await capture.sink.get(call.delta)
    await capture.ledger.close(other, 1.0)
    assert len(await capture.settled()) == 2


async def test_one_call_in_a_shard_of_its_own_is_sealed_already(capture):
    attempt = await capture.attempt()
    call = await capture.call(attempt)
    receipt = await capture.ledger.close(attempt, 1.0)
    assert receipt.calls == (call,)
    assert len(await capture.settled()) == 1


@pytest.mark.requirement("I7")
async def test_closing_again_returns_the_same_receipt(capture):
    attempt = await capture.attempt(metadata={"seed": 3})
    await _chain(capture, attempt, 3)
    first, second = await asyncio.gather(
        capture.ledger.close(attempt, 1.0), capture.ledger.close(attempt, 1.0)
    )
    assert first == second == await capture.ledger.close(attempt, 5.0)
    assert first == await capture.ledger.receipt(attempt)
    assert decode_receipt(msgspec.json.encode(first)) == first


async def test_a_closing_that_a_shutdown_interrupts_is_resumed_by_closing_again(tmp_path):
    capture = await Capture.open(tmp_path)
    attempt = await capture.attempt()
    record = await capture.call(attempt)
    pending = await capture.admit(attempt)
    closing = asyncio.create_task(capture.ledger.close(attempt, 60.0))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(capture.shutdown(), 5.0)
    await asyncio.wait([closing])
    restarted = await Capture.open(tmp_path)
    with pytest.raises(AttemptError):
        await restarted.admit(attempt)
    receipt = await restarted.ledger.close(attempt, 60.0)
    assert receipt.calls == (record,)
    assert [f.call_id for f in receipt.failures] == [pending.call_id]
    await restarted.shutdown()


async def test_a_second_close_may_shorten_the_wait(capture):
    attempt = await capture.attempt()
    await capture.admit(attempt)
    patient = asyncio.create_task(capture.ledger.close(attempt, 60.0))
    await asyncio.sleep(0.02)
    receipt = await asyncio.wait_for(capture.ledger.close(attempt, 0.0), 2.0)
    assert await patient == receipt


async def test_a_caller_that_goes_away_does_not_stop_the_closing(capture):
    attempt = await capture.attempt()
    pending = await capture.admit(attempt)
    closing = asyncio.create_task(capture.ledger.close(attempt, 30.0))
    await asyncio.sleep(0.02)
    closing.cancel()
    await asyncio.wait([closing])
    await capture.finish(attempt, pending)
    async with asyncio.timeout(2):
        while not (await capture.ledger.receipt(attempt)).closed:
            await asyncio.sleep(0.01)


@pytest.mark.requirement("I6", "I7", "C16", "C18")
async def test_cleanup_keeps_what_may_still_be_written(capture):
    attempt = await capture.attempt()
    calls = await _chain(capture, attempt, 3)
    pending, failed = await capture.admit(attempt), await capture.admit(attempt)
    failed_ref = await capture.sink.put(PARTITION, failed.call_id, make_delta())
    await capture.ledger.record_failure(attempt, failed.call_id, Reason.ENGINE_ERROR)
    receipt = await capture.ledger.close(attempt, 0.0)
    report = await capture.ledger.cleanup(attempt)
    assert (report.removed_calls, report.removed_shards) == (3, 1)
    assert report.kept_pending == (pending.call_id, failed.call_id)
    for call in receipt.calls:
        with pytest.raises(ShardError):
            await capture.sink.get(call.delta)
    assert await capture.sink.get(failed_ref)
    again = await capture.ledger.cleanup(attempt)
    assert (again.removed_calls, again.removed_shards) == (0, 0)
    assert again.kept_pending == report.kept_pending
    assert {ref.key for ref in await capture.sink.list(PARTITION)} == {failed.call_id}
    assert len(calls) == 3


async def test_a_deleted_attempt_never_reopens(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    pending = await capture.admit(attempt)
    await capture.ledger.cleanup(attempt)  # closes admissions first
    for operation in (
        capture.admit(attempt),
        capture.finish(attempt, pending, root),
        capture.ledger.receipt(attempt),
        capture.ledger.close(attempt, 0.0),
    ):
        with pytest.raises(AttemptError) as refused:
            await operation
        assert refused.value.reason is Reason.ATTEMPT_CLOSED
    await capture.ledger.cleanup_partition(PARTITION)
    with pytest.raises(AttemptError) as refused:
        await capture.admit(attempt)
    assert refused.value.reason is Reason.ATTEMPT_CLOSED


@pytest.mark.requirement("C26", "C18")
async def test_teardown_removes_the_folder_and_refuses_late_writes(capture):
    attempt, elsewhere = await capture.attempt(), await capture.attempt("run1-step1")
    await _chain(capture, attempt, 3)
    kept = await capture.call(elsewhere)
    pending = await capture.admit(attempt)
    report = await capture.ledger.cleanup_partition(PARTITION)
    assert report.removed_calls == 4
    assert report.removed_shards == 3
    assert not (capture.directory / "store" / PARTITION).exists()
    with pytest.raises(StoreUnavailable, match="dropped"):
        await capture.finish(attempt, pending)
    assert not (capture.directory / "store" / PARTITION).exists()
    assert await capture.sink.get(kept.delta)
    again = await capture.ledger.cleanup_partition(PARTITION)
    assert (again.removed_calls, again.removed_shards) == (0, 0)


async def test_a_partition_name_can_be_used_again_after_teardown(capture):
    await capture.call(await capture.attempt())
    await capture.ledger.cleanup_partition(PARTITION)
    attempt = await capture.attempt()
    record = await capture.call(attempt)
    assert (await capture.ledger.close(attempt, 0.0)).calls == (record,)


async def test_cleanup_of_a_partition_checks_its_name(capture):
    with pytest.raises(ForestError):
        await capture.ledger.cleanup_partition("../store")


async def test_cleanup_does_not_wait_for_a_patient_close(capture):
    attempt = await capture.attempt()
    await capture.call(attempt)
    await capture.admit(attempt)
    closing = asyncio.create_task(capture.ledger.close(attempt, 60.0))
    await asyncio.sleep(0.02)
    report = await asyncio.wait_for(capture.ledger.cleanup(attempt), 2.0)
    assert report.removed_calls == 1
    await asyncio.wait([closing])


async def test_two_handles_close_one_attempt(capture):
    other = await Capture.open(capture.directory)
    for _ in range(5):
        attempt = await capture.attempt()
        await _chain(capture, attempt, 4)
        first, second = await asyncio.gather(
            capture.ledger.close(attempt, 1.0), other.ledger.close(attempt, 1.0)
        )
        assert first == second
        for call in first.calls:
            await other.sink.get(call.delta)
    assert len(await capture.settled()) == 5
    await other.shutdown()
