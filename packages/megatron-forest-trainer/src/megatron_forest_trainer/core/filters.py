"""Which rollouts train and which rewards vote.

Guarantees: every decision is about a whole logical rollout and independent of its number of rows;
a rollout without verified tokens neither trains nor votes; a filtered one keeps its vote once.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
from forest_schema import Reason

from megatron_forest_trainer.core.types import Finalized


class Decision(msgspec.Struct, frozen=True):
    """What becomes of a logical rollout in its step."""

    trains: bool
    """Its rows carry loss and its advantage."""
    votes: bool
    """Its reward is in the group's baseline, once."""
    reason: Reason | None = None
    """Why it does not train."""


def decide(
    rollout: Finalized,
    *,
    environment_mask: bool = False,
    overlong_filtering: bool = False,
    logprob_error: float | None = None,
    logprob_error_threshold: float | None = None,
    masked_reward_policy: Literal["include", "exclude"] = "include",
) -> Decision:
    """The decision about one rollout.

    `logprob_error` is the mean multiplicative probability error pooled over the rollout's owned
    tokens (None before it is known or without tokens); a value above the threshold masks, an equal
    one stays.
    """
    if rollout.reason is not None:
        return Decision(trains=False, votes=False, reason=rollout.reason)
    if (
        logprob_error is not None
        and logprob_error_threshold is not None
        # Written so that NaN masks.
        and not logprob_error <= logprob_error_threshold
    ):
        votes = masked_reward_policy == "include"
        return Decision(trains=False, votes=votes, reason=Reason.LOGPROB_ERROR_ABOVE_THRESHOLD)
    if environment_mask:
        return Decision(trains=False, votes=True, reason=Reason.ENVIRONMENT_MASK)
    if overlong_filtering and rollout.truncated:
        return Decision(trains=False, votes=True, reason=Reason.OVERLONG)
    return Decision(trains=True, votes=True)


def group_problem(group: Sequence[Finalized], min_valid_fraction: float | None) -> Reason | None:
    """Why a prompt group is discarded; None for a group that stays.

    A group without any row has no valid layout. Otherwise the fraction of verified rollouts, each
    counted once, is compared with the minimum (None disables it).
    """
    if not any(rollout.rows for rollout in group):
        return Reason.NO_VALID_LAYOUT
    verified = sum(rollout.verified for rollout in group)
    if min_valid_fraction is not None and verified < min_valid_fraction * len(group) - 1e-9:
        return Reason.BELOW_MIN_VALID_FRACTION
    return None


def step_floor(num_prompts: int, min_step_batch_fraction: float | None) -> int:
    """Fewest prompt groups that a step of `num_prompts` may train on, at least 1."""
    if min_step_batch_fraction is None:
        return 1
    return max(1, math.ceil(num_prompts * min_step_batch_fraction - 1e-9))
