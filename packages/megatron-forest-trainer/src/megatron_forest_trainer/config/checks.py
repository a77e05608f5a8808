"""The rules of the configuration that concern more than one key's type.

Guarantees: pure functions that return (key path, what to change) pairs; every rule that needs no
loaded model and no server is here, so that it fails before the first rollout.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_forest_trainer.config import policies
from megatron_forest_trainer.config.schema import Config

Finding = tuple[str, str]

RETIRED = {
    "token_capture.context_compaction": (
        "was renamed: set token_capture.forest_training: {value} and remove this key; the meaning "
        "of the value is unchanged"
    ),
}
"""Keys that are refused with a migration message; `{value}` is the value they had."""

_ONE_ADVANTAGE = "a logical rollout has one reward and one advantage"
_NOT_THE_LEARNER = "Megatron-Core is the only learner"

REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "token_capture.defer_routed_experts_to_policy": (
        False,
        "routes are assembled directly along a row's path",
    ),
    "policy.megatron_cfg.enabled": (True, _NOT_THE_LEARNER),
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size": (
        None,
        "the pipeline schedule is not interleaved",
    ),
    "policy.megatron_cfg.num_layers_per_virtual_pipeline_stage": (
        None,
        "the pipeline schedule is not interleaved",
    ),
    "policy.automodel_cfg.enabled": (False, _NOT_THE_LEARNER),
    "policy.dtensor_cfg.enabled": (False, _NOT_THE_LEARNER),
    "policy.dynamic_batching.enabled": (
        False,
        "use policy.sequence_packing.enabled for batches by token count",
    ),
    "grpo.calculate_advantages_on_gpu": (
        False,
        "advantages are computed once per logical rollout, by the controller",
    ),
    "grpo.invalid_tool_call_advantage": (None, _ONE_ADVANTAGE),
    "grpo.malformed_thinking_advantage": (None, _ONE_ADVANTAGE),
    "grpo.reward_shaping.enabled": (False, _ONE_ADVANTAGE),
    "grpo.reward_scaling.enabled": (False, _ONE_ADVANTAGE),
    "reward_penalties.penalize_duplicated_reasoning": (False, _ONE_ADVANTAGE),
    "reward_penalties.penalize_empty_final_answer": (False, _ONE_ADVANTAGE),
    "reward_penalties.penalize_unwanted_tokens": (False, _ONE_ADVANTAGE),
    "reward_penalties.penalize_malformed_think_tag": (False, _ONE_ADVANTAGE),
    "loss_fn.token_level_loss": (True, "the loss is a sum over owned tokens"),
    "loss_fn.sequence_level_importance_ratios": (
        False,
        "a ratio over a sequence would depend on how a rollout is split into rows",
    ),
    "loss_fn.force_on_policy_ratio": (False, "the ratio comes from the two passes"),
    "data.train.loss_multiplier": (1, "every owned token counts alike"),
}
"""Key -> the only accepted value and why."""


def required_value_problems(raw: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys that were given another value than the only accepted one."""
    for key, (required, why) in REQUIRED_VALUES.items():
        found, value = _lookup(raw, key)
        if found and (value != required or isinstance(value, bool) != isinstance(required, bool)):
            yield key, f"must be {json.dumps(required)} ({why}); set it so or remove the key"


