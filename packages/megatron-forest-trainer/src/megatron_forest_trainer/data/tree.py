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
from megatron_forest_trainer.data.collate import (
    Microbatch,
    Placement,
    RowInput,
    artificial_tokens,
    row_edges,
    row_routes,
)
from megatron_forest_trainer.data.images import (
    PlacedImage,
    check_images,
    media_batch,
    positions_3T,
)
from megatron_forest_trainer.data.layout import PADDING_TOKEN, Layout, packed_layout
from megatron_forest_trainer.loss.edges import concatenate
from megatron_forest_trainer.model.tree import TreeSeqParams
from megatron_forest_trainer.model.tree_kernels import Part


@dataclass(frozen=True, slots=True)
class TreeCollator(Placement):
    """Turns rows into microbatches of tries."""

    across_rollouts: bool
    """Rows of all rollouts of a prompt group share, not only those of one rollout."""

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
        # A forest that is cut repeats tokens whose owners run in another bin.
        artificial_T = np.ones(tree.total, np.bool_)
        for item, path in zip(rows, tree.paths, strict=True):
            artificial_T[path] &= artificial_tokens(item)
        artificial = layout.scatter([artificial_T], True, np.bool_)
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
            artificial=torch.from_numpy(artificial).to(self.device),
            packed=self._params(tree, layout, depths[0]),
            edges=edges,
            rows=tuple(rows),
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
        last_T = np.full(layout.total, layout.total, np.int64)
        last_T[: tree.total] = tree.last_T
        longest = max([layout.total - tree.total, *tree.lengths])

        def tensor(array: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return TreeSeqParams(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=tensor(depths_T),
            last=tensor(last_T),
            query_index=tensor(layout.positions),
            parts=tuple(attention_parts(tree, layout)),
        )


def _images(rows: Sequence[Row], tree: Tree) -> list[PlacedImage]:
    """Every embedding of the trie once: those that a row does not share with the one before it.

    Rows may part inside an image, where other experts saw its tokens.
    """
    images: list[PlacedImage] = []
    for number, shared in zip(*tree.trie, strict=True):
        media = rows[number].media
        if media is None:
            continue
        for occurrence, tensors in zip(media.occurrences, media.tensors, strict=True):
            if occurrence.end > shared:
                tokens = embedded_positions(occurrence)
                places = np.where(tokens < shared, -1, tree.paths[number][tokens])
                images.append((occurrence, tensors, places))
    return images


def attention_parts(tree: Tree, layout: Layout) -> list[Part]:
    """What this rank's queries attend to, in parts that need no mask; the causal ones first.

    A stretch of the trie is seen by itself, in causal order, and whole by all of its descendants,
    which follow it without a gap. Padding behind the trie sees itself.
    """
    nodes = list(tree.nodes)
    if layout.total > tree.total:
        nodes.append(Node(tree.total, layout.total, 0, layout.total))
    causal: list[Part] = []
    whole: list[Part] = []
    local = 0
    for held in layout.held:
        shift = local - held.start
        local += len(held)

        def part(queries: range, keys: range, *, causal: bool = False, shift: int = shift) -> Part:
            return Part(
                slice(queries.start + shift, queries.stop + shift),
                slice(keys.start, keys.stop),
                causal,
            )

        for node in nodes:
            own = _common(held, range(node.start, node.end))
            if own:
                causal.append(part(own, own, causal=True))
            # The beginning of the stretch may be on another rank.
            for queries, keys in (
                (own, range(node.start, own.start)),
                (_common(held, range(node.end, node.last)), range(node.start, node.end)),
            ):
                if queries and keys:
                    whole.append(part(queries, keys))
    return causal + whole


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _row(item: RowInput) -> Row:
    if item.row is None:
        raise ValueError("a forest has no padding rows: whole microbatches are its padding")
    return item.row
