"""The trie of a set of rows: every token that rows share, once.

Guarantees (asserted by the tests): pure numpy; two tokens are one exactly where everything before
them and the tokens themselves agree (`merge_keys`) and their rows may share (`merge_scope`); the
layout is depth first, so that a token's descendants follow it without a gap; the same rows give
the same layout on every machine.

With T the tokens of the layout in depth-first order and `last[k]` the end of token k's
descendants, token q may attend to token k exactly where `k <= q < last[k]`: k is q or one of its
ancestors. A token's position is its depth.

Axes: `T` tokens of the layout, `R` rows in trie order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from forest_schema import MediaOccurrence, Reason
from numpy.typing import NDArray

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.routes import MISSING
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import DeltaReader, Row, RowPlan


def merge_keys(rows: Sequence[Row], *, routed: bool = False) -> list[NDArray[np.uint8]]:
    """Per row `[tokens, w]` bytes: what must agree, token by token, to share a prefix.

    That is the token and, at an image, the image: its processed tensors and its geometry; with
    `routed`, where captured routes are replayed, the token's experts too. Raises `IntegrityError`
    for routes of several models.
    """
    columns: list[list[NDArray[Any]]] = [[row.tokens_T.astype("<i4")[:, None]] for row in rows]
    if any(row.media is not None for row in rows):
        images: dict[MediaOccurrence, int] = {}
        for row, own in zip(rows, columns, strict=True):
            image_T = np.zeros((len(row.tokens_T), 1), "<i4")
            for occurrence in row.media.occurrences if row.media is not None else ():
                # Where it came from and where it stands do not change what the model sees.
                seen = msgspec.structs.replace(occurrence, offset=0, identity="")
                number = images.setdefault(seen, len(images) + 1)
                image_T[occurrence.offset : occurrence.end] = number
            own.append(image_T)
    shapes = {row.routes_TLK.shape[1:] for row in rows if row.routes_TLK is not None}
    if routed and len(shapes) > 1:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"rows with routes of several models (layers, experts per token): {sorted(shapes)}",
        )
    if routed and shapes:
        for row, own in zip(rows, columns, strict=True):
            routes_TLK = row.routes_TLK
            if routes_TLK is None:
                routes_TLK = np.full((len(row.tokens_T), *min(shapes)), MISSING, np.int32)
            own.append(routes_TLK.astype("<i4", copy=False).reshape(len(routes_TLK), -1))
    return [np.concatenate([column.view(np.uint8) for column in own], axis=1) for own in columns]


def merge_scope(plan: RowPlan, *, across_rollouts: bool) -> str:
    """Rows share tokens only inside one scope: a prompt group, or a logical rollout."""
    return plan.group_id if across_rollouts else f"{plan.group_id}/{plan.rollout_id}"


class TrieOrder(NamedTuple):
    """Rows in the order of a depth-first walk of their trie."""

    order: tuple[int, ...]
    """Row numbers."""
    shared: tuple[int, ...]
    """Leading tokens that each row of `order` shares with the one before it."""


def trie_order(keys: Sequence[NDArray[np.uint8]], scopes: Sequence[Hashable]) -> TrieOrder:
    """The trie order of rows by their `merge_keys`. Scopes keep their order.

    In lexicographic order all rows with a common prefix are neighbours, and what two rows share is
    the least that any neighbours between them share.
    """
    numbers: dict[Hashable, int] = {}
    numbered = [numbers.setdefault(scope, len(numbers)) for scope in scopes]
    texts = [key.tobytes() for key in keys]
    order = sorted(range(len(keys)), key=lambda row: (numbered[row], texts[row], row))
    shared = [0] * len(order)
    for place in range(1, len(order)):
        before, row = order[place - 1], order[place]
        if numbered[before] == numbered[row]:
            shared[place] = _agreement(keys[before], keys[row])
    return TrieOrder(tuple(order), tuple(shared))


def _agreement(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> int:
    """Leading tokens on which two rows agree."""
    length = min(len(a), len(b))
    differ = a[:length].ravel() != b[:length].ravel()
    first = int(differ.argmax()) if len(differ) else 0
    return first // a.shape[1] if len(differ) and differ[first] else length


class SharedPrefixes(msgspec.Struct, frozen=True, array_like=True):
    """What a step's rows share, without tokens: enough to plan with."""

    row_ids: tuple[str, ...]
    """All rows, in trie order."""
    shared: tuple[int, ...]
    """Leading tokens that each row shares with the one before it."""


