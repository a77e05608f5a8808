"""The learner: one model on all ranks, driven by token-free step plans.

Guarantees: every method is collective (all ranks call it, with the same plan) and raises on all
ranks or on none of the checks it makes; no optimizer step is taken unless every selected generated
token of the step is trained exactly once over all ranks and the gradients are finite; loss,
gradient and metrics do not depend on the number of ranks, microbatches or padding rows. Each rank
reads its own rows; no rank holds another's tokens.

One step is `logprobs(plan, reader)`, then (after filters that read its row errors)
`train_step(plan, reader)`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron_forest_trainer.batches import BatchMaker, RowArrays, RowValues, real_rows
from megatron_forest_trainer.checkpoint.distributed import load_checkpoint, save_checkpoint
from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.core.metrics import TokenErrors, token_errors
from megatron_forest_trainer.core.plan import NoRetainedTokens, Schedule, StepPlan
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import DeltaReader, Row
from megatron_forest_trainer.data.collate import Microbatch
from megatron_forest_trainer.execution import METRIC_SUMS, Passes
from megatron_forest_trainer.loss.edges import Edges
from megatron_forest_trainer.loss.ownership import (
    OwnedRun,
    check_once_only,
    owned_runs,
    owner_id,
)
from megatron_forest_trainer.model import parallel
from megatron_forest_trainer.model.checks import check_model, kept_expert_biases, mask_expert_load
from megatron_forest_trainer.model.hf_config import read_model_shape
from megatron_forest_trainer.model.hf_io import export_weights, load_weights
from megatron_forest_trainer.model.replay import RoutingReplay
from megatron_forest_trainer.model.transformer import build_model, transformer_config
from megatron_forest_trainer.model.tree import enable_tree_execution
from megatron_forest_trainer.optimization import Trainable, make_trainable

logger = logging.getLogger(__name__)


class NonFiniteGradientError(RuntimeError):
    """A gradient is infinite or NaN. The weights are unchanged."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did; equal on all ranks. Means are over `retained_tokens`."""

    step: int
    """Optimizer steps taken, this one included."""
    retained_tokens: int
    loss: float
    kl: float
    """Estimated divergence from the reference model; 0 without one."""
    entropy: float
    """Mean entropy of the sampled distribution, in nats."""
    probability_ratio: float
    """Mean of exp(lp - lp'): 1 in the first step on a batch."""
    clipped_fraction: float
    """Tokens whose ratio the clip changed."""
    importance_weight: float
    """Mean weight of the correction between engine and trainer; 1 without it."""
    excluded_tokens: int
    """Retained tokens that the trainer's own distribution excludes: they have no gradient."""
    grad_norm: float
    lr: float
    """Learning rate that this step used."""


