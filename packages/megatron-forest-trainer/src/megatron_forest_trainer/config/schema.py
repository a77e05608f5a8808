"""The configuration as one typed model.

Guarantees: immutable; every key has a type, a default and a docstring that gives its unit and what
null means. A default never needs a model, a server or a file, so that a partial configuration
loads; `checks.missing_for_training` names what a run still needs. `docs/configuration.md` is made
from these docstrings.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_forest_trainer.config.policy_schema import PolicyConfig, SwitchedOff
from megatron_forest_trainer.config.section import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
)


class TokenCaptureConfig(Section, frozen=True):
    """What is captured and which captured calls train."""

    enabled: bool = False
    """Train on captured calls. Required for training."""
    forest_training: bool = False
    """Train all paths of the selected forest. False allows one linear chain per rollout."""
    selection_policy: str = "returned_history"
    """`returned_history`, `all_captured`, an installed policy's name, or `module:function`."""
    defer_routed_experts_to_policy: bool = False
    """Must be false: routes are assembled directly along a row's path."""
    min_valid_fraction_per_group: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Smallest fraction of verified rollouts of a kept prompt group; null keeps every group."""
    pending_wait_s: NonNegative = 300.0
    """Seconds to wait, when an attempt closes, for calls that are still running."""
    keep_captures: bool = False
    """Leave a trained step's captures on the server instead of deleting them."""
    on_evidence_error: Literal["raise", "mask"] = "mask"
    """A returned output that does not fit the capture: stop the run, or mask the rollout."""


class RewardShapingConfig(SwitchedOff, frozen=True):
    """Must stay off: one unshaped reward per rollout."""


class GrpoConfig(Section, frozen=True):
    """Groups, advantages and filters."""

    num_prompts_per_step: Positive = 32
    """Prompt groups of an optimizer step."""
    num_generations_per_prompt: Positive = 16
    """Logical rollouts of a prompt group."""
    max_num_steps: Positive = 1_000_000
    """Optimizer steps of the run."""
    use_leave_one_out_baseline: bool = True
    """A rollout's own reward is not in its baseline."""
    normalize_rewards: bool = True
    """Divide by the standard deviation of the rewards in the baseline."""
    advantage_clip_low: float | None = None
    """Lower limit of a rollout's advantage; null does not clip."""
    advantage_clip_high: float | None = None
    """Upper limit of a rollout's advantage; null does not clip."""
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Mask a rollout whose pooled probability error is above this (1 is exact); null only
    reports the error."""
    masked_reward_policy: Literal["include", "exclude"] = "include"
    """Whether the reward of a rollout masked by `seq_logprob_error_threshold` stays in the
    baseline."""
    overlong_filtering: bool = False
    """Leave out of the loss every rollout with a generation that stopped for length."""
    calculate_advantages_on_gpu: bool = False
    """Must be false: advantages are computed once per rollout by the controller."""
    invalid_tool_call_advantage: float | None = None
    """Must be null: message-level advantages contradict one advantage per rollout."""
    malformed_thinking_advantage: float | None = None
    """Must be null: message-level advantages contradict one advantage per rollout."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Must stay off."""
    reward_scaling: RewardShapingConfig = RewardShapingConfig()
    """Must stay off."""
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 42
    """Seed of prompts, sampling and weights."""


class RewardPenaltiesConfig(Section, frozen=True):
    """Penalties of another trainer that must stay off."""

    penalize_duplicated_reasoning: bool = False
    """Must be false."""
    penalize_empty_final_answer: bool = False
    """Must be false."""
    penalize_unwanted_tokens: bool = False
    """Must be false."""
    penalize_malformed_think_tag: bool = False
    """Must be false."""


class LossConfig(Section, frozen=True):
    """Token-level clipped policy gradient."""

    token_level_loss: bool = True
    """Must be true."""
    sequence_level_importance_ratios: bool = False
    """Must be false."""
    force_on_policy_ratio: bool = False
    """Must be false: the ratio is the quotient of the two passes."""
    ratio_clip_min: NonNegative = 0.2
    """The ratio is clipped below at 1 minus this."""
    ratio_clip_max: NonNegative = 0.2
    """The ratio is clipped above at 1 plus this."""
    ratio_clip_c: Annotated[float, Meta(gt=1)] | None = None
    """Dual clip of negative advantages; null is off."""
    reference_policy_kl_penalty: NonNegative = 0.0
    """Weight of the KL divergence to the initial model; 0 keeps no reference model."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Limit of the log-ratio inside k3; null does not clamp."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Limit of the KL value per token; null does not clamp."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the trainer's probability over the engine's."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper limit of that weight; null does not truncate."""
    truncated_importance_sampling_ratio_min: NonNegative | None = None
    """Lower limit of that weight; null is 0."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """Clamp the weight, zero it outside the limits, or zero whole sequences."""


class NemoGymFailureConfig(Section, frozen=True):
    """Alias section of existing configuration files."""

    rollout_timeout_s: PositiveFloat | None = None
    """Alias of `async_rl.rollout_failure.rollout_timeout_s`."""


class RolloutFailureConfig(Section, frozen=True):
    """What a failed prompt group costs."""

    rollout_timeout_s: PositiveFloat | None = None
    """Seconds after which a prompt group without all results is dropped; null waits."""
    min_step_batch_fraction: Fraction | None = None
    """Smallest fraction of `num_prompts_per_step` that a step trains on; below it the run stops.
    null accepts any step with at least one group."""
    max_dropped_groups: Count = 0
    """Prompt groups that the run may lose before it stops."""
    max_replacements: Count = 0
    """Fresh prompt groups that a step may ask for in place of groups it discarded."""
    nemo_gym: NemoGymFailureConfig = NemoGymFailureConfig()
    """Alias section."""


class AsyncConfig(Section, frozen=True):
    """Overlap of rollouts and training."""

    enabled: bool = False
    """Collect the next step's rollouts while this one trains."""
    max_staleness: Count = 1
    """Optimizer steps that the weights of a rollout may lag behind the ones it trains."""
    max_concurrent_attempts: Positive = 64
    """Attempts that are open at the same time."""
    rollout_failure: RolloutFailureConfig = RolloutFailureConfig()
    """Budgets of failures."""


