"""From rows to the tensors of one microbatch.

Guarantees: every owned generated token of a row becomes exactly one edge, on the context-parallel
rank that holds the position before it; borrowed spans, prompts, and padding become none; the edges
of a row do not depend on the rows beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from forest_schema import Reason
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.routes import MISSING
from megatron_forest_trainer.core.types import Row
from megatron_forest_trainer.data.images import (
    MediaBatch,
    check_images,
    media_batch,
    placed_images,
    positions_3T,
)
from megatron_forest_trainer.data.layout import (
    PADDING_TOKEN,
    Layout,
    fixed_layout,
    packed_layout,
)
from megatron_forest_trainer.loss.edges import Edges, concatenate
from megatron_forest_trainer.model.hf_config import VisionShape


@dataclass(frozen=True, slots=True)
class RowInput:
    """A row with what the loss needs beside its tokens. Arrays `_N` follow its owned tokens."""

    row: Row | None
    """None for an execution-padding row: one padding token, no edge."""
    trains: bool = False
    """False gives the row no edge in a training microbatch."""
    advantage: float = 0.0
    previous_N: NDArray[np.float32] | None = None
    """The trainer's log-probabilities before the step; None in the pass that computes them."""
    reference_N: NDArray[np.float32] | None = None
    correction_N: NDArray[np.float32] | None = None

    @property
    def length(self) -> int:
        """Tokens that run."""
        return 1 if self.row is None else len(self.row.tokens_T)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one forward pass of the model takes, on this rank, and its edges."""

    tokens: torch.Tensor
    """int64 `[b, s]`."""
    position_ids: torch.Tensor
    """int64 `[b, s]`: position in the row; 0 at padding. For a model that sees `[3, b, s]`, its
    positions in time, height and width; a packed microbatch under context parallelism then has
    those of the whole line."""
    artificial: torch.Tensor
    """bool `[b, s]`, True at padding and at tokens that another row of the rollout owns: what a
    router's load must not count."""
    packed: PackedSeqParams | None
    """Segment boundaries of a packed microbatch; None for a grid."""
    edges: Edges
    rows: tuple[RowInput, ...]
    media: MediaBatch | None = None
    """Images, on the pipeline stage that reads them; None without images."""
    routes: torch.Tensor | None = None
    """int32 `[b, s, layers, k]`: experts of each token in each layer, all -1 for a token without;
    None where routes are not replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a collator's microbatches run, and what their model takes."""

    multiple: int = 1
    """A slot, or a whole microbatch of tries, is a multiple of this many tokens."""
    context_ranks: int = 1
    context_rank: int = 0
    device: torch.device | str = "cpu"
    vision: VisionShape | None = None
    """What the model sees; None for a model that reads text only, which refuses images."""
    reads_images: bool = True
    """False on a pipeline stage that has no vision tower: pixels are not prepared there."""
    routed: tuple[int, int] | None = None
    """(layers, experts per token) of the routes that are replayed; None replays none."""


@dataclass(frozen=True, slots=True)
class Collator(Placement):
    """Turns rows into microbatches of one form."""

    packed: bool

    def __call__(self, rows: Sequence[RowInput], *, training: bool) -> Microbatch:
        """The microbatch of `rows`. In a training microbatch only rows that train have edges.

        Raises `IntegrityError` for a row whose images the model cannot see exactly, or whose routes
        are of another model.
        """
        for item in rows:
            if item.row is not None:
                check_images(item.row, self.vision)
        lay_out = packed_layout if self.packed else fixed_layout
        layout = lay_out(
            [row.length for row in rows],
            multiple=self.multiple,
            context_ranks=self.context_ranks,
            context_rank=self.context_rank,
        )
        tokens = layout.scatter(
            [_tokens(item) for item in rows], fill=PADDING_TOKEN, dtype=np.int64
        )
        media = None
        if self.reads_images:
            images = [None if item.row is None else item.row.media for item in rows]
            media = media_batch(placed_images(images, layout), layout, self.device)
        artificial = layout.scatter(
            [artificial_tokens(item) for item in rows], fill=True, dtype=np.bool_
        )
        edges = concatenate(
            [
                row_edges(number, item, layout.row_index(number))
                for number, item in enumerate(rows)
                if item.row is not None and (item.trains or not training)
            ]
        )
        return Microbatch(
            tokens=torch.from_numpy(tokens).to(self.device),
            position_ids=torch.from_numpy(self._positions(rows, layout)).to(self.device),
            artificial=torch.from_numpy(artificial).to(self.device),
            packed=self._packed_params(layout),
            edges=edges,
            rows=tuple(rows),
            media=media,
            routes=self._routes(rows, layout),
        )

    def _routes(self, rows: Sequence[RowInput], layout: Layout) -> torch.Tensor | None:
        if self.routed is None:
            return None
        routes = layout.scatter(
            [row_routes(item, self.routed) for item in rows], fill=MISSING, dtype=np.int32
        )
        return torch.from_numpy(routes).to(self.device)

    def _positions(self, rows: Sequence[RowInput], layout: Layout) -> NDArray[np.generic]:
        if self.vision is None:
            return layout.scatter([np.arange(item.length) for item in rows], fill=0, dtype=np.int64)
        if self.packed:
            # Megatron slices the angles of a packed line itself, segment by segment.
            layout = replace(layout, context_ranks=1, context_rank=0)
        axes = zip(*(_positions_3T(item, self.vision) for item in rows), strict=True)
        return np.stack([layout.scatter(axis, fill=0, dtype=np.int64) for axis in axes])

    def _packed_params(self, layout: Layout) -> PackedSeqParams | None:
        if not layout.packed:
            return None
        slots = torch.tensor(layout.slots, dtype=torch.int32, device=self.device)
        longest = int((slots[1:] - slots[:-1]).max())
        # Padding inside a slot follows its row, where causal attention cannot see it, so the slots
        # themselves serve as the segments and no kernel has to know about the padding.
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=slots,
            cu_seqlens_kv=slots,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def _positions_3T(item: RowInput, vision: VisionShape) -> NDArray[np.int64]:
    if item.row is None:
        return np.zeros((3, 1), np.int64)
    return positions_3T(item.row, vision)


