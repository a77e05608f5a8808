"""Which rows of a step's tries run together: bins within a token budget.

Guarantees (asserted by the tests): every row is in exactly one bin; a bin's tokens, shared ones
counted once, are within the budget; a trie above the budget is cut between neighbouring rows so
that the fewest tokens are repeated, with the fewest cuts among those; every data-parallel rank has
the same number of bins, some of them empty (padding bins) where that is needed; the same input
gives the same bins. Runs in time linear in the rows, sorting and packing aside.

Rows come in trie order (`core.tree`), so that rows with a common prefix are neighbours: a run of
them costs its first row and what each further row adds to the one before it.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_forest_trainer.core.packing import pack

Bins = tuple[tuple[tuple[int, ...], ...], ...]
"""`bins[rank][number]` = places of rows in trie order."""

_PIECES_PER_RANK = (1, 2, 4)
"""Piece sizes that are tried to balance the ranks."""


class RowSizes:
    """Tokens of rows in trie order, and of runs of them."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int]) -> None:
        """`shared[i]` are the leading tokens that row i shares with the row before it."""
        self.lengths = lengths
        self.shared = shared
        added = (length - common for length, common in zip(lengths, shared, strict=True))
        self._added = list(accumulate(added, initial=0))

    def tokens(self, start: int, stop: int) -> int:
        """Tokens of rows `[start, stop)` run together."""
        return self._added[stop] - self._added[start] + self.shared[start]

    def together(self, places: Sequence[int]) -> int:
        """Tokens of the rows at the ascending `places` run together, gaps between them or not."""
        shared = (min(self.shared[a + 1 : b + 1]) for a, b in pairwise(places))
        return sum(self.lengths[place] for place in places) - sum(shared)


def plan_bins(
    lengths: Sequence[int], shared: Sequence[int], budget: int, *, ranks: int
) -> tuple[Bins, int]:
    """(bins, tokens that one pass over all of them runs, padding aside).

    Several ranks may end sooner with smaller pieces, although those repeat more. Of a few piece
    sizes the cheapest is taken: the time of all ranks, which is that of the most loaded one for
    each, plus the tokens that are repeated. Raises `ValueError` for a row above the budget.
    """
    longest = max(lengths)
    if longest > budget:
        raise ValueError(
            f"a row has {longest} tokens; a bin holds {budget}. Raise "
            "policy.forest_execution.max_tokens_per_bin to the longest row."
        )
    rows = RowSizes(lengths, shared)
    best = _Cutting(rows, budget, ranks)
    for count in _PIECES_PER_RANK if ranks > 1 else ():
        total = sum(lengths) - sum(shared)
        # Cutting repeats tokens, so that a second, larger size comes closer to equal pieces.
        for _ in range(2):
            limit = max(longest, min(budget, -(-total // (ranks * count))))
            cutting = _Cutting(rows, limit, ranks)
            best = min(best, cutting, key=lambda found: found.cost)
            total = cutting.total
    bins = [
        [
            tuple(sorted(place for i in members for place in range(*best.pieces[mine[i]])))
            for members in pack([best.tokens[i] for i in mine], budget)
        ]
        for mine in best.own
    ]
    total = sum(rows.together(members) for mine in bins for members in mine)
    most = max(len(mine) for mine in bins)
    return tuple(tuple(mine) + ((),) * (most - len(mine)) for mine in bins), total


class _Cutting:
    """Pieces of at most `limit` tokens, dealt to the ranks."""

    def __init__(self, rows: RowSizes, limit: int, ranks: int) -> None:
        self.pieces = cut(rows, limit)
        self.tokens = [rows.tokens(*piece) for piece in self.pieces]
        self.own = _assign(self.tokens, ranks)
        self.total = sum(self.tokens)
        heaviest = max(sum(self.tokens[i] for i in mine) for mine in self.own)
        self.cost = ranks * heaviest + self.total


def cut(rows: RowSizes, limit: int) -> list[tuple[int, int]]:
    """Runs `[start, stop)` of neighbouring rows of at most `limit` tokens, together all rows.

    Rows that share nothing are parted first, at no cost. A trie above the limit is cut where the
    fewest tokens are repeated (the sum of `shared` at the cuts), then with the fewest cuts.
    """
    starts = [place for place, count in enumerate(rows.shared) if count == 0]
    pieces = []
    for start, stop in pairwise([*starts, len(rows.lengths)]):
        fits = rows.tokens(start, stop) <= limit
        pieces += [(start, stop)] if fits else _cut_trie(rows, start, stop, limit)
    return pieces


def _cut_trie(rows: RowSizes, first: int, end: int, limit: int) -> list[tuple[int, int]]:
    """The cheapest cuts of one trie, as a shortest path over its rows.

    The last piece of rows `[first, stop)` may begin at any place from which it fits. A piece
    without its first row is never larger, so these places are a window that only moves on; the
    window's cheapest place stays at the front of a deque.
    """
    best = {first: (0, 0)}  # (repeated tokens, pieces) of the rows before a place
    begin = {}
    window: deque[tuple[tuple[int, int], int]] = deque()
    for place in range(first, end):
        repeated, pieces = best[place]
        cost = repeated + rows.shared[place], pieces + 1
        while window and window[-1][0] > cost:
            window.pop()
        window.append((cost, place))
        while rows.tokens(window[0][1], place + 1) > limit:
            window.popleft()
        best[place + 1], begin[place + 1] = window[0]
    cuts = [end]
    while cuts[-1] != first:
        cuts.append(begin[cuts[-1]])
    return list(pairwise(reversed(cuts)))


def _assign(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Pieces of each rank: the largest that is left goes to the least loaded rank."""
    own: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        rank = loads.index(min(loads))
        own[rank].append(piece)
        loads[rank] += tokens[piece]
    return own
