"""Plain data of the pure core.

Guarantees: everything here is immutable and free of I/O, torch and Megatron. A `RowPlan` is
token-free and serialisable (it can be broadcast); a `Row` adds the tensors. Positions count tokens
of the row from 0. A generated token at position t is a loss *target*: the model predicts it from
position t - 1. Array names end in their axes: `_T` tokens of one row.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from forest_schema import CallRecord
from numpy.typing import NDArray


class GeneratedSpan(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` of a row that one call generated."""

    call_id: str
    start: int
    end: int
    owned: bool
    """This row owns the span's loss; a borrowed span is context (another row owns it)."""
    temperature: float
    top_p: float
    top_k: int
    """0 means no limit."""


class RowPlan(msgspec.Struct, frozen=True):
    """One path of a rollout's selected forest, root to endpoint, without its tokens."""

    row_id: str
    """`{group_id}/{rollout_id}/s{n}`: stable for the same selection."""
    group_id: str
    rollout_id: str
    path: tuple[CallRecord, ...]
    spans: tuple[GeneratedSpan, ...]
    """One per call of the path, in path order."""
    length: int
    """Tokens of the row: the endpoint's `cum_len`."""

    @property
    def owned_tokens(self) -> int:
        """Loss targets of this row."""
        return sum(span.end - span.start for span in self.spans if span.owned)


@dataclass(frozen=True, slots=True)
class Row:
    """A `RowPlan` with its exact tensors."""

    plan: RowPlan
    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    """True at owned generated tokens (targets)."""
    logprobs_T: NDArray[np.float32]
    """Captured log-probability of each generated token, owned or borrowed; 0 elsewhere."""
