"""From shards to batches and from receipts to rows: the trainer's side without a model.

    pytest benchmarks/bench_reading.py --benchmark-only

Files lie in the page cache. Every peer gets the same shard files or records.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forest_schema import CallRecord, TensorRef
from forest_schema.shards import LOGPROBS, TOKENS, Delta, encode_shard, shard_parts
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.packing import pack
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import RowPlan
from megatron_forest_trainer.data.collate import Collator, RowInput
from megatron_forest_trainer.finalize import finalize_rollout
from megatron_forest_trainer.store import FolderReader
from safetensors.numpy import load_file, save_file
from vllm_forest_renderer.store import SafetensorsSink

from benchmarks.conftest import Report, timed
from benchmarks.figures import Goal, figure, slope
from tests.support.forests import Forest

ROW = 8192
"""Tokens of a row that is read."""
BYTES_PER_TOKEN = 8
"""Token id and log-probability."""
SIZES = [10, 200, 2_000]
"""Calls of a rollout."""
CHAIN = 20
"""Calls between two rewrites of the context."""
PROMPT, GENERATED = 300, 200
"""Tokens of each call."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    quick = metafunc.config.getoption("--quick")
    if "calls_per_row" in metafunc.fixturenames:
        metafunc.parametrize("calls_per_row", [2] if quick else [1, 4, 20])
    if "calls" in metafunc.fixturenames:
        metafunc.parametrize("calls", [20, 40] if quick else SIZES)


@pytest.fixture(scope="session")
def rounds(quick: bool) -> int:
    return 2 if quick else 15


# Rows


def _rows(folder: Path, calls_per_row: int, count: int) -> list[RowPlan]:
    """`count` chains of calls, each one row of about `ROW` tokens, in one shard."""
    forest = Forest(partition="rows")
    half = ROW // calls_per_row // 2
    plans: list[RowPlan] = []
    for number in range(count):
        path: list[CallRecord] = []
        for _ in range(calls_per_row):
            path.append(forest.call(path[-1] if path else None, prompt=half, generated=half))
        plans += build_rows(path, group_id="g", rollout_id=f"r{number}")
    forest.write(folder)
    return plans


def test_rows_to_batch(
    report: Report, tmp_path: Path, calls_per_row: int, quick: bool, rounds: int
) -> None:
    """Verified deltas, rows, one packed batch; every round opens the store anew."""
    count = 4 if quick else 256
    plans = _rows(tmp_path, calls_per_row, count)
    collate = Collator(packed=True)
    (shard,) = tmp_path.glob("rows/*.safetensors")
    tokens = sum(plan.length for plan in plans)
    size = tokens * BYTES_PER_TOKEN / 1e9
    source = np.ones(tokens * BYTES_PER_TOKEN, np.uint8)

    def batch() -> None:
        with FolderReader(tmp_path) as reader:
            for at in range(0, count, 4):
                rows = [RowInput(assemble(plan, reader)) for plan in plans[at : at + 4]]
                collate(rows, training=False)

    def arrays() -> None:
        with FolderReader(tmp_path) as reader:
            for plan in plans:
                assemble(plan, reader)

    def unverified() -> None:
        tensors = load_file(shard)
        for plan in plans:
            for name in (TOKENS, LOGPROBS):
                np.concatenate([tensors[f"{call.delta.key}/{name}"] for call in plan.path])

    def rate(function: Any) -> Any:
        work = timed(function)
        return lambda: size / work()

    section = "Reading rows of 8k tokens"
    row = report.compare(
        section,
        f"shards to rows, {calls_per_row} call(s) each, digests verified",
        rate(arrays),
        unit="GB/s",
        peers={"safetensors, unverified": rate(unverified)},
        limits={"memcpy": rate(source.copy)},
        rounds=rounds,
        headline="reading rows of one call, digests verified" if calls_per_row == 1 else "",
    )
    goals = [Goal("2 GB/s", row.ours.median, 2.0, at_least=True)] if calls_per_row == 1 else []
    report.add(row, *goals)
    batches, copies = [], []
    for _ in range(rounds):
        batches.append(rate(batch)())
        copies.append(rate(source.copy)())
    limits = {"memcpy": copies}
    report.add(figure(section, "  and on to packed batches", "GB/s", batches, limits=limits))
    per_second = [value / size * count for value in batches]
    report.add(figure(section, "  and on to packed batches", "rows/s", per_second))


# Shards


def _deltas(count: int, tokens: int) -> dict[str, Delta]:
    random = np.random.default_rng(0)
    return {
        f"call_{number}": {
            TOKENS: random.integers(0, 150_000, tokens, dtype=np.int32),
            LOGPROBS: -random.random(tokens, dtype=np.float32),
        }
        for number in range(count)
    }


