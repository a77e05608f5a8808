"""SIGKILL at random moments under load: nothing acknowledged is lost, the next start goes on."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forest_schema import CallRecord, Reason
from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.shards import TOKENS
from vllm_forest_renderer.errors import AttemptError

from tests.support.capture import Capture


class Acknowledged:
    """What killed processes reported, and what must therefore still hold."""

    def __init__(self) -> None:
        self.committed: dict[str, dict[str, str]] = {}
        self.failed: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.cleaning: set[str] = set()
        self.cleaned: set[str] = set()

    def add(self, fact: dict[str, str]) -> None:
        attempt = fact["attempt"]
        match fact["fact"]:
            case "opened":
                self.committed[attempt], self.failed[attempt] = {}, set()
            case "committed":
                self.committed[attempt][fact["call"]] = fact["chain"]
            case "failed":
                self.failed[attempt].add(fact["call"])
            case "closed":
                self.closed.add(attempt)
            case "cleaning":
                self.cleaning.add(attempt)
            case "cleaned":
                self.cleaned.add(attempt)

    async def verify(self, capture: Capture) -> int:
        """Compare with the ledger and the store; returns how many deltas were read."""
        read = 0
        for attempt, committed in self.committed.items():
            try:
                receipt = await capture.ledger.receipt(attempt)
            except AttemptError:
                if attempt in self.cleaning:
                    continue
                raise
            assert attempt not in self.cleaned
            calls = {call.call_id: call for call in receipt.calls}
            for call_id, chain in committed.items():
                assert calls[call_id].chain_digest == chain
            failures = {failure.call_id: failure.reason for failure in receipt.failures}
            assert all(failures[call] == Reason.ENGINE_ERROR for call in self.failed[attempt])
            assert set(failures.values()) <= {Reason.ENGINE_ERROR, Reason.PROCESS_LOST}
            assert receipt.pending == (), "a dead process's call is still pending"
            if attempt in self.closed:
                assert receipt.closed
                assert set(calls) == set(committed)
                assert len({call.delta.shard for call in receipt.calls}) <= 1
            for call in receipt.calls:
                await _check_delta(capture, call, calls)
                read += 1
        return read


async def _check_delta(capture: Capture, call: CallRecord, calls: dict[str, CallRecord]) -> None:
    parent = calls[call.parent_call_id].chain_digest if call.parent_call_id else EMPTY_CHAIN
    delta = await capture.sink.get(call.delta)
    assert chain_digest(parent, delta[TOKENS]) == call.chain_digest


async def _check_files(capture: Capture, partition: str) -> None:
    """No torn shard, no temporary file, and `list` can read every header."""
    assert [name for name in capture.files(partition) if name.endswith(".tmp")] == []
    await capture.sink.list(partition)


def _run_and_kill(forker, partition, seed, acknowledged) -> int:
    """Kill a process shortly after a random one of its reports; returns how many there were."""
    choose = random.Random(seed)
    forker.stdin.write(f"{seed} {partition}\n")
    forker.stdin.flush()
    pid = json.loads(forker.stdout.readline())["pid"]
    facts = choose.randint(1, 40)
    for _ in range(facts):
        acknowledged.add(json.loads(forker.stdout.readline()))
    time.sleep(choose.uniform(0.0, 0.004))
    os.kill(pid, signal.SIGKILL)
    while "dead" not in (fact := json.loads(forker.stdout.readline())):
        acknowledged.add(fact)
        facts += 1
    return facts


def _kill_again_and_again(directory, kills: int) -> tuple[int, int]:
    facts = read = 0
    acknowledged, partition = Acknowledged(), "run1-step0"
    forker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.crash", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    for kill in range(kills):
        facts += _run_and_kill(forker, partition, kill, acknowledged)
        if kill % 10 == 9 or kill == kills - 1:
            read += asyncio.run(_verify(directory, partition, acknowledged))
            acknowledged, partition = Acknowledged(), f"run1-step{kill + 1}"
    forker.stdin.close()
    assert forker.wait(10) == 0
    return facts, read


async def _verify(directory, partition, acknowledged) -> int:
    capture = await Capture.open(directory)
    read = await acknowledged.verify(capture)
    await _check_files(capture, partition)
    for attempt in list(acknowledged.committed)[::3]:  # what was interrupted can be finished
        if attempt not in acknowledged.cleaning:
            receipt = await capture.ledger.close(attempt, 0.0)
            assert set(acknowledged.committed[attempt]) <= {c.call_id for c in receipt.calls}
            await capture.ledger.cleanup(attempt)
    await capture.ledger.cleanup_partition(partition)
    assert capture.files(partition) == []
    await capture.shutdown()
    return read


@pytest.mark.requirement("C14", "C25", "A24", "C4")
def test_nothing_acknowledged_is_lost_in_hundreds_of_kills(tmp_path):
    facts, read = _kill_again_and_again(tmp_path, 200)
    assert facts > 3500
    assert read > 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.requirement("C14", "C25", "A24", "C4")
def test_nothing_acknowledged_is_lost_in_thousands_of_kills(tmp_path):
    facts, read = _kill_again_and_again(tmp_path, 3000)
    assert facts > 50_000
    assert read > 15_000
