"""Advantages of logical rollouts.

Guarantees (asserted by the tests): one advantage per rollout, computed from whole prompt groups
only, so that any split of a batch into groups gives the same numbers; rows and padding never vote;
a rollout that does not train has advantage 0, whatever the clipping interval. The formulas are in
`docs/formulas.md`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""

ROUNDING = 1e-12
"""Rewards that differ by less than this part of the largest one are equal: a deviation that is
only rounding would blow an advantage up to 1 / `EPSILON` times its size."""


def group_advantages(
    rewards: ArrayLike,
    votes: ArrayLike,
    *,
    retained: ArrayLike | None = None,
    leave_one_out: bool = True,
    normalize: bool = True,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> NDArray[np.float64]:
    """Advantages `[n]` of the n rollouts of one prompt group.

    `votes` says whose reward is in the baseline; `retained` who trains (by default, who votes).
    With fewer than two votes every advantage is 0 before clipping. Raises `ValueError` for a
    reward that is not finite.
    """
    rewards_n = np.asarray(rewards, dtype=np.float64)
    votes_n = np.asarray(votes, dtype=np.bool_)
    retained_n = votes_n if retained is None else np.asarray(retained, dtype=np.bool_)
    if not rewards_n.shape == votes_n.shape == retained_n.shape or rewards_n.ndim != 1:
        raise ValueError(
            f"rewards {rewards_n.shape}, votes {votes_n.shape} and retained {retained_n.shape} "
            "must be vectors of one length"
        )
    if not np.isfinite(rewards_n[votes_n | retained_n]).all():
        raise ValueError(f"a reward is not finite: {rewards_n.tolist()}")
    if votes_n.sum() <= 1:
        advantages_n = np.zeros_like(rewards_n)
    else:
        # Only differences matter; measured from a reward, equal rewards give exactly 0.
        shifted_n = np.where(votes_n | retained_n, rewards_n, 0.0) - rewards_n[votes_n][0]
        rounding = ROUNDING * float(np.abs(rewards_n[votes_n]).max())
        advantages_n = _unclipped(shifted_n, votes_n, leave_one_out, normalize, rounding)
    low = -np.inf if clip_low is None else clip_low
    high = np.inf if clip_high is None else clip_high
    return np.where(retained_n, np.clip(advantages_n, low, high), 0.0)


def _unclipped(
    rewards_n: NDArray[np.float64],
    votes_n: NDArray[np.bool_],
    leave_one_out: bool,
    normalize: bool,
    rounding: float,
) -> NDArray[np.float64]:
    """Reward minus baseline, over the deviation where there is one; at least two votes.

    Rewards at most `rounding` apart have none.
    """
    weights_nn = np.tile(votes_n.astype(np.float64), (len(votes_n), 1))
    if leave_one_out:
        np.fill_diagonal(weights_nn, 0.0)
    count_n = weights_nn.sum(axis=1)
    baseline_n = weights_nn @ rewards_n / count_n
    advantages_n = rewards_n - baseline_n
    if not normalize:
        return advantages_n
    squares_n = (weights_nn * (rewards_n[None, :] - baseline_n[:, None]) ** 2).sum(axis=1)
    # A baseline of one reward has no deviation: 0, so that the advantage stays as it is.
    deviation_n = np.sqrt(squares_n / np.maximum(count_n - 1.0, 1.0))
    counted_nn = weights_nn > 0
    highest_n = np.where(counted_nn, rewards_n, -np.inf).max(axis=1)
    lowest_n = np.where(counted_nn, rewards_n, np.inf).min(axis=1)
    deviates_n = highest_n - lowest_n > rounding
    return np.where(deviates_n, advantages_n / (deviation_n + EPSILON), advantages_n)


def check_complete_group(rollout_ids: Sequence[str], expected: int, *, group_id: str) -> None:
    """All siblings of a prompt group are present, each once. Raises `ValueError`."""
    if len(set(rollout_ids)) != len(rollout_ids):
        raise ValueError(f"group {group_id}: a rollout is present twice")
    if len(rollout_ids) != expected:
        raise ValueError(
            f"group {group_id} has {len(rollout_ids)} of {expected} rollouts; advantages need "
            "whole prompt groups"
        )