class Learner:
    """The trained model on this rank. Build it on every rank of the job."""

    def __init__(self, config: Config, hf_dir: Path, *, module: Any = None) -> None:
        """Join the process groups and load the checkpoint in `hf_dir`.

        `module` replaces the model: any module with Megatron's forward signature and a
        `TransformerConfig` as `config`. Its weights are not loaded from `hf_dir`.
        """
        cfg = config.policy.megatron_cfg
        self.config = config
        self.hf_dir = hf_dir
        self.step = 0
        self.parallelism = parallel.Parallelism(
            tensor=cfg.tensor_model_parallel_size,
            pipeline=cfg.pipeline_model_parallel_size,
            context=cfg.context_parallel_size,
            expert=cfg.expert_model_parallel_size,
            expert_tensor=cfg.expert_tensor_parallel_size,
            sequence_parallel=cfg.sequence_parallel,
        )
        _check_device(config.policy.device)
        parallel.initialize(self.parallelism, seed=config.grpo.seed)
        self.shape = read_model_shape(hf_dir)
        trees = config.policy.forest_execution.enabled
        if module is None:
            module = build_model(
                self.shape,
                transformer_config(
                    self.shape,
                    self.parallelism,
                    dtype=getattr(torch, config.policy.precision),
                    recompute=cfg.activation_checkpointing,
                ),
                freeze_vision_model=cfg.freeze_vision_model,
                trees=trees,
            )
            load_weights(module, self.shape, hf_dir)
        check_model(module)
        if trees:
            enable_tree_execution(module)
        self.module = module
        self.trainable: Trainable = make_trainable(module, config)
        replay = RoutingReplay(module) if config.policy.router_replay.enabled else None
        self._passes = Passes(
            module,
            vocab_size=self.shape.vocab_size,
            loss=config.loss_fn,
            mask_artificial=not cfg.count_padding_in_expert_load and mask_expert_load(module),
            replay=replay,
        )
        self._batches = BatchMaker.of(
            config, self.parallelism, self.shape.vision, replay.shape if replay else None
        )
        self._previous: RowArrays = {}
        self._reference: RowArrays = {}

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: what a step plan deals its rows to."""
        size: int = parallel_state.get_data_parallel_world_size()
        return size

    def logprobs(self, plan: StepPlan, reader: DeltaReader) -> dict[str, TokenErrors]:
        """Log-probabilities of the plan's rows under the weights as they are.

        They stay on the ranks for the next `train_step`. Returns, on every rank, how far they are
        from the engine's: row id -> errors, for each row that is no padding.
        """
        self.module.eval()
        self._previous, generated = self._logprob_pass(plan, reader)
        self._reference = {}
        if self.config.loss_fn.reference_policy_kl_penalty:
            with self._reference_weights():
                self._reference, _ = self._logprob_pass(plan, reader)
        self.module.train()
        own = {
            row_id: token_errors(generated[row_id], previous_N, np.ones(len(previous_N), bool))
            for row_id, previous_N in self._previous.items()
        }
        everywhere: dict[str, TokenErrors] = {}
        for part in _all_gather_objects(own if self._speaks else {}):
            everywhere |= part
        return {row.row_id: everywhere[row.row_id] for row in plan.rows if row.plan is not None}

    def train_step(self, plan: StepPlan, reader: DeltaReader) -> StepStats:
        """One optimizer step on the rows of `plan` that train.

        Their log-probabilities come from the last `logprobs`. Raises `NoRetainedTokens` where no
        token trains, `OwnershipError` and `NonFiniteGradientError`; then no weight has changed.
        """
        if plan.retained_tokens == 0:
            raise NoRetainedTokens(f"step {plan.step}: no row has a token to train on")
        model, optimizer, scheduler = self.trainable
        model.zero_grad_buffer()
        optimizer.zero_grad()
        runs: list[OwnedRun] = []
        with kept_expert_biases(self.module):
            sums = self._passes.train(
                model, self._training_batches(plan, reader, runs), self._microbatches(plan.train)
            )
            self._check_ownership(plan, runs)
            self._check_gradients(plan)
        lr = get_canonical_lr_for_logging(optimizer.param_groups)
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=1)
        self.step += 1
        self._previous, self._reference = {}, {}
        return self._stats(sums, grad_norm=float(grad_norm), lr=float(lr or 0.0))

    def export_hf(self, directory: Path) -> None:
        """Write the model as a new Hugging Face directory, in the source checkpoint's type."""
        export_weights(
            self.module, self.shape, self.hf_dir, directory, dtype=getattr(torch, self.shape.dtype)
        )

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and schedule as the new checkpoint `directory`."""
        save_checkpoint(self.trainable, directory, step=self.step)

    def load(self, directory: Path) -> None:
        """Continue from the checkpoint `directory`, also one of another parallel layout."""
        self.step = load_checkpoint(self.trainable, directory)

    @property
    def _speaks(self) -> bool:
        """This rank answers for its data-parallel rank: it has the loss, and no twin does."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def _microbatches(self, schedule: Schedule) -> int:
        return len(schedule[parallel_state.get_data_parallel_rank()])

    def _logprob_pass(self, plan: StepPlan, reader: DeltaReader) -> tuple[RowArrays, RowArrays]:
        """(trainer's, engine's) log-probabilities of this rank's rows; empty before last stage."""
        seen: list[tuple[Edges, dict[int, Row]]] = []

        def run() -> Iterator[Microbatch]:
            for batch in self._batches.logprob(plan, partial(assemble, reader=reader)):
                seen.append((batch.edges, real_rows(batch)))
                yield batch

        results = self._passes.logprobs(
            self.trainable.model, run(), self._microbatches(plan.logprob)
        )
        if not parallel_state.is_pipeline_last_stage():
            return {}, {}
        values = RowValues()
        generated: RowArrays = {}
        for (edges, rows), values_E in zip(seen, results, strict=True):
            values.add(edges, rows, values_E)
            for row in rows.values():
                generated[row.plan.row_id] = row.logprobs_T[row.loss_mask_T]
        return values.arrays(), generated

    def _training_batches(
        self, plan: StepPlan, reader: DeltaReader, runs: list[OwnedRun]
    ) -> Iterator[Microbatch]:
        """The training microbatches; what they train is added to `runs`."""
        read = partial(assemble, reader=reader)
        for batch in self._batches.training(plan, read, self._previous, self._reference):
            runs += owned_runs(batch.edges, real_rows(batch))
            yield batch

    def _check_ownership(self, plan: StepPlan, runs: list[OwnedRun]) -> None:
        expected = {
            (owner_id(row.plan), call.call_id): call.generated_len
            for row in plan.rows
            if row.plan is not None and row.train
            for call in row.plan.path
        }
        gathered = _all_gather_objects(
            runs, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        check_once_only([run for part in gathered for run in part], expected)

    def _check_gradients(self, plan: StepPlan) -> None:
        buffers = self.trainable.model.buffers + self.trainable.model.expert_parallel_buffers
        finite = all(bool(buffer.grad_data.isfinite().all()) for buffer in buffers)
        if not all(_all_gather_objects(finite)):
            raise NonFiniteGradientError(
                f"step {plan.step}: a gradient is infinite or NaN; the optimizer step was not taken"
            )

    def _stats(self, sums: torch.Tensor, *, grad_norm: float, lr: float) -> StepStats:
        """Exact means over all ranks from this rank's sums."""
        dist.all_reduce(
            sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        if self.parallelism.pipeline > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(sums, last, group=parallel_state.get_pipeline_model_parallel_group())
        *values, tokens = sums.tolist()
        total = dict(zip(METRIC_SUMS, values, strict=True))
        return StepStats(
            step=self.step,
            retained_tokens=int(tokens),
            loss=total["loss"] / tokens,
            kl=total["kl"] / tokens,
            entropy=total["entropy"] / tokens,
            probability_ratio=total["ratio"] / tokens,
            clipped_fraction=total["clipped"] / tokens,
            importance_weight=total["correction"] / tokens,
            excluded_tokens=int(total["excluded"]),
            grad_norm=grad_norm,
            lr=lr,
        )

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """The initial checkpoint's weights in the model, the trained ones put back afterwards."""
        kept = [parameter.detach().clone() for parameter in self.module.parameters()]
        load_weights(self.module, self.shape, self.hf_dir)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.module.parameters(), kept, strict=True):
                    parameter.copy_(value)


def _check_device(device: str) -> None:
    """Raise `ValueError` unless the learner will run on the configured device."""
    if (device == "cuda") != torch.cuda.is_available():
        raise ValueError(
            f"policy.device is {device}, but CUDA is "
            + (
                "available; hide it with CUDA_VISIBLE_DEVICES= or set policy.device: cuda"
                if torch.cuda.is_available()
                else "not available; use a machine with a GPU or set policy.device: cpu"
            )
        )


def _all_gather_objects(value: Any, group: Any = None) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