def shared_prefixes(
    plans: Sequence[RowPlan], reader: DeltaReader, *, across_rollouts: bool, routed: bool = False
) -> SharedPrefixes:
    """Compare the rows' tokens, and with `routed` their experts, one scope at a time."""
    scopes: dict[str, list[RowPlan]] = {}
    for plan in plans:
        scopes.setdefault(merge_scope(plan, across_rollouts=across_rollouts), []).append(plan)
    row_ids: list[str] = []
    shared: list[int] = []
    for scope, members in scopes.items():
        found = trie_order(
            merge_keys([assemble(plan, reader) for plan in members], routed=routed),
            [scope] * len(members),
        )
        row_ids += (members[row].row_id for row in found.order)
        shared += found.shared
    return SharedPrefixes(tuple(row_ids), tuple(shared))


class Node(NamedTuple):
    """Tokens `[start, end)` of the layout, a stretch of the trie without a branch inside."""

    start: int
    end: int
    depth: int
    """Tokens before the stretch on its path."""
    last: int
    """End of the descendants of its tokens."""


@dataclass(frozen=True)
class Tree:
    """The depth-first layout of rows."""

    lengths: tuple[int, ...]
    """Tokens of each row, by row number."""
    trie: TrieOrder
    nodes: tuple[Node, ...]
    """In layout order; together they cover it."""

    @property
    def total(self) -> int:
        """Tokens of the layout."""
        return self.nodes[-1].end if self.nodes else 0

    @cached_property
    def last_T(self) -> NDArray[np.int64]:
        """End of each token's descendants."""
        sizes = [node.end - node.start for node in self.nodes]
        return np.repeat(np.array([node.last for node in self.nodes], np.int64), sizes)

    @cached_property
    def paths(self) -> tuple[NDArray[np.int32], ...]:
        """By row number: the layout index of each of the row's tokens."""
        paths: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(self.lengths)
        path, start = np.empty(0, np.int32), 0
        for row, shared in zip(*self.trie, strict=True):
            own = np.arange(start, start + self.lengths[row] - shared, dtype=np.int32)
            path = paths[row] = np.concatenate([path[:shared], own])
            start += len(own)
        return tuple(paths)

    def gather(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Per-row arrays (axis 0 is the row's tokens) as one array over the layout."""
        parts = [rows[row][shared:] for row, shared in zip(*self.trie, strict=True)]
        return np.concatenate(parts) if parts else np.empty(0)


def build_tree(lengths: Sequence[int], trie: TrieOrder) -> Tree:
    """Lay out rows of `lengths` tokens (by row number).

    The stack holds the open path, root first. A row closes what it does not share, which cuts at
    most one stretch, so that there are less than two nodes per row.
    """
    closed: list[Node] = []
    path: list[Node] = []
    start = 0
    for row, shared in zip(*trie, strict=True):
        while path and path[-1].depth >= shared:
            closed.append(path.pop()._replace(last=start))
        if path:
            top = path[-1]
            cut = top.start + shared - top.depth
            if cut < top.end:
                closed.append(top._replace(start=cut, depth=shared, last=start))
                path[-1] = top._replace(end=cut)
        own = lengths[row] - shared
        if own and path and path[-1].end == start:
            # The row goes on where the one before it ended: still the same stretch.
            path[-1] = path[-1]._replace(end=start + own)
        elif own:
            path.append(Node(start, start + own, shared, last=0))
        start += own
    closed += [node._replace(last=start) for node in path]
    return Tree(tuple(lengths), trie, tuple(sorted(closed)))
