"""Where the tokens of a microbatch's rows lie, on each context-parallel rank.

Guarantees: pure numpy; every token of every row is on exactly one context-parallel rank; rows
never share a slot; a row's tokens keep their order inside its slot. With context parallelism over n
ranks a slot is cut into 2n chunks of which rank r holds chunks r and 2n - 1 - r, the layout that
Megatron's and Transformer Engine's attention expect.

A *fixed* layout gives each row one line of a `[b, s]` grid; a *packed* layout puts the rows' slots
one behind the other into one line `[1, t]`. Both pad at the end of a slot only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PADDING_TOKEN = 0
"""Token id that fills padding positions; nothing depends on it."""


@dataclass(frozen=True)
class Layout:
    """Slots of rows in one flattened microbatch."""

    lengths: tuple[int, ...]
    """Tokens of each row."""
    slots: tuple[int, ...]
    """First position of each row's slot in the flattened whole microbatch, and the end."""
    packed: bool
    context_ranks: int = 1
    context_rank: int = 0

    @property
    def total(self) -> int:
        """Positions of the whole microbatch, over all context-parallel ranks."""
        return self.slots[-1]

    @property
    def grid(self) -> tuple[int, int]:
        """`(b, s)` of this rank's part."""
        lines = 1 if self.packed else len(self.lengths)
        return lines, self.total // self.context_ranks // lines

    @cached_property
    def held(self) -> tuple[range, ...]:
        """Stretches of whole-microbatch positions that this rank holds, in its order."""
        if self.context_ranks == 1:
            return (range(self.total),)
        chunks = (self.context_rank, 2 * self.context_ranks - 1 - self.context_rank)
        held = []
        for start, end in pairwise(self.slots):
            size = (end - start) // (2 * self.context_ranks)
            held += [range(start + n * size, start + (n + 1) * size) for n in chunks]
        return tuple(held)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Flattened whole-microbatch positions that this rank holds, in its order."""
        return np.concatenate([np.arange(part.start, part.stop) for part in self.held])

    @cached_property
    def local_index(self) -> NDArray[np.int64]:
        """For each whole-microbatch position, its index on this rank, or -1."""
        index = np.full(self.total, -1, np.int64)
        index[self.positions] = np.arange(len(self.positions))
        return index

    def row_index(self, row: int) -> NDArray[np.int64]:
        """Where each token of a row lies on this rank; -1 for elsewhere."""
        return self.local_index[self.slots[row] : self.slots[row] + self.lengths[row]]

    def scatter(
        self, rows: Sequence[NDArray[np.generic]], fill: int, dtype: type
    ) -> NDArray[np.generic]:
        """This rank's `[b, s, ...]` part of per-row arrays `[T, ...]`; padding positions hold
        `fill`.
        """
        inner = rows[0].shape[1:]
        whole: NDArray[np.generic] = np.full((self.total, *inner), fill, dtype)
        for start, row in zip(self.slots[:-1], rows, strict=True):
            whole[start : start + len(row)] = row
        own = whole if self.context_ranks == 1 else whole[self.positions]
        return own.reshape(*self.grid, *inner)


def fixed_layout(
    lengths: Sequence[int], *, multiple: int, context_ranks: int = 1, context_rank: int = 0
) -> Layout:
    """One line per row, all as long as the longest, rounded up to `multiple`."""
    width = _round_up(max(lengths), multiple)
    return Layout(
        lengths=tuple(lengths),
        slots=tuple(range(0, width * len(lengths) + 1, width)),
        packed=False,
        context_ranks=context_ranks,
        context_rank=context_rank,
    )


def packed_layout(
    lengths: Sequence[int], *, multiple: int, context_ranks: int = 1, context_rank: int = 0
) -> Layout:
    """One line with the rows' slots behind each other, each rounded up to `multiple`."""
    sizes = [_round_up(length, multiple) for length in lengths]
    return Layout(
        lengths=tuple(lengths),
        slots=(0, *np.cumsum(sizes).tolist()),
        packed=True,
        context_ranks=context_ranks,
        context_rank=context_rank,
    )


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
