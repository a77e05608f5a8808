"""Running microbatches through Megatron's forward-backward schedule.

Guarantees: any module with Megatron's forward signature can be run; only positions that an edge
leaves are projected to the vocabulary; every pass is the same forward computation, so that the
log-probabilities before a step and inside it agree.

`forward_step` and `loss_func` are what `get_forward_backward_func` of a user's own training loop
takes; `Passes` runs whole steps.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray

from megatron_forest_trainer.config.schema import LossConfig
from megatron_forest_trainer.data.collate import Microbatch
from megatron_forest_trainer.loss.edges import EdgeTensors
from megatron_forest_trainer.loss.policy import policy_loss
from megatron_forest_trainer.loss.vocab_parallel import edge_logprobs
from megatron_forest_trainer.model.replay import RoutingReplay

METRIC_SUMS = ("loss", "kl", "entropy", "ratio", "clipped", "correction", "excluded")
"""Order of the metric sums in the tensor that `loss_func` reports; the token count follows."""


class SourceSelector:
    """Gives a model's output layer only the hidden states of source positions.

    Prompts are most of an agent's tokens and have no loss: this keeps them from costing logits.
    A module without an `output_layer` is run as it is, and its logits are indexed instead.
    """

    def __init__(self, module: Any) -> None:
        self._source_E: torch.Tensor | None = None
        self._layer = getattr(module, "output_layer", None)
        if self._layer is not None:
            self._layer.register_forward_pre_hook(self._select)
            # The hook gathers the sequence-parallel shards itself, before it selects.
            self._sequence_parallel = getattr(self._layer, "sequence_parallel", False)
            self._group = getattr(self._layer, "tp_group", None)

    @contextmanager
    def sources(self, source_E: torch.Tensor) -> Iterator[None]:
        """Select `source_E` (indices into the flattened `[b, s]`) in forward passes inside."""
        self._source_E = source_E
        if self._layer is not None:
            self._layer.sequence_parallel = False
        try:
            yield
        finally:
            self._source_E = None
            if self._layer is not None:
                self._layer.sequence_parallel = self._sequence_parallel

    def edge_logits(self, output: torch.Tensor, source_E: torch.Tensor) -> torch.Tensor:
        """`[E, V]` from the model's output inside `sources`."""
        if self._layer is not None:
            return output[0]
        return output.flatten(0, 1).index_select(0, source_E)

    def _select(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._source_E is None:
            return None
        hidden, *rest = args
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._group
            )
        lines = hidden.transpose(0, 1).flatten(0, 1)
        return (lines.index_select(0, self._source_E).unsqueeze(1), *rest)


def loss_func(
    logits_EV: torch.Tensor,
    *,
    edges: EdgeTensors,
    vocab_size: int,
    config: LossConfig,
    group: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron's loss function: (sum, integer token count, metric sums).

    The dictionary holds one float64 tensor under `sums`, in the order of `METRIC_SUMS` and then the
    token count: add it over microbatches and ranks, then divide by the count.
    """
    logprob_E, entropy_E = _logprobs(logits_EV, edges, vocab_size, group)
    result = policy_loss(logprob_E, entropy_E, edges, config)
    sums = torch.stack([result.sums[name] for name in METRIC_SUMS] + [result.tokens.double()])
    return result.loss, result.tokens, {"sums": sums}


def _logprobs(
    logits_EV: torch.Tensor, edges: EdgeTensors, vocab_size: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return edge_logprobs(
        logits_EV,
        edges.target_E,
        temperature_E=edges.temperature_E,
        top_p_E=edges.top_p_E,
        top_k_E=edges.top_k_E,
        vocab_size=vocab_size,
        group=group,
    )


class Passes:
    """The passes of a step over one model."""

    def __init__(
        self,
        module: Any,
        *,
        vocab_size: int,
        loss: LossConfig,
        mask_artificial: bool = False,
        replay: RoutingReplay | None = None,
    ) -> None:
        """`mask_artificial` hands the model the positions that its routers must not count.

        `replay` gives its routers the routes of the microbatches.
        """
        self._selector = SourceSelector(module)
        self._mask_artificial = mask_artificial
        self._replay = replay
        self._vocab_size = vocab_size
        self._loss = loss

    def train(self, model: Any, microbatches: Iterable[Microbatch], count: int) -> torch.Tensor:
        """Forward and backward over this rank's `count` microbatches.

        Gradients accumulate in the model, divided by the token count of all ranks. Returns this
        rank's metric sums (see `loss_func`), zero except on the last pipeline stage.
        """
        results = self._run(model, microbatches, count, forward_only=False)
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        zero = torch.zeros(len(METRIC_SUMS) + 1, dtype=torch.float64, device=device)
        return torch.stack([zero, *(result["sums"] for result in results)]).sum(dim=0)

    def logprobs(
        self, model: Any, microbatches: Iterable[Microbatch], count: int
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities `[E]` of each microbatch's edges; empty before the last stage."""
        with torch.no_grad():
            results = self._run(model, microbatches, count, forward_only=True)
        return [result.float().cpu().numpy() for result in results]

    def _run(
        self, model: Any, microbatches: Iterable[Microbatch], count: int, *, forward_only: bool
    ) -> list[Any]:
        run = get_forward_backward_func()
        with self._replay.passing() if self._replay is not None else nullcontext():
            results: list[Any] = run(
                forward_step_func=self.forward_step,
                data_iterator=iter(microbatches),
                model=[model],
                num_microbatches=count,
                # Stages tell each other the true shapes (variable_seq_lengths).
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return results

    def forward_step(
        self, microbatches: Iterator[Microbatch], model: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Megatron's forward step: the model's output and the function that makes its loss."""
        batch = next(microbatches)
        edges = batch.edges.tensors(batch.tokens.device)
        extra: dict[str, Any] = {}
        if self._mask_artificial:
            extra["padding_mask"] = batch.artificial
        if batch.media is not None:
            extra["media"] = batch.media
        if self._replay is not None:
            assert batch.routes is not None
            self._replay.load(batch.routes)
        with self._selector.sources(edges.source_E):
            output = model(
                input_ids=batch.tokens,
                position_ids=batch.position_ids,
                attention_mask=None,
                packed_seq_params=batch.packed,
                **extra,
            )
        return output, partial(self._finish, edges)

    def _finish(self, edges: EdgeTensors, output: torch.Tensor, non_loss_data: bool = False) -> Any:
        logits_EV = self._selector.edge_logits(output, edges.source_E)
        group = parallel_state.get_tensor_model_parallel_group()
        if non_loss_data:
            return _logprobs(logits_EV, edges, self._vocab_size, group)[0]
        return loss_func(
            logits_EV, edges=edges, vocab_size=self._vocab_size, config=self._loss, group=group
        )
