"""Attempts and calls: admission, order of states, coordinates, failures, several handles."""

import asyncio
import sqlite3
import time

import msgspec
import pytest
from forest_schema import CompletionStatus, Reason
from forest_schema.digests import EMPTY_CHAIN
from vllm_forest_renderer.errors import AttemptError, CoordinateError, ForestError

from tests.support.capture import PARTITION, Capture, make_delta, make_record

pytestmark = pytest.mark.anyio

UNKNOWN = "att_" + "0" * 32


@pytest.mark.requirement("A2", "A24", "C14")
async def test_an_intent_is_durable_before_it_is_returned(capture):
    attempt = await capture.attempt()
    intents = [await capture.admit(attempt) for _ in range(3)]
    rows = sqlite3.connect(capture.directory / "ledger.sqlite").execute(
        "SELECT call_id, capture_order, state FROM calls WHERE attempt_id = ?", (attempt,)
    )
    assert rows.fetchall() == [(i.call_id, n, "intent") for n, i in enumerate(intents)]
    assert len({i.call_id for i in intents}) == 3


async def test_attempt_ids_are_random_and_carry_128_bits(capture):
    ids = {await capture.attempt() for _ in range(20)}
    assert len(ids) == 20
    assert all(len(bytes.fromhex(i.removeprefix("att_"))) == 16 for i in ids)


@pytest.mark.requirement("A4", "C1", "C2", "C9", "C10", "C11")
async def test_committed_calls_are_kept_whole_and_in_commit_order(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    first, second = await capture.admit(attempt), await capture.admit(attempt)
    later = await capture.finish(attempt, second, root, finish_reason="length")
    earlier = await capture.finish(attempt, first, root)
    assert capture.ledger.calls(attempt) == (root, later, earlier)
    receipt = await capture.ledger.receipt(attempt)
    assert receipt.calls == (root, earlier, later)
    assert not receipt.closed


@pytest.mark.requirement("A25")
async def test_calls_of_one_attempt_may_overlap(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    children = await asyncio.gather(*(capture.call(attempt, root) for _ in range(20)))
    assert sorted(c.order for c in children) == list(range(1, 21))
    seen = capture.ledger.calls(attempt)[1:]
    assert {call.call_id for call in seen} == {call.call_id for call in children}


@pytest.mark.requirement("C4", "C9")
async def test_the_ledger_holds_no_tokens_and_grows_by_the_same_amount_per_call(capture):
    attempt = await capture.attempt()
    parent, sizes = None, []
    marker = make_delta(2000, 1000, seed=7)
    for _ in range(30):
        parent = await capture.call(attempt, parent, delta=marker)
        database = sqlite3.connect(capture.directory / "ledger.sqlite")
        ((size,),) = database.execute(
            "SELECT length(record) FROM calls ORDER BY capture_order DESC LIMIT 1"
        ).fetchall()
        sizes.append(size)
    assert max(sizes[2:]) - min(sizes[2:]) < 40  # digits of the lengths, nothing else
    assert max(sizes) < 2500
    for path in capture.directory.glob("ledger.sqlite*"):
        assert marker["tokens"][:32].tobytes() not in path.read_bytes()


@pytest.mark.requirement("A30", "C1")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prev_len": 11, "cum_len": 23}, "prev_len"),
        ({"chain_digest": "5" * 32}, "chain_digest"),
        ({"chain_digest": EMPTY_CHAIN}, "chain_digest"),
        ({"delta_len": 13, "cum_len": 25}, "delta_len"),
        ({"generated_len": 4}, "generated_len"),
        ({"parent_call_id": "call_" + "0" * 32}, "parent_call_id"),
        ({"order": 7}, "order"),
        ({"api": "responses"}, "API"),
        ({"capture_key": UNKNOWN}, "capture_key"),
        ({"source_capture_key": UNKNOWN}, "capture_key"),
    ],
)
async def test_a_record_with_wrong_coordinates_is_refused(capture, changes, named):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    with pytest.raises(CoordinateError, match=named):
        await capture.call(attempt, root, **changes)
    receipt = await capture.ledger.receipt(attempt)
    assert receipt.calls == (root,)
    assert len(receipt.pending) == 1


