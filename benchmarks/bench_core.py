"""Speed of the trainer's pure core and of reading shards, against their goals.

    python benchmarks/bench_core.py

Prints one line per measurement (the best of several repeats) and exits 1 when a goal is missed.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.packing import pack
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.selection import returned_history
from megatron_forest_trainer.finalize import finalize_rollout
from megatron_forest_trainer.store import FolderReader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.forests import Forest


def best(function: Callable[[], object], repeats: int = 15) -> float:
    """Shortest CPU time in seconds: nothing here waits, and other load does not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def rollout(folder: Path) -> tuple[Forest, dict[str, object]]:
    """200 tool calls with reasoning and 100,000 tokens; the context is rewritten every 20 calls."""
    forest, parent = Forest(partition="rollout"), None
    for number in range(200):
        function = {"name": "look", "arguments": f'{{"x": {number}}}'}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": None, "reasoning": "why " * 40}
        parent = forest.call(
            parent if number % 20 else None,
            prompt=300,
            generated=200,
            output=[message | {"tool_calls": calls}],
        )
    forest.write(folder)
    return forest, forest.result(*forest.calls)


def finalisation(folder: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds and their goal."""
    forest, result = rollout(folder)
    receipt = forest.receipt()

    def fresh(work: Callable[[FolderReader], object]) -> Callable[[], object]:
        """Every repeat opens the store again, so that no verification is remembered."""
        return lambda: work(FolderReader(folder))

    read = best(fresh(lambda reader: [reader.read(call.delta) for call in receipt.calls]))
    whole = best(fresh(lambda reader: finalize_rollout(receipt, result, reader)))
    select = best(lambda: returned_history(receipt.calls, result))
    build = best(lambda: build_rows(receipt.calls, group_id="g", rollout_id="r"))
    return {
        "finalise 200 calls, 100k tokens, beyond reading (ms)": ((whole - read) * 1e3, 5.0),
        "  of which selection (ms)": (select * 1e3, 5.0),
        "  of which forest (ms)": (build * 1e3, 5.0),
        "  reading and digests (ms)": (read * 1e3, float("inf")),
    }


def reading(folder: Path, calls_per_row: int, goal: float) -> dict[str, tuple[float, float]]:
    """Verified rows of 8,192 tokens against copying arrays of the same size.

    The goal for one delta per row is half the speed of the copy; more deltas cost about 2 us each.
    """
    forest = Forest(partition=f"rows{calls_per_row}")
    plans = []
    tokens = 8192 // calls_per_row
    for number in range(512):
        path = []
        for _ in range(calls_per_row):
            path.append(
                forest.call(path[-1] if path else None, prompt=tokens // 2, generated=tokens // 2)
            )
        plans += build_rows(path, group_id="g", rollout_id=f"r{number}")
    forest.write(folder)
    reader = FolderReader(folder)
    rows = [assemble(plan, reader) for plan in plans]
    size = sum(
        array.nbytes for row in rows for array in (row.tokens_T, row.logprobs_T, row.loss_mask_T)
    )
    copy = best(
        lambda: [
            array.copy()
            for row in rows
            for array in (row.tokens_T, row.logprobs_T, row.loss_mask_T)
        ]
    )
    read = best(lambda: [assemble(plan, reader) for plan in plans])
    what = f"read rows of 8k tokens, {calls_per_row} call(s) each"
    return {
        f"{what}: read time over copy time (x)": (read / copy, goal),
        f"  GB/s (memcpy {size / copy / 1e9:.1f})": (size / read / 1e9, float("inf")),
    }


def packing() -> dict[str, tuple[float, float]]:
    """10,000 rows with a lognormal length mix."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(7.0, 1.0, 10_000), 1, 16_384).astype(int).tolist()
    seconds = best(lambda: pack(lengths, 16_384, multiple=8), repeats=5)
    bins = pack(lengths, 16_384, multiple=8)
    return {
        "pack 10,000 rows (ms)": (seconds * 1e3, 200.0),
        "  padding (%)": (100 * (1 - sum(lengths) / (16_384 * len(bins))), 3.0),
    }


def main() -> int:
    """Print every figure with its goal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {
            **finalisation(folder),
            **packing(),
            **reading(folder, 1, 2.0),
            **reading(folder, 4, float("inf")),
        }
    missed = 0
    for what, (value, goal) in figures.items():
        missed += value > goal
        shown = "" if goal == float("inf") else f"goal <= {goal:g}{'  MISSED' * (value > goal)}"
        print(f"{what:68s} {value:9.3f}  {shown}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
