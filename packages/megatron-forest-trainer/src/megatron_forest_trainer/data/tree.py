"""From rows to the tensors of one microbatch that computes each shared token once.

Guarantees: what `data.collate` guarantees of edges; a token that rows share (`core.tree`) is in the
microbatch once, and every row's edges leave its own path; a microbatch without rows is one stretch
of padding. Which context-parallel rank holds a token changes no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_forest_trainer.core.media import embedded_positions
from megatron_forest_trainer.core.routes import MISSING
from megatron_forest_trainer.core.tree import (
    Node,
    Tree,
    build_tree,
    merge_keys,
    merge_scope,
    trie_order,
)
from megatron_forest_trainer.core.types import Row
from megatron_forest_trainer.data.collate import Microbatch, RowInput, row_edges, row_routes
from megatron_forest_trainer.data.images import (
    PlacedImage,
    check_images,
    media_batch,
    positions_3T,
)
from megatron_forest_trainer.data.layout import PADDING_TOKEN, Layout, packed_layout
from megatron_forest_trainer.loss.edges import concatenate
from megatron_forest_trainer.model.hf_config import VisionShape
from megatron_forest_trainer.model.tree import TreeSeqParams


@dataclass(frozen=True, slots=True)
class TreeCollator:
    """Turns rows into microbatches of tries."""

    across_rollouts: bool
    """Rows of all rollouts of a prompt group share, not only those of one rollout."""
    multiple: int = 1
    """A microbatch has a multiple of this many tokens."""
    context_ranks: int = 1
    context_rank: int = 0
    device: torch.device | str = "cpu"
    vision: VisionShape | None = None
    """What the model sees; None for a model that reads text only, which refuses images."""
    reads_images: bool = True
    """False on a pipeline stage that has no vision tower: pixels are not prepared there."""
    routed: tuple[int, int] | None = None
    """(layers, experts per token) of the routes that are replayed; None replays none."""

    def __call__(self, rows: Sequence[RowInput], *, training: bool) -> Microbatch:
        """The microbatch of `rows`, none of them a padding row.

        Raises `IntegrityError` for a row whose images the model cannot see exactly.
        """
        found = [_row(item) for item in rows]
        for row in found:
            check_images(row, self.vision)
        tree = build_tree(
            [len(row.tokens_T) for row in found],
            trie_order(
                merge_keys(found, routed=self.routed is not None),
                [merge_scope(row.plan, across_rollouts=self.across_rollouts) for row in found],
            ),
        )
        layout = packed_layout(
            [max(1, tree.total)],
            multiple=self.multiple,
            context_ranks=self.context_ranks,
            context_rank=self.context_rank,
        )
        tokens = layout.scatter(
            [tree.gather([row.tokens_T for row in found])], PADDING_TOKEN, np.int64
        )
        depths = layout.scatter([tree.gather([np.arange(n) for n in tree.lengths])], 0, np.int64)
        media = None
        if self.reads_images:
            media = media_batch(_images(found, tree), layout, self.device)
        # Every token that is there is real: none is borrowed.
        padding = layout.scatter([np.zeros(tree.total, np.bool_)], True, np.bool_)
        edges = concatenate(
            [
                row_edges(number, item, layout.row_index(0)[tree.paths[number]])
                for number, item in enumerate(rows)
                if item.trains or not training
            ]
        )
        return Microbatch(
            tokens=torch.from_numpy(tokens).to(self.device),
            position_ids=torch.from_numpy(self._positions(found, tree, layout, depths)).to(
                self.device
            ),
            artificial=torch.from_numpy(padding).to(self.device),
            packed=self._params(tree, layout, depths[0]),
            edges=edges,
            rows=tuple(rows),
            sequence_length=layout.total,
            media=media,
            routes=self._routes(rows, tree, layout),
        )

    def _routes(self, rows: Sequence[RowInput], tree: Tree, layout: Layout) -> torch.Tensor | None:
        if self.routed is None:
            return None
        routes = [row_routes(item, self.routed) for item in rows]
        own = tree.gather(routes) if routes else np.empty((0, *self.routed), np.int32)
        return torch.from_numpy(layout.scatter([own], MISSING, np.int32)).to(self.device)

    def _positions(
        self, rows: Sequence[Row], tree: Tree, layout: Layout, depths: NDArray[np.generic]
    ) -> NDArray[np.generic]:
        """What the model takes as positions: depths, or positions in time, height and width."""
        vision = self.vision
        if vision is None:
            return depths
        axes = zip(*(positions_3T(row, vision) for row in rows), strict=True) if rows else [()] * 3
        return np.stack([layout.scatter([tree.gather(axis)], 0, np.int64) for axis in axes])

    def _params(self, tree: Tree, layout: Layout, depths_T: NDArray[np.int64]) -> TreeSeqParams:
        queries, keys = stretches(tree, layout)
        last_T = np.full(layout.total, layout.total, np.int64)
        last_T[: tree.total] = tree.last_T
        longest = max(len(key) for key in keys)

        def tensor(array: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return TreeSeqParams(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=tensor(depths_T),
            last=tensor(last_T),
            query_index=tensor(layout.positions),
            query_lengths=[len(query) for query in queries],
            key_lengths=[len(key) for key in keys],
            key_index=tensor(np.concatenate(keys)),
        )


def _images(rows: Sequence[Row], tree: Tree) -> list[PlacedImage]:
    """Every image of the trie once: those that a row does not share with the one before it."""
    images: list[PlacedImage] = []
    for number, shared in zip(*tree.trie, strict=True):
        media = rows[number].media
        if media is None:
            continue
        for occurrence, tensors in zip(media.occurrences, media.tensors, strict=True):
            if occurrence.offset >= shared:
                positions = tree.paths[number][embedded_positions(occurrence)]
                images.append((occurrence, tensors, positions.astype(np.int64)))
    return images


def stretches(tree: Tree, layout: Layout) -> tuple[list[range], list[NDArray[np.int64]]]:
    """Queries of this rank, in its order, as stretches that see one path each.

    Returns each stretch's positions in the whole microbatch, and the positions of all keys on its
    path up to its own end: query i of n sees all but the last n - 1 - i of them.
    """
    padding = Node(tree.total, layout.total, 0, layout.total, row=-1)
    nodes = [*tree.nodes, padding] if padding.end > padding.start else list(tree.nodes)
    queries: list[range] = []
    keys: list[NDArray[np.int64]] = []
    for held in layout.held:
        for node in nodes:
            start, stop = max(held.start, node.start), min(held.stop, node.end)
            if start >= stop:
                continue
            before = tree.paths[node.row][: node.depth] if node.depth else _NOTHING
            queries.append(range(start, stop))
            keys.append(np.concatenate([before, np.arange(node.start, stop)]))
    return queries, keys


_NOTHING = np.empty(0, np.int32)


def _row(item: RowInput) -> Row:
    if item.row is None:
        raise ValueError("a forest has no padding rows: whole microbatches are its padding")
    return item.row