@pytest.mark.requirement("A30")
async def test_a_root_cannot_inherit_and_a_delta_must_be_the_acknowledged_one(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    intent, delta = await capture.admit(attempt), make_delta()
    ref = await capture.sink.put(PARTITION, intent.call_id, delta)
    record = make_record(attempt, intent, ref, delta)
    for wrong in (
        root.delta,
        msgspec.structs.replace(ref, digest="6" * 32),
        msgspec.structs.replace(ref, shard="nowhere"),
        msgspec.structs.replace(ref, store="store_other"),
    ):
        with pytest.raises(CoordinateError, match="delta"):
            await capture.ledger.commit(msgspec.structs.replace(record, delta=wrong))
    await capture.ledger.commit(record)


@pytest.mark.requirement("A30", "C12")
async def test_a_delta_of_another_partition_is_refused(capture):
    attempt = await capture.attempt()
    await capture.attempt("run1-step1")
    intent, delta = await capture.admit(attempt), make_delta()
    ref = await capture.sink.put("run1-step1", intent.call_id, delta)
    with pytest.raises(CoordinateError, match="partition"):
        await capture.ledger.commit(make_record(attempt, intent, ref, delta))


@pytest.mark.requirement("C17", "C24", "A30")
async def test_pending_failed_aborted_and_foreign_calls_are_never_parents(capture):
    attempt, other = await capture.attempt(), await capture.attempt()
    aborted = await capture.call(attempt, status=CompletionStatus.FAILED, finish_reason="abort")
    foreign = await capture.call(other)
    delta = make_delta()
    pending = await capture.admit(attempt)
    staged = make_record(
        attempt, pending, await capture.sink.put(PARTITION, pending.call_id, delta), delta
    )
    failed_intent = await capture.admit(attempt)
    failed = make_record(
        attempt,
        failed_intent,
        await capture.sink.put(PARTITION, failed_intent.call_id, delta),
        delta,
    )
    await capture.ledger.record_failure(attempt, failed.call_id, Reason.ENGINE_ERROR)
    for parent, why in (
        (aborted, "status failed"),
        (foreign, "no call of this attempt"),
        (staged, "state intent"),
        (failed, "state failed"),
    ):
        with pytest.raises(CoordinateError, match=why):
            await capture.call(attempt, parent)


@pytest.mark.requirement("C21")
async def test_a_call_that_the_harness_rejected_is_kept_like_any_other(capture):
    attempt = await capture.attempt()
    root = await capture.call(attempt)
    # A harness that samples twice and goes on with the second answer returns only that one.
    rejected = await capture.call(attempt, root)
    accepted = await capture.call(attempt, root)
    last = await capture.call(attempt, accepted)
    receipt = await capture.ledger.close(attempt, 1.0)
    # Closing moves the tensors into one shard and changes nothing else.
    kept = [msgspec.structs.replace(call, delta=root.delta) for call in receipt.calls]
    assert kept == [
        msgspec.structs.replace(call, delta=root.delta) for call in (root, rejected, accepted, last)
    ]
    assert (receipt.failures, receipt.pending) == ((), ())
    rows = sqlite3.connect(capture.directory / "ledger.sqlite").execute(
        "SELECT call_id, state FROM calls WHERE attempt_id = ? ORDER BY capture_order", (attempt,)
    )
    assert rows.fetchall() == [(call.call_id, "committed") for call in receipt.calls]
    # Only identity, time and the generation itself tell the two apart.
    own = {"call_id", "order", "output", "delta", "chain_digest", "started_at", "committed_at"}
    left, right = msgspec.structs.asdict(rejected), msgspec.structs.asdict(accepted)
    assert {name for name in left if left[name] != right[name]} <= own


async def test_committing_twice_changes_nothing_and_another_record_is_refused(capture):
    attempt = await capture.attempt()
    record = await capture.call(attempt)
    await capture.ledger.commit(record)
    with pytest.raises(CoordinateError, match="committed already"):
        await capture.ledger.commit(msgspec.structs.replace(record, finish_reason="length"))
    assert capture.ledger.calls(attempt) == (record,)


@pytest.mark.requirement("C16", "C18", "C24", "I6")
async def test_a_recorded_failure_ends_the_call_and_acknowledges_nothing(capture):
    attempt = await capture.attempt()
    intent = await capture.admit(attempt)
    await capture.ledger.record_failure(
        attempt, intent.call_id, Reason.CLIENT_DISCONNECTED, "gone " * 1000
    )
    await capture.ledger.record_failure(attempt, intent.call_id, Reason.ENGINE_ERROR)
    with pytest.raises(CoordinateError, match="failure"):
        await capture.finish(attempt, intent)
    receipt = await capture.ledger.receipt(attempt)
    (failure,) = receipt.failures
    assert (failure.call_id, failure.order, failure.reason) == (
        intent.call_id,
        0,
        Reason.CLIENT_DISCONNECTED,
    )
    assert not failure.had_committed_capture
    assert len(failure.detail) <= 500
    assert receipt.calls == receipt.pending == ()
    assert capture.ledger.calls(attempt) == ()


@pytest.mark.requirement("I9")
async def test_a_failure_after_the_commit_says_that_the_capture_exists(capture):
    attempt = await capture.attempt()
    record = await capture.call(attempt)
    await capture.ledger.record_failure(
        attempt, record.call_id, Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES
    )
    receipt = await capture.ledger.receipt(attempt)
    assert receipt.calls == (record,)
    assert receipt.failures[0].had_committed_capture
    assert await capture.call(attempt, record)


async def test_unknown_attempts_and_calls_are_refused(capture):
    attempt = await capture.attempt()
    for operation in (
        capture.admit(UNKNOWN),
        capture.ledger.receipt(UNKNOWN),
        capture.ledger.close(UNKNOWN, 0),
        capture.ledger.cleanup(UNKNOWN),
        capture.ledger.receipt("../" + attempt),
        capture.admit("att_" + "A" * 32),
        capture.ledger.record_failure(UNKNOWN, "call_x", Reason.ENGINE_ERROR),
    ):
        with pytest.raises(AttemptError) as refused:
            await operation
        assert refused.value.reason is Reason.ATTEMPT_UNKNOWN
    with pytest.raises(AttemptError):
        capture.ledger.calls(UNKNOWN)
    with pytest.raises(CoordinateError):
        await capture.ledger.record_failure(attempt, "call_" + "0" * 32, Reason.ENGINE_ERROR)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", ".hidden", "a\0b", "x" * 129, "store.json", "é"]
)
async def test_partition_names_cannot_leave_the_store(capture, name):
    with pytest.raises(ForestError) as refused:
        await capture.attempt(name)
    assert refused.value.reason is Reason.MALFORMED_REQUEST