def _tokens(item: RowInput) -> NDArray[np.int64]:
    if item.row is None:
        return np.full(1, PADDING_TOKEN, np.int64)
    return item.row.tokens_T.astype(np.int64)


def row_routes(item: RowInput, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Routes `[tokens, layers, k]` of a row, -1 where it has none.

    `shape` is (layers, k) of the model. Raises `IntegrityError` for routes of another one.
    """
    if item.row is None or item.row.routes_TLK is None:
        return np.full((item.length, *shape), MISSING, np.int32)
    if item.row.routes_TLK.shape[1:] != shape:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"row {item.row.plan.row_id}: routes of (layers, experts per token) "
            f"{item.row.routes_TLK.shape[1:]}; the trained model has {shape}",
        )
    return item.row.routes_TLK


def artificial_tokens(item: RowInput) -> NDArray[np.bool_]:
    """`[tokens]`, True where another row of the rollout owns the token, and in a padding row."""
    if item.row is None:
        return np.ones(1, np.bool_)
    mask_T = np.zeros(item.length, np.bool_)
    for call, span in zip(item.row.plan.path, item.row.plan.spans, strict=True):
        mask_T[call.prev_len : call.cum_len] = not span.owned
    return mask_T


def row_edges(number: int, item: RowInput, index_T: NDArray[np.int64]) -> Edges:
    """Edges of row `number` whose source position is on this rank.

    `index_T` is where each token of the row lies on this rank, -1 for elsewhere.
    """
    row = item.row
    assert row is not None
    target_N = np.flatnonzero(row.loss_mask_T)
    if len(target_N) and target_N[0] == 0:
        raise ValueError(
            f"row {row.plan.row_id}: its first token is generated; a generated token needs a "
            "prompt before it"
        )
    temperature_T, top_p_T, top_k_T = _sampling(row)
    count = len(target_N)
    source_N = index_T[target_N - 1]
    edges = Edges(
        source_E=source_N,
        target_E=row.tokens_T[target_N].astype(np.int64),
        weight_E=np.ones(count, np.float32),
        advantage_E=np.full(count, item.advantage, np.float32),
        temperature_E=temperature_T[target_N],
        top_p_E=top_p_T[target_N],
        top_k_E=top_k_T[target_N],
        previous_E=_or_constant(item.previous_N, count, 0.0),
        reference_E=_or_constant(item.reference_N, count, 0.0),
        correction_E=_or_constant(item.correction_N, count, 1.0),
        row_E=np.full(count, number, np.int64),
        index_E=target_N.astype(np.int64),
    )
    here_N = source_N >= 0
    return edges if here_N.all() else edges.take(here_N)


def _sampling(
    row: Row,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Temperature, top-p and top-k of each token's generation; neutral outside generations."""
    length = len(row.tokens_T)
    temperature_T, top_p_T = np.ones(length, np.float32), np.ones(length, np.float32)
    top_k_T = np.zeros(length, np.int64)
    for span in row.plan.spans:
        temperature_T[span.start : span.end] = span.temperature
        top_p_T[span.start : span.end] = span.top_p
        top_k_T[span.start : span.end] = span.top_k
    return temperature_T, top_p_T, top_k_T


def _or_constant(
    values_N: NDArray[np.float32] | None, count: int, constant: float
) -> NDArray[np.float32]:
    if values_N is None:
        return np.full(count, constant, np.float32)
    if len(values_N) != count:
        raise ValueError(f"{len(values_N)} values for {count} owned tokens")
    return values_N.astype(np.float32, copy=False)
