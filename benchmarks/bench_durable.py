"""Calls captured durably: intent, delta and record, each flushed before the next.

    pytest benchmarks/bench_durable.py --benchmark-only

A call has 330 new tokens, 60 of them generated. Overlapping calls share their flushes.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forest_schema.shards import TOKENS, Delta, encode_shard

from benchmarks.conftest import Report
from benchmarks.figures import Goal, figure
from tests.support.capture import Capture, make_delta

OVERLAPPING = [1, 8, 32, 128]
CHAIN = 1_000
"""Calls of the conversation whose bytes are counted."""
DELTA_LEN, GENERATED_LEN = 330, 60


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "overlapping" in metafunc.fixturenames:
        quick = metafunc.config.getoption("--quick")
        metafunc.parametrize("overlapping", [2] if quick else OVERLAPPING)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def capture(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> Iterator[Capture]:
    opened = loop.run_until_complete(Capture.open(tmp_path))
    yield opened
    loop.run_until_complete(opened.shutdown())


def _flushed(path: Path, data: bytes) -> float:
    """Seconds that writing `data` to a fresh file and flushing it takes."""
    start = time.perf_counter()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(descriptor, data)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - start


def test_overlapping_calls(
    report: Report,
    capture: Capture,
    loop: asyncio.AbstractEventLoop,
    tmp_path: Path,
    overlapping: int,
    quick: bool,
) -> None:
    attempt = loop.run_until_complete(capture.attempt())
    delta = make_delta(DELTA_LEN, GENERATED_LEN)
    data = encode_shard({"key": delta}, store="store", partition="partition")
    whole: list[float] = []
    staging: list[float] = []
    flushing: list[float] = []
    numbers = itertools.count()

    async def call() -> None:
        start = time.perf_counter()
        intent = await capture.admit(attempt)
        admitted = time.perf_counter()
        await capture.finish(attempt, intent, delta=delta)
        end = time.perf_counter()
        whole.append(end - start)
        staging.append(end - admitted)

    async def calls() -> None:
        await asyncio.gather(*(call() for _ in range(overlapping)))

    def captured() -> float:
        start = time.perf_counter()
        loop.run_until_complete(calls())
        return overlapping / (time.perf_counter() - start)

    def one_by_one() -> float:
        seconds = [_flushed(tmp_path / f"raw-{next(numbers)}", data) for _ in range(overlapping)]
        flushing.extend(seconds)
        return overlapping / sum(seconds)

    def at_once() -> float:
        return overlapping / _flushed(tmp_path / f"raw-{next(numbers)}", data * overlapping)

    rounds, section = 2 if quick else 25, "Durable capture"
    report.add(
        report.compare(
            section,
            f"{overlapping} overlapping calls",
            captured,
            unit="calls/s",
            peers={"write + fsync, one by one": one_by_one},
            limits={"one write + fsync of all": at_once},
            rounds=rounds,
            x=overlapping,
            x_label="overlapping calls",
            headline="durable capture, 32 overlapping calls" if overlapping == 32 else "",
        )
    )
    kept = rounds * overlapping
    flushes = [1e3 * seconds for seconds in flushing[-kept:]]
    one = {"write + fsync, one by one": flushes}
    for case, seconds, goals in (
        ("  latency, admission included", whole, ()),
        ("  latency of delta and commit", staging, (3.0,) if overlapping == 1 else ()),
    ):
        row = figure(section, case, "ms", [1e3 * value for value in seconds[-kept:]], peers=one)
        report.add(row, *(Goal("3 ms", row.ours.median, bound) for bound in goals))


def _written() -> int:
    """Bytes that this process handed to `write`."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def test_bytes_per_call(
    report: Report, capture: Capture, loop: asyncio.AbstractEventLoop, quick: bool
) -> None:
    """One chain of calls; the peer stores each call's whole history."""
    count, window = (8, 2) if quick else (CHAIN, 50)
    attempt = loop.run_until_complete(capture.attempt())
    ours: list[float] = []
    theirs: list[float] = []

    async def chain() -> None:
        parent = None
        for _ in range(count):
            delta: Delta = make_delta(DELTA_LEN, GENERATED_LEN)
            before = _written()
            parent = await capture.call(attempt, parent, delta=delta)
            ours.append((_written() - before) / 1024)
            theirs.append(parent.cum_len * (delta[TOKENS].itemsize + 4) / 1024)

    report.benchmark.pedantic(lambda: loop.run_until_complete(chain()), rounds=1)
    means = []
    for start in (0, window, count - window):
        part = slice(start, start + window)
        means.append(sum(ours[part]) / window)
        report.add(
            figure(
                "Bytes written per call",
                f"calls {start + 1:,} to {start + window:,} of one chain",
                "KiB",
                means[-1:],
                peers={"the whole history each time": [sum(theirs[part]) / window]},
            ),
            *([Goal("1.05 of the first", means[1] / means[0], 1.05)] if start == window else []),
        )
