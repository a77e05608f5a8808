"""Process groups of one training job.

Guarantees: `initialize` is the only place that creates Megatron's global parallel state; sizes that
do not fit the world are refused by name before any group is made.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one model is split over ranks; the rest of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    """Split activations along tokens over the tensor-parallel ranks; needs `tensor` > 1."""

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel ranks in a world of `world_size`. Raises `ValueError`, naming the keys."""
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "policy.megatron_cfg.sequence_parallel needs tensor_model_parallel_size > 1"
            )
        model = self.tensor * self.pipeline * self.context
        if world_size % model:
            raise ValueError(
                f"{world_size} ranks are not a multiple of tensor_model_parallel_size "
                f"{self.tensor} x pipeline_model_parallel_size {self.pipeline} x "
                f"context_parallel_size {self.context} = {model}; change the sizes or the number "
                "of ranks"
            )
        experts = self.expert_tensor * self.expert * self.pipeline
        if world_size % experts:
            raise ValueError(
                f"{world_size} ranks are not a multiple of expert_tensor_parallel_size "
                f"{self.expert_tensor} x expert_model_parallel_size {self.expert} x "
                f"pipeline_model_parallel_size {self.pipeline} = {experts}; change the sizes or "
                "the number of ranks"
            )
        return world_size // model

    @property
    def token_multiple(self) -> int:
        """Every row's slot, and so every microbatch, is a multiple of this many tokens."""
        multiple = 2 * self.context if self.context > 1 else 1
        return multiple * (self.tensor if self.sequence_parallel else 1)


def initialize(parallelism: Parallelism, *, seed: int) -> None:
    """Join the job that torchrun's environment variables describe and build Megatron's groups.

    A process started without torchrun becomes a world of one. Uses NCCL with CUDA, else gloo.
    Groups that exist already, of the same sizes, are used. Raises `ValueError` for sizes that do
    not fit.
    """
    if parallel_state.model_parallel_is_initialized():
        _check_existing(parallelism)
        return
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("RANK", "0"),
                        ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):  # fmt: skip
        os.environ.setdefault(name, value)
    parallelism.data_parallel(int(os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        context_parallel_size=parallelism.context,
        expert_model_parallel_size=parallelism.expert,
        expert_tensor_parallel_size=parallelism.expert_tensor,
    )
    torch.manual_seed(seed)
    # Dropout is always off here, so the CPU needs no CUDA random-state tracker.
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, inference_rng_tracker=not torch.cuda.is_available()
    )


def _check_existing(wanted: Parallelism) -> None:
    existing = Parallelism(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=wanted.sequence_parallel,
    )
    if existing != wanted:
        raise ValueError(
            f"Megatron's process groups exist with {existing}, but policy.megatron_cfg asks for "
            f"{wanted}; make them agree"
        )


def shutdown() -> None:
    """Destroy the groups that `initialize` made."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
