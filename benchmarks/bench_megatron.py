"""Speed of the learner on the CPU: forest rows, packed bins, and logits of loss positions only.

    OMP_NUM_THREADS=1 python benchmarks/bench_megatron.py

A step of 8 rollouts in the shape of an agent with rewritten context: long prompts, short
generations, several rows per rollout. Prints the best time of each part and exits 1 when a goal is
missed.
"""

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron_forest_trainer.testing import cpu  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
cpu.enable()

from megatron_forest_trainer.core.plan import BatchShape, FixedShape, PackedShape  # noqa: E402
from megatron_forest_trainer.data.collate import Collator, RowInput  # noqa: E402
from megatron_forest_trainer.learner import Learner  # noqa: E402
from megatron_forest_trainer.loss.vocab_parallel import edge_logprobs  # noqa: E402

from tests.trainer.megatron import support  # noqa: E402

VOCABULARY = 2048
ROUNDS = 3
"""Context rewrites of a rollout: rows per rollout."""


def best(function: Callable[[], object], repeats: int = 5) -> float:
    """Shortest wall time in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def agent_step(shape: BatchShape) -> support.Step:
    """8 rollouts of 12 calls: prompts of 180 tokens, generations of 24, a root every 4 calls."""
    calls: list[tuple[str, str | None, int, int]] = []
    for number in range(4 * ROUNDS):
        parent = None if number % 4 == 0 else f"c{number - 1}"
        calls.append((f"c{number}", parent, 180 if parent is None else 60, 24))
    rollouts = [support.random_rollout(f"r{n}", calls, seed=n) for n in range(8)]
    advantages = {rollout.rollout_id: 1.0 for rollout in rollouts}
    return support.make_step(rollouts, advantages, shape)


def main() -> int:
    """Run every measurement."""
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp()) / "model"
    support.VOCAB = VOCABULARY
    support.tiny_checkpoint(directory, vocab=VOCABULARY)
    learner = Learner(support.make_config(), directory)
    shapes: dict[str, BatchShape] = {
        "fixed rows, 1 per microbatch": FixedShape(
            data_parallel=1, train_micro_batch=1, logprob_micro_batch=1
        ),
        "fixed rows, 4 per microbatch": FixedShape(
            data_parallel=1, train_micro_batch=4, logprob_micro_batch=4
        ),
        "packed bins of 4096 tokens": PackedShape(
            data_parallel=1, train_tokens=4096, logprob_tokens=4096
        ),
    }
    missed = False
    for name, shape in shapes.items():
        step = agent_step(shape)
        plan = step.decoded
        tokens = sum(row.length for row in plan.rows)
        owned = plan.retained_tokens
        logprob = best(lambda: learner.logprobs(plan, step.reader))  # noqa: B023

        def train() -> None:
            learner.logprobs(plan, step.reader)  # noqa: B023
            learner.train_step(plan, step.reader)  # noqa: B023

        both = best(train)
        print(
            f"{name}: log-probabilities {1e3 * logprob:.0f} ms, step {1e3 * (both - logprob):.0f} "
            f"ms, {tokens / both:.0f} row tokens/s ({owned} of {tokens} tokens have a loss)"
        )
    missed |= not selected_logits(learner)
    missed |= not collation()
    missed |= not sampled_logprobs()
    return int(missed)


def goal(name: str, value: float, limit: float, unit: str) -> bool:
    """Print one measurement and whether it stays below its limit."""
    met = value <= limit
    print(f"{name}: {value:.2f} {unit} (goal {limit:g}){'' if met else '  MISSED'}")
    return met


def selected_logits(learner: Any) -> bool:
    """Projecting only the positions with a loss must pay."""
    step = agent_step(FixedShape(data_parallel=1, train_micro_batch=4, logprob_micro_batch=4))
    plan = step.decoded
    selected = best(lambda: learner.logprobs(plan, step.reader))
    selector = learner._passes._selector
    hook = selector._select
    layer, selector._layer = selector._layer, None
    layer._forward_pre_hooks.clear()
    everywhere = best(lambda: learner.logprobs(plan, step.reader))
    selector._layer = layer
    layer.register_forward_pre_hook(hook)
    name = "log-probability pass against projecting every token"
    return goal(name, selected / everywhere, 0.9, "x")


def collation() -> bool:
    """Turning rows into tensors must be small beside running them."""
    from megatron_forest_trainer.core.rows import assemble

    step = agent_step(PackedShape(data_parallel=1, train_tokens=8192, logprob_tokens=8192))
    rows = [
        RowInput(assemble(row.plan, step.reader), trains=True)
        for row in step.decoded.rows
        if row.plan is not None
    ]
    tokens = sum(row.length for row in rows)
    seconds = best(lambda: Collator(packed=True)(rows, training=True))
    return goal("collating one packed bin", 1e6 * seconds / tokens, 1.0, "us per token")


def sampled_logprobs() -> bool:
    """The sampled distribution's log-probabilities against a plain log-softmax."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1024, 32_000, generator=generator)
    target = torch.randint(0, 32_000, (1024,), generator=generator)
    ones, zeros = torch.ones(1024), torch.zeros(1024, dtype=torch.long)

    def ours() -> None:
        leaf = logits.detach().requires_grad_()
        edge_logprobs(
            leaf, target, temperature_E=ones, top_p_E=ones, top_k_E=zeros,
            vocab_size=32_000, group=None,
        )[0].sum().backward()  # fmt: skip

    def plain() -> None:
        leaf = logits.detach().requires_grad_()
        torch.log_softmax(leaf, 1).gather(1, target[:, None]).sum().backward()

    return goal("sampled log-probabilities against log_softmax", best(ours) / best(plain), 3.0, "x")


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