@pytest.mark.requirement("C15")
async def test_a_cancelled_admission_leaves_no_pending_call(capture):
    attempt = await capture.attempt()
    for delay in (0.0, 0.0, 0.0001, 0.0005, 0.001, 0.002):
        task = asyncio.create_task(capture.admit(attempt))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await capture.finish(attempt, task.result())
    receipt = await capture.ledger.close(attempt, 1.0)
    assert receipt.pending == ()
    assert {f.reason for f in receipt.failures} <= {Reason.CLIENT_DISCONNECTED}


async def test_a_failure_is_recorded_although_its_recorder_is_cancelled(capture):
    attempt = await capture.attempt()
    intent = await capture.admit(attempt)
    capture.ledger._writer.submit(lambda db: time.sleep(0.2))
    await asyncio.sleep(0.05)  # what follows waits in the queue
    recording = asyncio.create_task(
        capture.ledger.record_failure(attempt, intent.call_id, Reason.CLIENT_DISCONNECTED)
    )
    await asyncio.sleep(0)
    recording.cancel()
    await asyncio.wait([recording])
    receipt = await capture.ledger.close(attempt, 1.0)
    assert [f.reason for f in receipt.failures] == [Reason.CLIENT_DISCONNECTED]


async def test_an_operation_that_raises_takes_only_its_own_writes_back(capture):
    writer = capture.ledger._writer

    def note(name, error=None):
        def operation(db):
            db.execute("INSERT INTO meta VALUES (?, '')", (name,))
            if error is not None:
                raise error

        return operation

    writer.submit(lambda db: time.sleep(0.2))
    await asyncio.sleep(0.05)  # what follows shares a transaction
    futures = [
        writer.submit(note("first")),
        writer.submit(note("refused", CoordinateError("refused"))),
        writer.submit(note("last")),
    ]
    outcomes = [await asyncio.to_thread(future.exception) for future in futures]
    assert [type(outcome) for outcome in outcomes] == [type(None), CoordinateError, type(None)]
    rows = sqlite3.connect(capture.directory / "ledger.sqlite").execute("SELECT name FROM meta")
    assert {"first", "last"} <= (names := {name for (name,) in rows})
    assert "refused" not in names


@pytest.mark.requirement("A3", "C17", "XF5")
async def test_attempts_do_not_see_each_other(capture):
    first, second = await capture.attempt(), await capture.attempt()
    record = await capture.call(first)
    assert capture.ledger.calls(second) == ()
    with pytest.raises(CoordinateError, match="no intent of this attempt"):
        await capture.ledger.commit(
            msgspec.structs.replace(record, attempt_id=second, capture_key=second)
        )


async def test_two_handles_see_each_other_at_once(capture):
    other = await Capture.open(capture.directory)
    attempt = await capture.attempt()
    root = await other.call(attempt)
    assert capture.ledger.calls(attempt) == (root,)
    child = await capture.call(attempt, root)
    assert other.ledger.calls(attempt) == (root, child)
    receipt = await other.ledger.close(attempt, 1.0)
    with pytest.raises(AttemptError):
        capture.ledger.calls(attempt)
    assert await capture.ledger.close(attempt, 1.0) == receipt
    await other.shutdown()


@pytest.mark.requirement("C13")
async def test_everything_is_there_after_a_restart(tmp_path):
    before = await Capture.open(tmp_path)
    attempt = await before.attempt(metadata={"task": 7})
    root = await before.call(attempt)
    await before.shutdown()
    after = await Capture.open(tmp_path)
    assert after.sink.store_id == before.sink.store_id
    assert after.ledger.calls(attempt) == (root,)
    child = await after.call(attempt, root)
    receipt = await after.ledger.close(attempt, 1.0)
    assert [c.call_id for c in receipt.calls] == [root.call_id, child.call_id]
    assert receipt.metadata == {"task": 7}
    await after.shutdown()
