"""From a step's prompt groups to its plans and its record.

Guarantees: pure, but for `shared_tokens`; the layout that the log-probability pass runs and the one
that trains are the same, whatever was filtered in between; metric names are those of the metrics
reference.
"""

import time
from collections.abc import Mapping, Sequence

from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.controller.collect import StepGroups
from megatron_forest_trainer.controller.rollouts import Group
from megatron_forest_trainer.controller.run_dir import version_step
from megatron_forest_trainer.core.batch import (
    AdvantageRules,
    Batch,
    Outcome,
    PromptGroup,
    batch_metrics,
    plan_batch,
)
from megatron_forest_trainer.core.metrics import TokenErrors, error_metrics, rollout_metrics
from megatron_forest_trainer.core.plan import BatchShape, FixedShape, ForestShape, PackedShape
from megatron_forest_trainer.core.tree import SharedPrefixes, shared_prefixes
from megatron_forest_trainer.core.types import DeltaReader
from megatron_forest_trainer.learner import StepStats
from megatron_forest_trainer.logging_.records import Value

ENVIRONMENT_MASK = "environment_mask"
"""Key of a harness result: true keeps the rollout out of the loss; its reward still votes."""


def batch_shape(config: Config, *, data_parallel: int, slot_multiple: int) -> BatchShape:
    """How the configuration forms microbatches over `data_parallel` ranks.

    `slot_multiple` is the number of tokens that a row's slot is a multiple of.
    """
    policy = config.policy
    if policy.forest_execution.enabled:
        return ForestShape(
            data_parallel=data_parallel,
            max_tokens=config.forest_bin_tokens,
            across_rollouts=policy.forest_execution.merge_across_rollouts,
            routed=policy.router_replay.enabled,
            align=slot_multiple,
        )
    if policy.sequence_packing.enabled:
        return PackedShape(
            data_parallel=data_parallel,
            train_tokens=config.train_mb_tokens,
            logprob_tokens=config.logprob_mb_tokens,
            align=slot_multiple,
        )
    return FixedShape(
        data_parallel=data_parallel,
        train_micro_batch=policy.train_micro_batch_size,
        logprob_micro_batch=policy.logprob_batch_size,
    )


def advantage_rules(config: Config) -> AdvantageRules:
    """Section `grpo` as rules of the core."""
    grpo = config.grpo
    return AdvantageRules(
        generations_per_prompt=grpo.num_generations_per_prompt,
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        clip_low=grpo.advantage_clip_low,
        clip_high=grpo.advantage_clip_high,
        overlong_filtering=grpo.overlong_filtering,
        logprob_error_threshold=grpo.seq_logprob_error_threshold,
        masked_reward_policy=grpo.masked_reward_policy,
    )


def prompt_groups(groups: Sequence[Group]) -> tuple[PromptGroup, ...]:
    """The groups as the core sees them."""
    return tuple(
        PromptGroup(
            group_id=group.request.group_id,
            outcomes=tuple(
                Outcome(
                    rollout=rollout.finalized,
                    reward=rollout.reward,
                    environment_mask=rollout.result.get(ENVIRONMENT_MASK) is True,
                )
                for rollout in group.rollouts
            ),
        )
        for group in groups
    )


def plan(
    step: int,
    groups: Sequence[PromptGroup],
    config: Config,
    shape: BatchShape,
    row_errors: Mapping[str, TokenErrors] | None = None,
    shared: SharedPrefixes | None = None,
) -> Batch:
    """The step's plan: without `row_errors` for the log-probability pass, with them to train.

    `shared` is what `shared_tokens` found. Raises `NoRetainedTokens` where nothing trains.
    """
    return plan_batch(
        step, groups, advantage_rules(config), shape, row_errors=row_errors, shared=shared
    )


def shared_tokens(
    groups: Sequence[PromptGroup], shape: BatchShape, reader: DeltaReader
) -> SharedPrefixes | None:
    """What the step's rows share, where the shape needs it. Blocking: reads their tokens."""
    if not isinstance(shape, ForestShape):
        return None
    rows = [row for group in groups for outcome in group.outcomes for row in outcome.rollout.rows]
    return shared_prefixes(rows, reader, across_rollouts=shape.across_rollouts, routed=shape.routed)


def staleness(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """How many optimizer steps behind the trained weights the generating ones were.

    Mean over the selected generated tokens, and the largest; empty where no weight version is
    one of this run's.
    """
    lags: list[tuple[int, int]] = []
    for group in groups:
        for rollout in group.rollouts:
            selected = set(rollout.finalized.selected)
            for call in rollout.receipt.calls:
                if call.call_id not in selected:
                    continue
                for span in call.weight_spans:
                    made_by = version_step(span.version)
                    if made_by is not None:
                        lags.append((step - 1 - made_by, span.end - span.start))
    tokens = sum(count for _, count in lags)
    if not tokens:
        return {}
    return {
        "staleness/mean": sum(lag * count for lag, count in lags) / tokens,
        "staleness/max": float(max(lag for lag, _ in lags)),
    }


def step_record(
    step: int,
    *,
    weight_version: str,
    collected: StepGroups,
    groups: Sequence[PromptGroup],
    batch: Batch,
    row_errors: Mapping[str, TokenErrors],
    stats: StepStats,
    replayed: bool,
    rollout_s: float,
    train_s: float,
    step_s: float,
) -> dict[str, Value]:
    """The step's record.

    Times are seconds of wall clock; `step_s` is the whole step. `replayed`: captured routes were
    replayed.
    """
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    finalized = [outcome.rollout for outcome in outcomes]
    rewards = [outcome.reward for outcome in outcomes]
    metrics = {
        **rollout_metrics(finalized, rewards, replayed=replayed),
        **batch_metrics(groups, batch),
        **error_metrics(list(row_errors.values())),
    }
    generated = sum(rollout.generated_tokens for rollout in finalized)
    return {
        "step": step,
        "time": time.time(),
        "weight_version": weight_version,
        **metrics,
        **staleness(step, collected.groups),
        "dropped_prompt_groups": collected.lost,
        "replaced_prompt_groups": collected.replacements,
        **{
            f"dropped_prompt_groups/{reason}": count
            for reason, count in collected.dropped_by_reason().items()
        },
        "loss": stats.loss,
        "kl": stats.kl,
        "entropy": stats.entropy,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "probability_ratio": stats.probability_ratio,
        "clipped_fraction": stats.clipped_fraction,
        "importance_weight": stats.importance_weight,
        "excluded_tokens": stats.excluded_tokens,
        "tokens_per_second": generated / step_s if step_s > 0 else 0.0,
        "rollout_seconds": rollout_s,
        "train_seconds": train_s,
        "step_seconds": step_s,
    }
