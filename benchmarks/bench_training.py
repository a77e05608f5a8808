"""Optimizer steps on the CPU: forest rows in packed bins beside fixed rows and one sample per call.

    OMP_NUM_THREADS=1 pytest benchmarks/bench_training.py --benchmark-only

A step is the log-probability pass, the training pass and the optimizer. Every way trains the same
generated tokens, so what is compared is how many of them a second trains.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.padding import pad_groups
from megatron_forest_trainer.core.plan import (
    BatchShape,
    FixedShape,
    PackedShape,
    PlannedRow,
    StepPlan,
    plan_step,
)
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import RowPlan
from megatron_forest_trainer.data.collate import Collator, RowInput
from megatron_forest_trainer.loss.vocab_parallel import edge_logprobs
from megatron_forest_trainer.testing import cpu

from benchmarks.conftest import Report, timed
from benchmarks.figures import Goal, figure
from tests.trainer.megatron import support

VOCABULARY = 2048
BIN = 2048
"""Tokens of a packed bin."""
ROLLOUTS = 8
PACKED = PackedShape(data_parallel=1, train_tokens=BIN, logprob_tokens=BIN)
FIXED = FixedShape(data_parallel=1, train_micro_batch=4, logprob_micro_batch=4)

Calls = list[tuple[str, str | None, int, int]]


def compaction(random: np.random.Generator) -> Calls:
    """The context is rewritten every few calls: three rows, nothing shared between them."""
    calls: Calls = []
    for _ in range(3):
        parent = None
        for _ in range(int(random.integers(2, 6))):
            name = f"c{len(calls)}"
            prompt = int(random.integers(30, 90)) + (120 if parent is None else 0)
            calls.append((name, parent, prompt, int(random.integers(12, 36))))
            parent = name
    return calls


def branching(random: np.random.Generator) -> Calls:
    """A long prompt, one call, and four continuations of it that each go on for two calls."""
    calls: Calls = [("root", None, int(random.integers(150, 250)), 24)]
    for branch in range(4):
        parent = "root"
        for step in range(2):
            name = f"b{branch}{step}"
            calls.append((name, parent, int(random.integers(20, 60)), int(random.integers(12, 36))))
            parent = name
    return calls


FORESTS = {"compaction": compaction, "branching": branching}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "forest" in metafunc.fixturenames:
        metafunc.parametrize("forest", FORESTS)


@pytest.fixture(scope="session")
def rounds(quick: bool) -> int:
    return 2 if quick else 9


@pytest.fixture(scope="session")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    logging.disable(logging.WARNING)
    cpu.enable()
    from megatron_forest_trainer.learner import Learner

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("megatron") / "model"
    support.tiny_checkpoint(directory, vocab=VOCABULARY)
    yield Learner(support.make_config(), directory)
    logging.disable(logging.NOTSET)


def rollouts(forest: str) -> list[support.Rollout]:
    """The step's rollouts, all in one prompt group."""
    random = np.random.default_rng(0)
    return [
        support.random_rollout(f"r{number}", FORESTS[forest](random), seed=number)
        for number in range(ROLLOUTS)
    ]


def _forest_rows(rollout: support.Rollout) -> Sequence[RowPlan]:
    return build_rows(rollout.records, group_id=rollout.group_id, rollout_id=rollout.rollout_id)


def _call_rows(rollout: support.Rollout) -> Iterator[RowPlan]:
    """One sample per call: its whole context, loss on its own generation."""
    by_id = {record.call_id: record for record in rollout.records}
    for record in rollout.records:
        path = [record]
        while path[0].parent_call_id is not None:
            path.insert(0, by_id[path[0].parent_call_id])
        (row,) = build_rows(path, group_id=rollout.group_id, rollout_id=rollout.rollout_id)
        spans = tuple(
            msgspec.structs.replace(span, owned=span.call_id == record.call_id)
            for span in row.spans
        )
        row_id = f"{row.group_id}/{row.rollout_id}/{record.call_id}"
        yield msgspec.structs.replace(row, row_id=row_id, spans=spans)


def _step(made: Sequence[support.Rollout], shape: BatchShape, *, per_call: bool) -> StepPlan:
    rows = [
        PlannedRow(row_id=row.row_id, plan=row, advantage=1.0, train=True)
        for rollout in made
        for row in (_call_rows(rollout) if per_call else _forest_rows(rollout))
    ]
    return plan_step(0, pad_groups([("g0", rows)], shape.row_multiple), shape)


def _filled(plan: StepPlan) -> float:
    """Percent of the training pass's positions that hold a token."""
    run = 0
    for microbatch in plan.train[0]:
        lengths = [plan.rows[index].length for index in microbatch]
        run += max(lengths) * len(lengths) if plan.mode == "fixed" else sum(lengths)
    return 100 * _tokens(plan) / run


def _tokens(plan: StepPlan) -> int:
    return sum(row.length for row in plan.rows if row.plan is not None)


