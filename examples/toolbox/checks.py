"""What a run must show to count as a success.

Guarantees: pure; every failed check is a sentence with the figure that was found.
"""

from collections.abc import Sequence
from typing import Any

STEPS = 10
MAX_GEN_KL_ERROR = 0.05
MAX_TOKEN_MULT_PROB_ERROR = 1.05


def failed_checks(records: Sequence[dict[str, Any]]) -> list[str]:
    """One line per failed check of a run's step records; empty for a good run."""
    if len(records) < STEPS:
        return [f"{len(records)} step records, at least {STEPS} are required"]
    failed = []
    if not any(r["valid_rows"] > r["logical_rollouts"] for r in records):
        failed.append("no step has more rows than rollouts: no context was rewritten")
    rewards = [r["reward/mean"] for r in records]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    if max(rewards) <= 0:
        failed.append("no reward is positive")
    if last <= first:
        failed.append(
            f"mean reward of the last 3 steps {last:.3f} is not above the first {first:.3f}"
        )
    for name, limit in (
        ("gen_kl_error", MAX_GEN_KL_ERROR),
        ("token_mult_prob_error", MAX_TOKEN_MULT_PROB_ERROR),
    ):
        values = [r[name] for r in records]
        if any(value is None for value in values):
            failed.append(f"{name} is missing or not finite in a step")
        elif max(values) >= limit:
            failed.append(f"largest {name} is {max(values):.6f}, it must be below {limit}")
    return failed
