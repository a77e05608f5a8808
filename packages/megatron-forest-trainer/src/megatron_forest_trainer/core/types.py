"""Plain data of the pure core.

Guarantees: everything here is immutable and free of I/O, torch and Megatron. All but `Row` is
token-free and serialisable (it can be broadcast and saved). Positions count tokens of the row from
0. A generated token at position t is a loss *target*: the model predicts it from position t - 1.
Array names end in their axes: `_T` tokens of one row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from forest_schema import CallRecord, MediaOccurrence, Reason, RouteInfo, TensorRef
from numpy.typing import NDArray

from megatron_forest_trainer.core.media import RowMedia


class PathCall(msgspec.Struct, frozen=True, array_like=True):
    """What a row needs to know of a call on its path; lengths count tokens of the row."""

    call_id: str
    prev_len: int
    """Where the call's new tokens start: what it inherits."""
    prompt_len: int
    """Where its generated tokens start: its whole prompt."""
    cum_len: int
    """Where they end."""
    delta: TensorRef
    media: tuple[MediaOccurrence, ...] = ()
    """Images that the call added; their offsets are positions in the row."""
    routes: RouteInfo | None = None
    """What its routed experts cover, in positions of the row; None without them."""

    @classmethod
    def of(cls, record: CallRecord) -> "PathCall":
        """The part of `record` that its rows need."""
        return cls(
            call_id=record.call_id,
            prev_len=record.prev_len,
            prompt_len=record.prompt_len,
            cum_len=record.cum_len,
            delta=record.delta,
            media=record.media,
            routes=record.routes,
        )

    @property
    def delta_len(self) -> int:
        """New tokens of the call."""
        return self.cum_len - self.prev_len

    @property
    def generated_len(self) -> int:
        """Generated tokens of the call."""
        return self.cum_len - self.prompt_len


class GeneratedSpan(msgspec.Struct, frozen=True, array_like=True):
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


class RowPlan(msgspec.Struct, frozen=True, array_like=True):
    """One path of a rollout's selected forest, root to endpoint, without its tokens."""

    row_id: str
    """`{group_id}/{rollout_id}/s{n}`: stable for the same selection."""
    group_id: str
    rollout_id: str
    path: tuple[PathCall, ...]
    """The calls from the root to the endpoint."""
    spans: tuple[GeneratedSpan, ...]
    """One per call of the path, in path order."""
    length: int
    """Tokens of the row: the endpoint's `cum_len`."""

    @property
    def owned_tokens(self) -> int:
        """Loss targets of this row."""
        return sum(span.end - span.start for span in self.spans if span.owned)

    @property
    def unrouted_tokens(self) -> int:
        """Tokens without captured routes, but for the last one, which never has any."""
        routed = (call.routes.end - call.routes.first for call in self.path if call.routes)
        return self.length - 1 - sum(routed)


class Finalized(msgspec.Struct, frozen=True, kw_only=True):
    """A logical rollout after verification: all of its rows, or none and the reason."""

    group_id: str
    rollout_id: str
    attempt_id: str
    rows: tuple[RowPlan, ...] = ()
    """Empty for a masked rollout."""
    reason: Reason | None = None
    """Why the rollout is masked; None for a verified one."""
    detail: str = ""
    """The reason in words: which call and what to change."""
    selected: tuple[str, ...] = ()
    """Call ids of the selection, in its order; kept for a rollout masked after selection too."""
    terminal_response_id: str | None = None
    truncated: bool = False
    """Some selected generation stopped at a length limit."""
    generated_tokens: int = 0
    """Tokens of all selected generations, each counted once; 0 for a masked rollout."""
    longest_generation: int = 0
    """Tokens of the largest selected generation; 0 for a masked rollout."""
    unique_tokens: int = 0
    """Tokens of all selected deltas, each counted once; 0 for a masked rollout."""

    @property
    def verified(self) -> bool:
        """The rollout's rows can be trained on."""
        return self.reason is None

    @property
    def row_tokens(self) -> int:
        """Tokens of all rows, shared ancestors counted once per row."""
        return sum(row.length for row in self.rows)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest verified context chain; 0 for a masked rollout."""
        return max((row.length for row in self.rows), default=0)


@dataclass(frozen=True, slots=True)
class Row:
    """A `RowPlan` with its exact tensors."""

    plan: RowPlan
    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    """True at owned generated tokens (targets)."""
    logprobs_T: NDArray[np.float32]
    """Captured log-probability of each generated token, owned or borrowed; 0 elsewhere."""
    media: RowMedia | None = None
    """Images of the row; None for a row of text."""
    routes_TLK: NDArray[np.int32] | None = None
    """Experts of each token in each layer `[T, layers, top_k]`, -1 for a token without; None where
    no call of the path has routes."""


class DeltaReader(Protocol):
    """Where a call's tensors come from."""

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        """The tensors of one delta, with the digest that `ref` names.

        Raises `forest_schema.shards.ShardError` for anything that cannot be trusted.
        """
        ...