def test_step(report: Report, learner: Any, forest: str, rounds: int) -> None:
    made = rollouts(forest)
    deltas = {key: delta for rollout in made for key, delta in rollout.deltas.items()}
    reader = support.MemoryReader(deltas)
    packed = _step(made, PACKED, per_call=False)
    fixed = _step(made, FIXED, per_call=False)
    per_call = _step(made, PACKED, per_call=True)
    assert packed.retained_tokens == fixed.retained_tokens == per_call.retained_tokens

    def rate(plan: StepPlan) -> Any:
        def train() -> None:
            learner.logprobs(plan, reader)
            learner.train_step(plan, reader)

        work = timed(train)
        return lambda: plan.retained_tokens / work()

    section = "Training steps"
    report.add(
        report.compare(
            section,
            f"{forest}: {packed.retained_tokens:,} generated of {_tokens(packed):,} row tokens",
            rate(packed),
            unit="trained tokens/s",
            peers={
                "fixed rows, 4 per microbatch": rate(fixed),
                "one sample per call, packed": rate(per_call),
            },
            rounds=rounds,
            warmup=1,
            headline=f"optimizer step, {forest} forests",
        )
    )
    unique = sum(record.delta_len for rollout in made for record in rollout.records)
    plans = {
        "fixed rows, 4 per microbatch": fixed,
        "one sample per call, packed": per_call,
    }
    for case, unit, of in (
        ("  positions that hold a token", "%", _filled),
        ("  unique tokens of those run", "%", lambda plan: 100 * unique / _tokens(plan)),
    ):
        peers = {name: [of(plan)] for name, plan in plans.items()}
        report.add(figure(section, case, unit, [of(packed)], peers=peers))


def test_selected_logits(report: Report, learner: Any, rounds: int) -> None:
    """Only positions with a loss are projected to the vocabulary."""
    made = rollouts("compaction")
    deltas = {key: delta for rollout in made for key, delta in rollout.deltas.items()}
    reader, plan = support.MemoryReader(deltas), _step(made, PACKED, per_call=False)
    selector = learner._passes._selector
    layer = selector._layer

    def everywhere() -> float:
        selector._layer = None
        hooks, layer._forward_pre_hooks = layer._forward_pre_hooks, {}
        try:
            return timed(lambda: learner.logprobs(plan, reader))()
        finally:
            selector._layer, layer._forward_pre_hooks = layer, hooks

    row = report.compare(
        "Parts of a step",
        "log-probability pass",
        timed(lambda: learner.logprobs(plan, reader)),
        peers={"projecting every token": everywhere},
        rounds=rounds,
    )
    report.add(row, Goal("0.9 of it", row.other("projecting every token").ratio, 0.9))


def test_collation(report: Report, rounds: int) -> None:
    """Rows into tensors."""
    made = rollouts("compaction")
    deltas = {key: delta for rollout in made for key, delta in rollout.deltas.items()}
    reader = support.MemoryReader(deltas)
    rows = [
        RowInput(assemble(row, reader), trains=True)
        for rollout in made
        for row in _forest_rows(rollout)
    ]
    tokens = sum(row.length for row in rows)
    bins = torch.zeros(2, tokens, dtype=torch.long)
    row = report.compare(
        "Parts of a step",
        f"collating {tokens:,} tokens into one bin",
        timed(lambda: Collator(packed=True)(rows, training=True)),
        limits={"copy of ids and positions": timed(bins.clone)},
        rounds=5 * rounds,
    )
    report.add(row, Goal("1 us per token", 1e3 * row.ours.median / tokens, 1.0))


def test_sampled_logprobs(report: Report, quick: bool, rounds: int) -> None:
    """Log-probabilities of the sampled distribution, with their gradient."""
    generator = torch.Generator().manual_seed(0)
    count, vocabulary = (64, 1_000) if quick else (1024, 32_000)
    logits = torch.randn(count, vocabulary, generator=generator)
    target = torch.randint(0, vocabulary, (count,), generator=generator)
    ones, zeros = torch.ones(count), torch.zeros(count, dtype=torch.long)

    def ours() -> None:
        leaf = logits.detach().requires_grad_()
        edge_logprobs(
            leaf, target, temperature_E=ones, top_p_E=ones, top_k_E=zeros,
            vocab_size=vocabulary, group=None,
        )[0].sum().backward()  # fmt: skip

    def plain() -> None:
        leaf = logits.detach().requires_grad_()
        torch.log_softmax(leaf, 1).gather(1, target[:, None]).sum().backward()

    row = report.compare(
        "Parts of a step",
        f"log-probabilities of {count} targets, {vocabulary:,} words",
        timed(ours),
        peers={"torch log_softmax": timed(plain)},
        rounds=rounds,
    )
    report.add(row, Goal("3 of log_softmax", row.other("torch log_softmax").ratio, 3.0))
