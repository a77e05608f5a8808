"""Optimizer steps on the CPU: the forest in one pass beside the same rows, fixed and packed.

    OMP_NUM_THREADS=1 pytest benchmarks/bench_forest.py --benchmark-only

A step is the log-probability pass, the training pass and the optimizer. The ideal gain is the rows'
tokens divided by the distinct ones; attention, which grows with the context, and the vocabulary
projection, which every way does for the same positions, keep a step below it.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_forest_trainer.core.plan import BatchShape, FixedShape, ForestShape, PackedShape
from megatron_forest_trainer.core.tree import build_tree, trie_order
from megatron_forest_trainer.core.tree_plan import plan_bins
from megatron_forest_trainer.testing import cpu

from benchmarks.conftest import Report, timed
from benchmarks.figures import Goal
from tests.trainer.megatron import support

SECTION = "Forest in one pass"
BIN = 16_384
ROWS: dict[str, BatchShape] = {
    "fixed rows, 1 per microbatch": FixedShape(
        data_parallel=1, train_micro_batch=1, logprob_micro_batch=1
    ),
    "fixed rows, 4 per microbatch": FixedShape(
        data_parallel=1, train_micro_batch=4, logprob_micro_batch=4
    ),
    "packed bins": PackedShape(data_parallel=1, train_tokens=BIN, logprob_tokens=BIN),
}
FOREST = ForestShape(data_parallel=1, max_tokens=BIN, across_rollouts=True)


@pytest.fixture(scope="session")
def rounds(quick: bool) -> int:
    return 1 if quick else 3


def checkpoint(directory: Path, hidden: int) -> Path:
    """A random two-layer Qwen3 of the given width."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=BIN,
        rope_theta=1e6,
        tie_word_embeddings=False,
        attention_bias=False,
        dtype="float32",
    )
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="session")
def learner(tmp_path_factory: pytest.TempPathFactory, quick: bool) -> Iterator[Any]:
    logging.disable(logging.WARNING)
    cpu.enable()
    from megatron_forest_trainer.learner import Learner

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("forest") / "model"
    config = support.make_config(policy__forest_execution__enabled=True)
    yield Learner(config, checkpoint(directory, 64 if quick else 512))
    logging.disable(logging.NOTSET)


def branches(scale: int) -> list[support.Rollout]:
    """Eight branches of 128 tokens on a prefix of 1,024."""
    calls = [("root", None, 1000 // scale, 24)]
    calls += [(f"b{number}", "root", 28, 100 // scale) for number in range(8)]
    return [support.random_rollout("r0", calls, seed=0)]


def group(scale: int) -> list[support.Rollout]:
    """Eight rollouts of one prompt of 768 tokens, with 256 of their own each."""
    prompt = np.random.default_rng(0).integers(0, support.VOCAB, 768 // scale)
    rollouts = []
    for number in range(8):
        own = np.random.default_rng(number).integers(0, support.VOCAB, 256 // scale)
        rollout = support.Rollout(f"r{number}")
        rollout.call("a", None, prompt, own, np.full(len(own), -4.0))
        rollouts.append(rollout)
    return rollouts


def nothing(scale: int) -> list[support.Rollout]:
    """Four rows of 512 tokens without a common one."""
    calls = [("a", None, 412 // scale, 100 // scale)]
    return [support.random_rollout(f"r{number}", calls, seed=number) for number in range(4)]


CASES = {
    "8 branches of 128 tokens on 1,024": (branches, 0.85),
    "8 rollouts of 256 tokens on a prompt of 768": (group, None),
    "4 rows of 512 tokens, nothing shared": (nothing, 0.97),
}
"""Name -> (rollouts, goal as a fraction of the ideal gain)."""


@pytest.mark.parametrize("case", CASES)
def test_step(report: Report, learner: Any, case: str, rounds: int, quick: bool) -> None:
    make, fraction = CASES[case]
    rollouts = make(4 if quick else 1)
    advantages = {rollout.rollout_id: 1.0 for rollout in rollouts}

    def rate(shape: BatchShape) -> Any:
        step = support.make_step(rollouts, advantages, shape)
        plan = step.decoded

        def train() -> None:
            learner.logprobs(plan, step.reader)
            learner.train_step(plan, step.reader)

        # One thread's CPU time: what other processes take from the machine is not in it.
        work = timed(train, time.process_time)
        return lambda: plan.retained_tokens / work()

    plan = support.make_step(rollouts, advantages, FOREST).decoded
    tokens = sum(row.length for row in plan.rows)
    ideal = tokens / plan.executed_tokens
    row = report.compare(
        SECTION,
        f"{case}: {plan.executed_tokens:,} of {tokens:,} row tokens run",
        rate(FOREST),
        unit="trained tokens/CPU s",
        peers={name: rate(shape) for name, shape in ROWS.items()},
        rounds=rounds,
        warmup=1,
        headline=f"optimizer step, {case}" if fraction else "",
    )
    gain = min(other.ratio for other in row.others)
    goals = [] if fraction is None else [
        Goal(f"{fraction} of {ideal:.2f}x over the faster", gain / ideal, fraction, at_least=True)
    ]  # fmt: skip
    report.add(row, *goals)


def test_layout(report: Report, quick: bool, rounds: int) -> None:
    """Trie, layout and bins of 200 rows of up to 100,000 tokens that share most of them."""
    longest = 1_000 if quick else 100_000
    trunk = np.random.default_rng(0).integers(0, 150_000, longest).astype(np.int32)
    rows = []
    for number in range(200):
        tokens = trunk[: longest // 200 * (number + 1)].copy()
        tokens[-longest // 1_000 :] = number
        rows.append(tokens)
    lengths = [len(tokens) for tokens in rows]

    def lay_out() -> None:
        trie = trie_order([row.view(np.uint8).reshape(-1, 4) for row in rows], [0] * len(rows))
        tree = build_tree(lengths, trie)
        assert len(tree.paths) == len(rows)
        assert len(tree.last_T) == tree.total
        in_order = [lengths[number] for number in trie.order]
        plan_bins(in_order, trie.shared, 2 * longest, ranks=8)

    row = report.compare(
        SECTION,
        f"trie and bins of 200 rows, {sum(lengths):,} row tokens",
        timed(lay_out),
        limits={"copy of the ids": timed(lambda: [tokens.copy() for tokens in rows])},
        rounds=5 * rounds,
    )
    report.add(row, Goal("1 s", row.ours.median, 1e3))
