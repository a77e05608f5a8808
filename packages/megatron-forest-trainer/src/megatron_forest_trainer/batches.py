"""From a step plan to this rank's microbatches, and from edge values back to rows.

Guarantees: a rank reads the rows of its own data-parallel rank only, one microbatch at a time;
per-row arrays follow the row's owned tokens and are complete on every context-parallel rank.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from megatron_forest_trainer.config.schema import Config, LossConfig
from megatron_forest_trainer.core.plan import ForestShape, PackedShape, StepPlan
from megatron_forest_trainer.core.types import Row, RowPlan
from megatron_forest_trainer.data.collate import Collator, Microbatch, RowInput
from megatron_forest_trainer.data.tree import TreeCollator
from megatron_forest_trainer.loss.correction import importance_weights
from megatron_forest_trainer.loss.edges import Edges
from megatron_forest_trainer.model.hf_config import VisionShape
from megatron_forest_trainer.model.parallel import Parallelism

RowArrays = dict[str, NDArray[np.float32]]
"""Row id -> values of the row's owned tokens."""

ReadRow = Callable[[RowPlan], Row]
"""Fetches a row's tensors."""


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes this rank's microbatches."""

    parallelism: Parallelism
    divisible_by: int
    """Rows are padded to a multiple of this many tokens."""
    loss: LossConfig
    vision: VisionShape | None = None
    """What the model sees; None for a model that reads text only."""
    routed: tuple[int, int] | None = None
    """(layers, experts per token) of the routes that are replayed; None replays none."""

    @classmethod
    def of(
        cls,
        config: Config,
        parallelism: Parallelism,
        vision: VisionShape | None,
        routed: tuple[int, int] | None = None,
    ) -> "BatchMaker":
        """The maker that `config` asks for."""
        divisible_by = config.policy.make_sequence_length_divisible_by
        return cls(parallelism, divisible_by, config.loss_fn, vision, routed)

    def logprob(self, plan: StepPlan, read: ReadRow) -> Iterator[Microbatch]:
        """The microbatches of a log-probability pass: every owned token has an edge."""
        collate = self._collator(plan)
        for members in plan.logprob[parallel_state.get_data_parallel_rank()]:
            rows = [plan.rows[index] for index in members]
            inputs = [RowInput(None if row.plan is None else read(row.plan)) for row in rows]
            yield collate(inputs, training=False)

    def training(
        self, plan: StepPlan, read: ReadRow, previous: RowArrays, reference: RowArrays
    ) -> Iterator[Microbatch]:
        """The microbatches of a training pass, with the values of the log-probability pass.

        Raises `KeyError`, naming the row, where a row that trains was in no such pass.
        """
        collate = self._collator(plan)
        for members in plan.train[parallel_state.get_data_parallel_rank()]:
            inputs = []
            for index in members:
                planned = plan.rows[index]
                if planned.plan is None or not planned.train:
                    # Without loss a row still runs, so that every rank has its microbatches.
                    inputs.append(RowInput(planned.plan and read(planned.plan)))
                    continue
                row = read(planned.plan)
                inputs.append(self._training_input(row, planned.advantage, previous, reference))
            yield collate(inputs, training=True)

    def _training_input(
        self, row: Row, advantage: float, previous: RowArrays, reference: RowArrays
    ) -> RowInput:
        previous_N = reference_N = correction_N = None
        row_id = row.plan.row_id
        # Only the last pipeline stage has log-probabilities, and only it computes the loss.
        if parallel_state.is_pipeline_last_stage():
            if row_id not in previous:
                raise KeyError(f"row {row_id}: call logprobs on its step before train_step")
            previous_N = previous[row_id]
            reference_N = reference.get(row_id)
            generated_N = row.logprobs_T[row.loss_mask_T]
            correction_N = importance_weights(previous_N, generated_N, self.loss)
        return RowInput(
            row,
            trains=True,
            advantage=advantage,
            previous_N=previous_N,
            reference_N=reference_N,
            correction_N=correction_N,
        )

    def _collator(self, plan: StepPlan) -> Collator | TreeCollator:
        common: dict[str, Any] = {
            "multiple": int(np.lcm(self.divisible_by, self.parallelism.token_multiple)),
            "context_ranks": self.parallelism.context,
            "context_rank": parallel_state.get_context_parallel_rank(),
            "device": torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            "vision": self.vision,
            "reads_images": parallel_state.is_pipeline_first_stage(),
            "routed": self.routed,
        }
        if isinstance(plan.shape, ForestShape):
            return TreeCollator(across_rollouts=plan.shape.across_rollouts, **common)
        return Collator(packed=isinstance(plan.shape, PackedShape), **common)


class RowValues:
    """Collects edge values of microbatches into per-row arrays."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]] = {}

    def add(self, edges: Edges, rows: Mapping[int, Row], values_E: NDArray[np.float32]) -> None:
        """Values `[E]` of one microbatch's edges; `rows` are its rows by number."""
        for number, row in rows.items():
            mine_E = edges.row_E == number
            part = (edges.index_E[mine_E], values_E[mine_E])
            self._parts.setdefault(row.plan.row_id, []).append(part)

    def arrays(self) -> RowArrays:
        """Per-row arrays in token order, complete: collective over the context-parallel group."""
        parts = self._parts
        ranks = parallel_state.get_context_parallel_world_size()
        if ranks > 1:
            gathered: list[Any] = [None] * ranks
            dist.all_gather_object(
                gathered, parts, group=parallel_state.get_context_parallel_group()
            )
            parts = {key: [part for rank in gathered for part in rank[key]] for key in parts}
        arrays = {}
        for row_id, row_parts in parts.items():
            index_N = np.concatenate([index for index, _ in row_parts])
            values_N = np.concatenate([values for _, values in row_parts])
            arrays[row_id] = values_N[np.argsort(index_N)]
        return arrays


def real_rows(batch: Microbatch) -> dict[int, Row]:
    """Rows of a microbatch by number, padding left out."""
    return {number: item.row for number, item in enumerate(batch.rows) if item.row is not None}
