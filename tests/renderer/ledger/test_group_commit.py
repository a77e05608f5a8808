"""The thread behind ledger and store: order, sharing, failures, cancellation; its metrics."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from forest_schema import Reason
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from vllm_forest_renderer import metrics
from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.group_commit import GroupCommitter, Raised

from tests.support.capture import make_delta

anyio = pytest.mark.anyio


class Recorder:
    """Commits into a list; odd work fails, `broken` batches fail whole."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def commit(self, batch):
        self.gate.wait(10)
        if self.broken:
            raise StoreUnavailable("broken")
        self.batches.append(list(batch))
        return [Raised(ValueError(n)) if n % 2 else n * 10 for n in batch]

    def committer(self, max_batch: int = 100) -> GroupCommitter[int]:
        return GroupCommitter(self.commit, name="test", max_batch=max_batch, metrics=metrics.LEDGER)


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_everything_is_committed_once_in_order_and_answered(work, max_batch):
    recorder = Recorder()
    committer = recorder.committer(max_batch)
    futures = [committer.submit(n) for n in work]
    committer.stop()
    assert [n for batch in recorder.batches for n in batch] == work
    assert all(1 <= len(batch) <= max_batch for batch in recorder.batches)
    for n, future in zip(work, futures, strict=True):
        if n % 2:
            with pytest.raises(ValueError, match=str(n)):
                future.result(0)
        else:
            assert future.result(0) == n * 10


def test_work_that_arrives_during_a_commit_shares_the_next_one():
    recorder = Recorder()
    recorder.gate.clear()
    committer = recorder.committer()
    first = committer.submit(0)
    time.sleep(0.05)
    others = [committer.submit(n) for n in range(2, 12, 2)]
    assert not first.done()
    recorder.gate.set()
    assert [future.result(5) for future in others] == [20, 40, 60, 80, 100]
    assert recorder.batches == [[0], [2, 4, 6, 8, 10]]
    committer.stop()


def test_a_commit_that_fails_fails_its_whole_batch_and_nothing_later():
    recorder = Recorder()
    recorder.broken = True
    committer = recorder.committer()
    with pytest.raises(StoreUnavailable):
        committer.submit(2).result(5)
    recorder.broken = False
    assert committer.submit(4).result(5) == 40
    committer.stop()


def test_cancelled_work_is_left_out_and_begun_work_is_finished():
    recorder = Recorder()
    recorder.gate.clear()
    committer = recorder.committer()
    begun = committer.submit(0)
    time.sleep(0.05)
    waiting = committer.submit(2)
    assert waiting.cancel()
    assert not begun.cancel()
    recorder.gate.set()
    assert begun.result(5) == 0
    committer.stop()
    assert recorder.batches == [[0]]
    with pytest.raises(CancelledError):
        waiting.result(0)


def test_nothing_is_accepted_after_the_stop():
    committer = Recorder().committer()
    committer.stop()
    committer.stop()
    with pytest.raises(StoreUnavailable):
        committer.submit(2)


def _value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@anyio
async def test_metrics_count_what_happened(capture):
    names = (
        ("forest_call_intents_total", {"api": "chat"}),
        ("forest_calls_committed_total", {"api": "chat"}),
        ("forest_call_failures_total", {"reason": Reason.CLIENT_DISCONNECTED.value}),
        ("forest_late_commits_total", {}),
    )
    before = [_value(name, **labels) for name, labels in names]
    written = _value("forest_store_bytes_total", kind="put")
    attempt = await capture.attempt()
    await capture.call(attempt)
    failed, late = await capture.admit(attempt), await capture.admit(attempt)
    for _ in range(2):
        await capture.ledger.record_failure(attempt, failed.call_id, Reason.CLIENT_DISCONNECTED)
    await capture.ledger.close(attempt, 0.0)
    with pytest.raises(Exception, match="closed"):
        await capture.finish(attempt, late, delta=make_delta(100, 10))
    after = [_value(name, **labels) for name, labels in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 1, 1, 1]
    assert _value("forest_store_bytes_total", kind="put") - written > 440
    for what in ("ledger", "store"):
        assert _value(f"forest_{what}_queue_depth") == 0
        assert _value(f"forest_{what}_commit_seconds_count") > 0
        assert _value(f"forest_{what}_commit_batch_count") > 0
