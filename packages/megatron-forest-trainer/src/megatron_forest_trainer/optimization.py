"""Megatron's data-parallel wrapper, optimizer and learning-rate schedule from the configuration.

Guarantees: gradients are reduced in float32 as sums over tokens; the schedule counts optimizer
steps.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_forest_trainer.config.schema import Config


class Trainable(NamedTuple):
    """A model ready for Megatron's forward-backward schedule."""

    model: Any
    """The wrapped module: what the schedule calls."""
    optimizer: Any
    scheduler: OptimizerParamScheduler


def make_trainable(module: Any, config: Config) -> Trainable:
    """Wrap `module` (it carries its `TransformerConfig` as `config`) for training."""
    settings = config.policy.megatron_cfg.optimizer
    transformer_config = module.config
    distributed = settings.use_distributed_optimizer
    model = DistributedDataParallel(
        transformer_config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=False,
        ),
        module,
    )
    clip = config.policy.max_grad_norm
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.optimizer,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            sgd_momentum=settings.sgd_momentum,
            # Megatron computes no norm with clipping off; an infinite bound measures only.
            clip_grad=float("inf") if clip is None else clip,
            use_distributed_optimizer=distributed,
            bf16=transformer_config.params_dtype == torch.bfloat16,
            params_dtype=transformer_config.params_dtype,
        ),
        [model],
    )
    transformer_config.finalize_model_grads_func = finalize_model_grads
    transformer_config.grad_scale_func = optimizer.scale_loss
    return Trainable(model, optimizer, _scheduler(optimizer, config))


def _scheduler(optimizer: Any, config: Config) -> OptimizerParamScheduler:
    settings = config.policy.megatron_cfg.optimizer
    schedule = config.policy.megatron_cfg.scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=schedule.lr_decay_iters or config.grpo.max_num_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
