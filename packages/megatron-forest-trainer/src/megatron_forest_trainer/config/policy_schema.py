"""The `policy` section: the trained model, its parallelism and its batches.

Guarantees: as `config.schema`, whose part this is.
"""

from typing import Annotated, Literal

from msgspec import Meta

from megatron_forest_trainer.config.section import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
)


class OptimizerConfig(Section, frozen=True):
    """Megatron-Core's optimizer."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam is AdamW (decoupled weight decay)."""
    lr: PositiveFloat = 5.0e-6
    """Largest learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay; biases and norms have none."""
    adam_beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1.0e-8
    """Added to the root of the second moment."""
    sgd_momentum: NonNegative = 0.9
    """Momentum of SGD."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""


class SchedulerConfig(Section, frozen=True):
    """Learning-rate schedule, counted in optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the decay behind the warm-up."""
    lr_decay_iters: Positive | None = None
    """Steps until `min_lr`; null is `grpo.max_num_steps`."""
    lr_warmup_iters: Count = 0
    """Steps of linear warm-up."""
    lr_warmup_init: NonNegative = 0.0
    """Learning rate before the first warm-up step."""


class MegatronConfig(Section, frozen=True):
    """Model parallelism and execution of the learner."""

    enabled: bool = True
    """Must be true: Megatron-Core is the learner."""
    tensor_model_parallel_size: Positive = 1
    """Ranks that share one layer."""
    pipeline_model_parallel_size: Positive = 1
    """Pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Must be null: the schedule is not interleaved."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Must be null: the schedule is not interleaved."""
    context_parallel_size: Positive = 1
    """Ranks that share one sequence."""
    expert_model_parallel_size: Positive = 1
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: Positive = 1
    """Ranks that share one expert."""
    sequence_parallel: bool = False
    """Shard norms and dropout along the sequence over the tensor-parallel ranks."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    count_padding_in_expert_load: bool = False
    """Count padding and borrowed context in the load that moves a router's bias."""
    freeze_vision_model: bool = False
    """Keep the vision tower of a model that sees as it is; only the decoder trains."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning-rate schedule."""


class SwitchedOff(Section, frozen=True):
    """A part of another trainer that must stay off."""

    enabled: bool = False
    """Must be false."""


class SequencePackingConfig(Section, frozen=True):
    """Packed (THD) execution: several rows in one bin with separate attention contexts."""

    enabled: bool = False
    """Packed bins instead of fixed microbatches."""
    train_mb_tokens: Positive | None = None
    """Tokens of a training bin; null is `max_total_sequence_length * train_micro_batch_size`."""
    logprob_mb_tokens: Positive | None = None
    """Tokens of a log-probability bin, at least `train_mb_tokens`; null is
    `max_total_sequence_length * logprob_batch_size`, and never below `train_mb_tokens`."""
    algorithm: Literal["first_fit_decreasing", "modified_first_fit_decreasing"] = (
        "first_fit_decreasing"
    )
    """Bin planner; both names mean first-fit-decreasing."""


class ForestExecutionConfig(Section, frozen=True):
    """The forest in one pass: tokens that rows share are computed once."""

    enabled: bool = False
    """Bins that hold each shared token once, instead of fixed microbatches or packed bins of
    rows. Same loss and gradients."""
    merge_across_rollouts: bool = True
    """Share equal prefixes of all rollouts of a prompt group; false shares within a rollout."""
    max_tokens_per_bin: Positive | None = None
    """Tokens of a bin, shared ones counted once; null is `max_total_sequence_length *
    train_micro_batch_size`."""


class RouterReplayConfig(Section, frozen=True):
    """Replay of the experts that the engine chose, in a mixture of experts."""

    enabled: bool = False
    """Send every token to the experts that computed it in the engine, in all passes of the learner.
    Needs a server with `--enable-return-routed-experts`."""
    on_missing_routes: Literal["mask", "live"] = "mask"
    """A call that was captured without routes: mask its rollout, or let the trained router choose
    for that call's tokens."""


class GenerationConfig(Section, frozen=True):
    """Sampling parameters that the harness is asked to use."""

    temperature: NonNegative = 1.0
    """0 is greedy."""
    top_p: Fraction = 1.0
    """Nucleus probability mass; 1 keeps every token."""
    top_k: Positive | None = None
    """Tokens kept; null keeps every token."""
    max_new_tokens: Positive | None = None
    """Longest single generation; null leaves it to the server."""


class TokenizerConfig(Section, frozen=True):
    """The tokenizer, where it is not the model's own."""

    name: str | None = None
    """Directory of the tokenizer; null is `policy.model_name`."""


class PolicyConfig(Section, frozen=True):
    """The trained model and its batches."""

    model_name: str | None = None
    """Directory of a Hugging Face checkpoint. Required for training."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where the learner runs. `cpu` is for demonstrations and tests: Megatron-Core then runs
    through the patches of `megatron_forest_trainer.testing.cpu`."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations."""
    max_total_sequence_length: Positive = 16384
    """Longest row in tokens; the server's max_model_len must not be above it."""
    make_sequence_length_divisible_by: Positive = 1
    """Rows are padded to a multiple of this when they run."""
    train_global_batch_size: Positive | None = None
    """Logical rollouts per optimizer step; null is `num_prompts_per_step *
    num_generations_per_prompt`, the only legal value."""
    train_micro_batch_size: int = 1
    """Rows of a training microbatch in fixed-batch mode."""
    logprob_batch_size: int = 1
    """Rows of a log-probability microbatch in fixed-batch mode."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradient clipping by global norm; null does not clip."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling of the rollouts."""
    megatron_cfg: MegatronConfig = MegatronConfig()
    """Parallelism and optimizer."""
    automodel_cfg: SwitchedOff = SwitchedOff()
    """Must stay off."""
    dtensor_cfg: SwitchedOff = SwitchedOff()
    """Must stay off."""
    dynamic_batching: SwitchedOff = SwitchedOff()
    """Must stay off."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """Packed execution."""
    forest_execution: ForestExecutionConfig = ForestExecutionConfig()
    """The forest in one pass."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    """Replay of routed experts."""
