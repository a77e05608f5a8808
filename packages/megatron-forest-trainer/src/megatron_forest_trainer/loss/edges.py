"""The one form in which a loss is asked for: edges.

Guarantees: an edge says "the logits at this source position predict this target token"; a target
has at most one edge, so summing over edges counts every owned token once, however the tokens around
it were laid out (rows, packed bins, or a shared forest, where several edges leave one token).

Axis `E` is the edges of one microbatch on one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

NO_TOP_K = 0
"""`top_k` of an edge whose generation had no limit."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Loss edges of one microbatch on one rank; all arrays are `[E]`.

    A microbatch without a loss keeps one edge of weight 0, so that every rank runs the same
    kernels and collectives.
    """

    source_E: NDArray[np.int64]
    """Index of the predicting position in the microbatch's flattened `[b, s]` tokens."""
    target_E: NDArray[np.int64]
    """Token id that was generated."""
    weight_E: NDArray[np.float32]
    """1 for an owned token of a row that trains, 0 for the placeholder edge."""
    advantage_E: NDArray[np.float32]
    temperature_E: NDArray[np.float32]
    """Sampling temperature; 0 (greedy) reports on the unscaled distribution, as the engine does."""
    top_p_E: NDArray[np.float32]
    """Nucleus mass; 1 keeps every token."""
    top_k_E: NDArray[np.int64]
    """Tokens kept; `NO_TOP_K` keeps every token."""
    previous_E: NDArray[np.float32]
    """The trainer's log-probability before the step; -inf where its distribution excludes it."""
    reference_E: NDArray[np.float32]
    """The reference model's log-probability; 0 where no reference is used."""
    correction_E: NDArray[np.float32]
    """Importance weight between engine and trainer; 1 without correction."""
    row_E: NDArray[np.int64]
    """Row of the microbatch that owns the target; -1 for the placeholder edge."""
    index_E: NDArray[np.int64]
    """Position of the target in its row."""

    def __len__(self) -> int:
        return len(self.source_E)

    def take(self, keep: NDArray[np.int64] | NDArray[np.bool_]) -> "Edges":
        """The edges that `keep` indexes."""
        return Edges(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})

    def tensors(self, device: torch.device) -> "EdgeTensors":
        """The edges on `device`."""
        return EdgeTensors(
            **{
                field.name: torch.from_numpy(getattr(self, field.name)).to(device)
                for field in fields(EdgeTensors)
            }
        )


@dataclass(frozen=True, slots=True)
class EdgeTensors:
    """What of `Edges` the loss computes with, as torch tensors `[E]`."""

    source_E: torch.Tensor
    target_E: torch.Tensor
    weight_E: torch.Tensor
    advantage_E: torch.Tensor
    temperature_E: torch.Tensor
    top_p_E: torch.Tensor
    top_k_E: torch.Tensor
    previous_E: torch.Tensor
    reference_E: torch.Tensor
    correction_E: torch.Tensor


def concatenate(parts: Iterator[Edges] | list[Edges]) -> Edges:
    """All edges of `parts`, in order; the placeholder edge if there are none."""
    parts = list(parts)
    if sum(len(part) for part in parts) == 0:
        return placeholder()
    return Edges(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(Edges)
        }
    )


def placeholder() -> Edges:
    """One edge without weight."""
    zero, none = np.zeros(1, np.int64), np.zeros(1, np.float32)
    one = np.ones(1, np.float32)
    return Edges(
        source_E=zero,
        target_E=zero,
        weight_E=none,
        advantage_E=none,
        temperature_E=one,
        top_p_E=one,
        top_k_E=zero,
        previous_E=none,
        reference_E=none,
        correction_E=none,
        row_E=zero - 1,
        index_E=zero,
    )