def test_sealed_shard(report: Report, tmp_path: Path, quick: bool, rounds: int) -> None:
    """Closing an attempt: 64 calls of 64k tokens each are brought together in one shard."""
    deltas = _deltas(4 if quick else 64, 65_536)
    size = sum(array.nbytes for delta in deltas.values() for array in delta.values()) / 1e9
    flat = {f"{key}/{name}": array for key in deltas for name, array in deltas[key].items()}
    data = encode_shard(deltas, store="store", partition="partition")
    sink = SafetensorsSink(tmp_path / "store")

    async def put() -> list[TensorRef]:
        await sink.prepare("partition")
        return [await sink.put("partition", key, delta) for key, delta in deltas.items()]

    def flushed(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def seal() -> float:
        start = time.perf_counter()
        sealed = asyncio.run(sink.seal("partition", refs))
        spent = time.perf_counter() - start
        asyncio.run(sink.delete(sealed))
        return size / spent

    def safetensors() -> float:
        start = time.perf_counter()
        save_file(flat, tmp_path / "peer")
        flushed(tmp_path / "peer")
        return size / (time.perf_counter() - start)

    def raw() -> float:
        start = time.perf_counter()
        (tmp_path / "raw").write_bytes(data)
        flushed(tmp_path / "raw")
        return size / (time.perf_counter() - start)

    refs = asyncio.run(put())
    seal()  # verified once: the deltas' digests are remembered by open readers
    report.add(
        report.compare(
            "Shards",
            "sealing 34 MB: read, verify, write, flush",
            seal,
            unit="GB/s",
            peers={"safetensors save_file + fsync": safetensors},
            limits={"write + fsync": raw},
            rounds=rounds,
        )
    )
    layout = timed(lambda: shard_parts(deltas, store="store", partition="partition"))
    encoding = [size / layout() for _ in range(rounds)]
    row = figure("Shards", "  digests and layout alone", "GB/s", encoding)
    report.add(row, Goal("2 GB/s", row.ours.median, 2.0, at_least=True))
    asyncio.run(sink.shutdown())


# Forests


def _rollout(calls: int, partition: str) -> tuple[Forest, dict[str, Any]]:
    """Tool calls with reasoning; the context is rewritten every `CHAIN` calls."""
    forest, parent = Forest(partition=partition), None
    for number in range(calls):
        function = {"name": "look", "arguments": f'{{"x": {number}}}'}
        called = [{"id": f"call_{number}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "reasoning": "why " * 40}
        parent = forest.call(
            parent if number % CHAIN else None,
            prompt=PROMPT,
            generated=GENERATED,
            output=[message | {"tool_calls": called}],
        )
    return forest, forest.result(*forest.calls)


def _trie(rows: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Rows merged token by token into dictionaries, as trainers without call records do."""
    root: dict[int, Any] = {}
    for row in rows:
        node = root
        for token in row:
            node = node.setdefault(token, {})
    return root


Growth = dict[str, dict[int, float]]


@pytest.fixture(scope="session")
def growth() -> Growth:
    """Median milliseconds by what and by number of calls."""
    return {}


def _exponent(report: Report, growth: Growth, section: str, calls: int, value: float) -> None:
    """Report the growth once every size has been measured."""
    sizes = growth.setdefault(section, {})
    sizes[calls] = value
    if len(sizes) > 1 and calls == max(SIZES):
        exponent = slope(list(sizes), list(sizes.values()))
        row = figure(section, "  exponent of the growth with calls", "", [exponent])
        report.add(row, Goal("linear: 1.1", exponent, 1.1))


def test_forest_build(report: Report, growth: Growth, calls: int, rounds: int) -> None:
    forest, _ = _rollout(calls, "build")
    plans = build_rows(forest.calls, group_id="g", rollout_id="r")
    reader = forest.reader()
    rows = [assemble(plan, reader).tokens_T.tolist() for plan in plans]
    row = report.compare(
        "Forests",
        f"rows of {calls:,} calls, {calls * (PROMPT + GENERATED):,} tokens",
        timed(lambda: build_rows(forest.calls, group_id="g", rollout_id="r")),
        peers={"trie of dictionaries": timed(lambda: _trie(rows))},
        limits={"copy of the ids": timed(lambda: [list(row) for row in rows])},
        rounds=min(rounds, 3) if calls > 1_000 else rounds,
        x=calls,
        x_label="calls",
        headline="forest of 200 calls, 100k tokens" if calls == 200 else "",
    )
    report.add(row, *([Goal("20 ms", row.ours.median, 20.0)] if calls == 200 else []))
    _exponent(report, growth, "Forests", calls, row.ours.median)


def test_finalisation(
    report: Report, growth: Growth, tmp_path: Path, calls: int, rounds: int
) -> None:
    """Selection, every digest and the token chain, rows; the store is opened anew each time."""
    forest, result = _rollout(calls, "final")
    receipt = forest.receipt()
    forest.write(tmp_path)

    def finalise() -> None:
        finalize_rollout(receipt, result, FolderReader(tmp_path))

    def read() -> None:
        reader = FolderReader(tmp_path)
        for call in receipt.calls:
            reader.read(call.delta)

    row = report.compare(
        "Finalising rollouts",
        f"{calls:,} calls",
        timed(finalise),
        limits={"reading and digests alone": timed(read)},
        rounds=min(rounds, 5) if calls > 1_000 else rounds,
    )
    beyond = row.ours.median - row.other("reading and digests alone").spread.median
    report.add(row, *([Goal("5 ms beyond reading", beyond, 5.0)] if calls == 200 else []))
    _exponent(report, growth, "Finalising rollouts", calls, row.ours.median)


def test_packing(report: Report, quick: bool, rounds: int) -> None:
    """Rows with a lognormal mix of lengths into bins of 16k tokens."""
    random = np.random.default_rng(0)
    count = 100 if quick else 10_000
    lengths = np.clip(random.lognormal(7.0, 1.0, count), 1, 16_384).astype(int).tolist()
    row = report.compare(
        "Packing",
        f"bins for {count:,} rows",
        timed(lambda: pack(lengths, 16_384, multiple=4)),
        rounds=min(rounds, 5),
    )
    report.add(row, Goal("200 ms", row.ours.median, 200.0))
    bins = pack(lengths, 16_384, multiple=4)
    padding = 100 * (1 - sum(lengths) / (16_384 * len(bins)))
    report.add(figure("Packing", "  padding", "%", [padding]), Goal("3 %", padding, 3.0))
