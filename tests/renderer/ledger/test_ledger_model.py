"""Random histories of a ledger against a slow, obvious model of what it promises."""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forest_schema import CallRecord, Reason
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_forest_renderer.errors import AttemptError, CoordinateError, StoreUnavailable
from vllm_forest_renderer.ledger import Intent

from tests.support.capture import Capture, make_delta, make_record

PARTITIONS = ("step0", "step1")


@dataclass
class Call:
    """What the model knows of one admitted call."""

    intent: Intent
    state: str = "intent"
    record: CallRecord | None = None
    reason: str | None = None
    stored: bool = False
    """The store may still hold a delta of this call."""


@dataclass
class Attempt:
    """What the model knows of one attempt."""

    partition: str
    state: str = "open"
    calls: list[Call] = field(default_factory=list)


class Model:
    """Attempts by id; every rule of the ledger as one `if`."""

    def __init__(self) -> None:
        self.attempts: dict[str, Attempt] = {}

    def lose_pending(self) -> None:
        for attempt in self.attempts.values():
            for call in attempt.calls:
                if call.state == "intent":
                    call.state, call.reason = "failed", Reason.PROCESS_LOST

    def clean(self, attempt: Attempt) -> list[str]:
        attempt.state = "deleted"
        attempt.calls = [call for call in attempt.calls if call.state != "committed"]
        return [call.intent.call_id for call in attempt.calls]

    def stored_keys(self, partition: str) -> list[str]:
        return sorted(
            call.intent.call_id
            for attempt in self.attempts.values()
            if attempt.partition == partition
            for call in attempt.calls
            if call.stored
        )


WEIGHTS = {"admit": 2, "commit": 3, "open": 1, "fail": 1, "refail": 1, "close": 1} | dict.fromkeys(
    ("cleanup", "teardown", "restart"), 1
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from([step for step, weight in WEIGHTS.items() for _ in range(weight)]),
        st.integers(0, 2**16),
        st.integers(0, 2**16),
    ),
    min_size=5,
    max_size=40,
)


async def _run(directory: Path, steps: list[tuple[str, int, int]]) -> None:
    model, capture = Model(), await Capture.open(directory)
    for step, first, second in steps:
        ids = list(model.attempts)
        if step == "restart":
            await capture.shutdown()
            capture = await Capture.open(directory)
            model.lose_pending()
        elif step == "teardown":
            partition = PARTITIONS[first % 2]
            await capture.ledger.cleanup_partition(partition)
            for attempt in model.attempts.values():
                if attempt.partition == partition:
                    attempt.state, attempt.calls = "deleted", []
        elif step == "open" or not ids:
            partition = PARTITIONS[first % 2]
            model.attempts[await capture.attempt(partition)] = Attempt(partition)
        else:
            attempt_id = ids[first % len(ids)]
            await _step(capture, model, attempt_id, step, second)
        await _compare(capture, model)
    await capture.shutdown()


async def _step(capture: Capture, model: Model, attempt_id: str, step: str, choice: int) -> None:
    attempt = model.attempts[attempt_id]
    call = attempt.calls[choice % len(attempt.calls)] if attempt.calls else None
    if step == "admit":
        if attempt.state == "open":
            attempt.calls.append(Call(await capture.admit(attempt_id)))
        else:
            with pytest.raises(AttemptError):
                await capture.admit(attempt_id)
    elif step == "commit" and call is not None:
        await _commit(capture, attempt_id, attempt, call, choice)
    elif step in ("fail", "refail") and call is not None:
        reason = Reason.ENGINE_ERROR if step == "fail" else Reason.CLIENT_DISCONNECTED
        await capture.ledger.record_failure(attempt_id, call.intent.call_id, reason)
        call.reason = call.reason or reason
        call.state = "failed" if call.state == "intent" else call.state
    elif step == "close":
        if attempt.state == "deleted":
            with pytest.raises(AttemptError):
                await capture.ledger.close(attempt_id, 0.0)
        else:
            await capture.ledger.close(attempt_id, 0.0)
            attempt.state = "closed"
    elif step == "cleanup":
        report = await capture.ledger.cleanup(attempt_id)
        before = sum(call.state == "committed" for call in attempt.calls)
        assert list(report.kept_pending) == model.clean(attempt)
        assert report.removed_calls == before


async def _commit(
    capture: Capture, attempt_id: str, attempt: Attempt, call: Call, choice: int
) -> None:
    parents = [c for c in attempt.calls if c.intent.order < call.intent.order]
    parent = parents[choice % len(parents)] if parents and choice % 3 else None
    delta = make_delta()
    if call.state == "committed":
        return
    try:
        ref = await capture.sink.put(attempt.partition, call.intent.call_id, delta)
    except StoreUnavailable:
        assert attempt.state == "deleted", "only a dropped partition refuses"
        return
    call.stored = True
    parent_record = parent.record if parent else None
    record = make_record(attempt_id, call.intent, ref, delta, parent_record)
    if attempt.state == "open" and call.state == "intent":
        await capture.ledger.commit(record)
        call.state, call.record = "committed", record
    else:
        with pytest.raises((AttemptError, CoordinateError)):
            await capture.ledger.commit(record)


async def _compare(capture: Capture, model: Model) -> None:
    for attempt_id, attempt in model.attempts.items():
        if attempt.state == "deleted":
            with pytest.raises(AttemptError):
                await capture.ledger.receipt(attempt_id)
            continue
        receipt = await capture.ledger.receipt(attempt_id)
        committed = [call for call in attempt.calls if call.state == "committed"]
        assert [c.chain_digest for c in receipt.calls] == [c.record.chain_digest for c in committed]
        assert [c.order for c in receipt.calls] == [c.intent.order for c in committed]
        assert list(receipt.pending) == [
            c.intent.call_id for c in attempt.calls if c.state == "intent"
        ]
        assert [(f.call_id, f.reason, f.had_committed_capture) for f in receipt.failures] == [
            (c.intent.call_id, c.reason, c.state == "committed") for c in attempt.calls if c.reason
        ]
        assert receipt.closed == (attempt.state == "closed")
        if attempt.state == "open":
            assert {c.call_id for c in capture.ledger.calls(attempt_id)} == {
                c.intent.call_id for c in committed
            }
        else:
            with pytest.raises(AttemptError):
                capture.ledger.calls(attempt_id)
        for record in receipt.calls:
            await capture.sink.get(record.delta)
    for partition in PARTITIONS:
        await capture.settled()
        stored = {ref.key for ref in await capture.sink.list(partition)}
        assert sorted(stored) == model.stored_keys(partition)


@pytest.mark.requirement("C14", "C15", "C16", "C17", "C18", "C25", "C26", "I1", "I6", "I7", "I9")
@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_a_random_history_keeps_every_promise(steps):
    directory = Path(tempfile.mkdtemp())
    try:
        asyncio.run(_run(directory, steps))
    finally:
        shutil.rmtree(directory)