def _lookup(raw: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    value: Any = raw
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def rule_problems(config: Config, refused: set[str]) -> Iterator[Finding]:
    """Rules between keys. Keys in `refused` have been reported and hold their default."""
    yield from _batch_problems(config)
    yield from _schedule_problems(config)
    yield from _selection_problems(config)
    grpo = config.grpo
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield "grpo.advantage_clip_low", f"is {low}, above grpo.advantage_clip_high {high}"
    if config.async_rl.enabled and not config.loss_fn.use_importance_sampling_correction:
        yield (
            "loss_fn.use_importance_sampling_correction",
            "must be true with async_rl.enabled: rollouts come from older weights",
        )
    loss = config.loss_fn
    if loss.truncated_importance_sampling_type != "tis" and (
        loss.truncated_importance_sampling_ratio is None
    ):
        yield (
            "loss_fn.truncated_importance_sampling_ratio",
            f"is needed by truncated_importance_sampling_type "
            f"{loss.truncated_importance_sampling_type}",
        )
    failure = config.async_rl.rollout_failure
    if (
        failure.rollout_timeout_s is not None
        and failure.nemo_gym.rollout_timeout_s is not None
        and failure.rollout_timeout_s != failure.nemo_gym.rollout_timeout_s
    ):
        yield (
            "async_rl.rollout_failure.nemo_gym.rollout_timeout_s",
            "differs from async_rl.rollout_failure.rollout_timeout_s, of which it is an alias; "
            "keep one of them",
        )


def _batch_problems(config: Config) -> Iterator[Finding]:
    policy, packing = config.policy, config.policy.sequence_packing
    sizes = {
        "policy.train_micro_batch_size": policy.train_micro_batch_size,
        "policy.logprob_batch_size": policy.logprob_batch_size,
    }
    for key, size in sizes.items():
        if size < 1:
            yield key, f"must be a positive integer, got {size}"
    batch = policy.train_global_batch_size
    if batch is not None and batch != config.rollouts_per_step:
        yield (
            "policy.train_global_batch_size",
            f"is {batch}; one optimizer step trains grpo.num_prompts_per_step * "
            f"grpo.num_generations_per_prompt = {config.rollouts_per_step} logical rollouts",
        )
    if config.grpo.num_generations_per_prompt < 2:
        yield (
            "grpo.num_generations_per_prompt",
            "must be at least 2: a group of one rollout has no baseline, so no advantage",
        )
    longest = policy.max_total_sequence_length
    if policy.forest_execution.enabled:
        if packing.enabled:
            yield (
                "policy.forest_execution.enabled",
                "must be false with policy.sequence_packing.enabled: both say what a bin holds; "
                "choose one",
            )
        if config.forest_bin_tokens < longest:
            yield (
                "policy.forest_execution.max_tokens_per_bin",
                f"is {config.forest_bin_tokens}, below policy.max_total_sequence_length "
                f"{longest}: the longest row would fit no bin",
            )
    if not packing.enabled or min(sizes.values()) < 1:
        return
    if config.train_mb_tokens < longest:
        yield (
            "policy.sequence_packing.train_mb_tokens",
            f"is {config.train_mb_tokens}, below policy.max_total_sequence_length {longest}: the "
            "longest row would fit no bin",
        )
    if config.logprob_mb_tokens < config.train_mb_tokens:
        yield (
            "policy.sequence_packing.logprob_mb_tokens",
            f"is {config.logprob_mb_tokens}; must be at least train_mb_tokens "
            f"{config.train_mb_tokens}, because log-probability bins are made of training bins",
        )


def _schedule_problems(config: Config) -> Iterator[Finding]:
    optimizer, scheduler = (
        config.policy.megatron_cfg.optimizer,
        config.policy.megatron_cfg.scheduler,
    )
    section = "policy.megatron_cfg"
    decay = scheduler.lr_decay_iters or config.grpo.max_num_steps
    if scheduler.lr_warmup_iters >= decay:
        yield (
            f"{section}.scheduler.lr_warmup_iters",
            f"is {scheduler.lr_warmup_iters}; must be below lr_decay_iters (null: "
            f"grpo.max_num_steps), which is {decay}",
        )
    for key, value in (
        ("optimizer.min_lr", optimizer.min_lr),
        ("scheduler.lr_warmup_init", scheduler.lr_warmup_init),
    ):
        if value > optimizer.lr:
            yield f"{section}.{key}", f"is {value}, above {section}.optimizer.lr {optimizer.lr}"


def _selection_problems(config: Config) -> Iterator[Finding]:
    capture = config.token_capture
    if capture.forest_training and not capture.enabled:
        yield "token_capture.enabled", "must be true with token_capture.forest_training"
    if not capture.forest_training and capture.selection_policy != policies.DEFAULT:
        yield (
            "token_capture.selection_policy",
            f"{capture.selection_policy!r} needs token_capture.forest_training: true; only "
            f"{policies.DEFAULT} trains without it",
        )
    try:
        policies.resolve(capture.selection_policy)
    except policies.PolicyError as error:
        yield "token_capture.selection_policy", str(error)


def missing_for_training(config: Config) -> Iterator[Finding]:
    """What a run cannot do without."""
    if not config.token_capture.enabled:
        yield "token_capture.enabled", "must be true: this trainer trains on captured calls only"
    needed = {
        "policy.model_name": (config.policy.model_name, "the Hugging Face checkpoint's folder"),
        "harness.target": (config.harness.target, "an installed harness or module:function"),
        "server.url": (config.server.url, "the server's address"),
        "server.control_token_file": (
            config.server.control_token_file,
            "the file with the control token",
        ),
        "data.train.data_path": (config.data.train.data_path, "the JSON Lines file of tasks"),
    }
    for key, (value, what) in needed.items():
        if not value:
            yield key, f"is missing: set it to {what}"