class HarnessConfig(Section, frozen=True):
    """The agent that makes the rollouts."""

    target: str | None = None
    """Name of an installed harness, or `module:function`. Required for training."""
    max_response_retries: Count = 0
    """Definite responses that `select_response` may reject before one call gives up."""
    max_model_calls: Positive = 64
    """Model calls of one rollout, retries included."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Handed to the harness unchanged."""


class ContextHistoryConfig(Section, frozen=True):
    """Context compaction of the example agent."""

    keep_rounds: Count | None = None
    """Newest tool rounds whose results stay visible; null keeps all."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt, measured before generating; null does not measure."""
    on_exceed: Literal["compact", "stop"] = "compact"
    """What to do above `max_prompt_tokens`."""


class ServerConfig(Section, frozen=True):
    """The serving side."""

    url: str | None = None
    """Root of the server, e.g. `http://127.0.0.1:8000`. Required for training."""
    control_token_file: str | None = None
    """File with the bearer token of the control routes. Required for training."""
    api_key: str | None = None
    """The server's `--api-key`; null where it has none."""
    store_path: str | None = None
    """Root folder of the delta store on a shared file system; null reads over HTTP."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest wait for a control request."""


class DataSplitConfig(Section, frozen=True):
    """One data set of tasks."""

    data_path: str | None = None
    """JSON Lines file: one task per line, handed to the harness. Required for training."""
    loss_multiplier: float = 1.0
    """Must be 1: owned tokens count alike."""


class DataConfig(Section, frozen=True):
    """Tasks."""

    train: DataSplitConfig = DataSplitConfig()
    """The tasks that are trained on."""
    shuffle: bool = True
    """Shuffle the tasks, by `grpo.seed`."""


class CheckpointingConfig(Section, frozen=True):
    """Training checkpoints."""

    enabled: bool = False
    """Write checkpoints."""
    checkpoint_dir: str | None = None
    """Folder of the checkpoints; null is `checkpoints` in `logger.log_dir`."""
    save_period: Positive = 10
    """Optimizer steps between two checkpoints."""
    keep_top_k: Positive | None = None
    """Newest checkpoints that are kept; null keeps all."""
    resume: bool = True
    """Continue from the newest checkpoint of `checkpoint_dir`, if there is one."""


class WandbConfig(Section, frozen=True):
    """Weights & Biases."""

    project: str = "forest"
    """Project."""
    name: str | None = None
    """Run name; null lets the service choose."""


class LoggerConfig(Section, frozen=True):
    """Where metrics go. Step records in JSON Lines are always written."""

    log_dir: str = "out"
    """Folder of the run."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events."""
    wandb_enabled: bool = False
    """Write to Weights & Biases."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""


class Config(Section, frozen=True):
    """The whole configuration."""

    token_capture: TokenCaptureConfig = TokenCaptureConfig()
    """Capture and selection."""
    policy: PolicyConfig = PolicyConfig()
    """Model, parallelism and batches."""
    grpo: GrpoConfig = GrpoConfig()
    """Groups, advantages and filters."""
    reward_penalties: RewardPenaltiesConfig = RewardPenaltiesConfig()
    """Must stay off."""
    loss_fn: LossConfig = LossConfig()
    """The loss."""
    async_rl: AsyncConfig = AsyncConfig()
    """Concurrency and failures of rollouts."""
    harness: HarnessConfig = HarnessConfig()
    """The agent."""
    context_history: ContextHistoryConfig = ContextHistoryConfig()
    """Compaction of the example agent."""
    server: ServerConfig = ServerConfig()
    """The serving side."""
    data: DataConfig = DataConfig()
    """Tasks."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """Checkpoints."""
    logger: LoggerConfig = LoggerConfig()
    """Metrics."""

    @property
    def rollouts_per_step(self) -> int:
        """Logical rollouts of a full optimizer step."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def train_mb_tokens(self) -> int:
        """Tokens of a training bin in packed mode."""
        packing = self.policy.sequence_packing
        return packing.train_mb_tokens or (
            self.policy.max_total_sequence_length * self.policy.train_micro_batch_size
        )

    @property
    def logprob_mb_tokens(self) -> int:
        """Tokens of a log-probability bin in packed mode."""
        packing = self.policy.sequence_packing
        return packing.logprob_mb_tokens or max(
            self.train_mb_tokens,
            self.policy.max_total_sequence_length * self.policy.logprob_batch_size,
        )

    @property
    def forest_bin_tokens(self) -> int:
        """Tokens of a bin of the forest in one pass."""
        return self.policy.forest_execution.max_tokens_per_bin or (
            self.policy.max_total_sequence_length * self.policy.train_micro_batch_size
        )

    @property
    def rollout_timeout_s(self) -> float | None:
        """Time limit of a prompt group, under either of its names."""
        failure = self.async_rl.rollout_failure
        return failure.rollout_timeout_s or failure.nemo_gym.rollout_timeout_s
