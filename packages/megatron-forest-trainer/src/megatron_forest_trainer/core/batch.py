"""From finalised prompt groups to the plan of an optimizer step.

Guarantees: advantages are computed per whole prompt group and broadcast to every row of their
rollout; all rows of a rollout are in the same step; a rollout that does not train keeps its rows in
the plan (they still run) with advantage 0. A step that trains nothing raises before anything runs.
"""

from collections.abc import Mapping, Sequence

import msgspec
from forest_schema import Reason

from megatron_forest_trainer.core.advantages import check_complete_group, group_advantages
from megatron_forest_trainer.core.filters import Decision, decide
from megatron_forest_trainer.core.metrics import TokenErrors, pool
from megatron_forest_trainer.core.padding import pad_groups
from megatron_forest_trainer.core.plan import BatchShape, PlannedRow, StepPlan, plan_step
from megatron_forest_trainer.core.tree import SharedPrefixes
from megatron_forest_trainer.core.types import Finalized


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A logical rollout with its reward."""

    rollout: Finalized
    reward: float
    environment_mask: bool = False
    """The environment asked to leave this rollout out of the loss."""


class PromptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All rollouts of one prompt."""

    group_id: str
    outcomes: tuple[Outcome, ...]


class AdvantageRules(msgspec.Struct, frozen=True, kw_only=True):
    """How rewards become advantages (configuration section `grpo`)."""

    generations_per_prompt: int
    leave_one_out: bool = True
    normalize: bool = True
    clip_low: float | None = None
    clip_high: float | None = None
    overlong_filtering: bool = False
    logprob_error_threshold: float | None = None
    masked_reward_policy: str = "include"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A step's plan with what was decided about every rollout."""

    plan: StepPlan
    decisions: Mapping[str, Decision]
    """By `{group_id}/{rollout_id}`."""
    advantages: Mapping[str, float]
    """By `{group_id}/{rollout_id}`."""


def plan_batch(
    step: int,
    groups: Sequence[PromptGroup],
    rules: AdvantageRules,
    shape: BatchShape,
    *,
    row_errors: Mapping[str, TokenErrors] | None = None,
    shared: SharedPrefixes | None = None,
) -> Batch:
    """Decide about every rollout and lay out the step.

    `row_errors` (row id -> errors against the engine) is known after the log-probability pass;
    the layout does not depend on it, so a plan made without it runs that pass. `shared` is what
    the rows share; a forest needs it. Raises `NoRetainedTokens` where nothing trains and
    `ValueError` for an incomplete group.
    """
    decisions: dict[str, Decision] = {}
    advantages: dict[str, float] = {}
    planned: list[tuple[str, list[PlannedRow]]] = []
    for group in groups:
        ids = [outcome.rollout.rollout_id for outcome in group.outcomes]
        check_complete_group(ids, rules.generations_per_prompt, group_id=group.group_id)
        group_decisions = [_decide(outcome, rules, row_errors) for outcome in group.outcomes]
        values = group_advantages(
            [outcome.reward for outcome in group.outcomes],
            [decision.votes for decision in group_decisions],
            retained=[decision.trains for decision in group_decisions],
            leave_one_out=rules.leave_one_out,
            normalize=rules.normalize,
            clip_low=rules.clip_low,
            clip_high=rules.clip_high,
        )
        rows: list[PlannedRow] = []
        for outcome, decision, value in zip(
            group.outcomes, group_decisions, values.tolist(), strict=True
        ):
            key = f"{group.group_id}/{outcome.rollout.rollout_id}"
            decisions[key], advantages[key] = decision, value
            rows += (
                PlannedRow(row_id=row.row_id, plan=row, advantage=value, train=decision.trains)
                for row in outcome.rollout.rows
            )
        planned.append((group.group_id, rows))
    plan = plan_step(step, pad_groups(planned, shape.row_multiple), shape, shared)
    return Batch(plan=plan, decisions=decisions, advantages=advantages)


def _decide(
    outcome: Outcome, rules: AdvantageRules, row_errors: Mapping[str, TokenErrors] | None
) -> Decision:
    error = None
    if row_errors is not None and outcome.rollout.rows:
        error = pool(row_errors[row.row_id] for row in outcome.rollout.rows).mult_prob_error
    return decide(
        outcome.rollout,
        environment_mask=outcome.environment_mask,
        overlong_filtering=rules.overlong_filtering,
        logprob_error=error,
        logprob_error_threshold=rules.logprob_error_threshold,
        masked_reward_policy="exclude" if rules.masked_reward_policy == "exclude" else "include",
    )


def batch_metrics(groups: Sequence[PromptGroup], batch: Batch) -> dict[str, float]:
    """Counts of a step: rows by their kind, and rollouts by what was decided."""
    rows = batch.plan.rows
    by_reason = [
        (outcome, batch.decisions[f"{group.group_id}/{outcome.rollout.rollout_id}"].reason)
        for group in groups
        for outcome in group.outcomes
    ]
    masked = [
        outcome for outcome, reason in by_reason if reason is Reason.LOGPROB_ERROR_ABOVE_THRESHOLD
    ]
    return {
        "valid_rows": float(sum(row.train for row in rows)),
        "padding_rows": float(sum(row.plan is None for row in rows)),
        "retained_tokens": float(batch.plan.retained_tokens),
        "executed_tokens": float(batch.plan.executed_tokens),
        "environment_filtered": float(sum(outcome.environment_mask for outcome, _ in by_reason)),
        "overlong_filtered": float(sum(reason is Reason.OVERLONG for _, reason in by_reason)),
        "num_masked_sequences": float(sum(len(outcome.rollout.rows) for outcome in masked)),
        "masked_correct_pct": (
            sum(outcome.reward == 1 for outcome in masked) / len(masked) if masked else 0.0
        ),
    }
