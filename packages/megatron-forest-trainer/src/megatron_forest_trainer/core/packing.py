"""Token-budget bins for packed execution.

Guarantees (asserted by the tests): every item is in exactly one bin; no bin's load exceeds the
budget; the number of bins is a multiple of `multiple` and no bin is empty, provided the number of
items is a multiple of it too; the same lengths give the same bins on every machine.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int, *, multiple: int = 1) -> list[list[int]]:
    """First-fit-decreasing bins of item indices, `len(result) % multiple == 0`.

    `lengths` are the aligned token counts of the items, `budget` the token limit of a bin. Bins
    are split (most loaded first) where their number is not a multiple. Raises `ValueError` for
    an item above the budget, for a length below 1 and for an item count that is no multiple.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    if len(lengths) % multiple:
        raise ValueError(
            f"{len(lengths)} items cannot fill a multiple of {multiple} bins; pad the items first"
        )
    for index, length in enumerate(lengths):
        if not 1 <= length <= budget:
            raise ValueError(
                f"item {index} has {length} tokens; a bin holds between 1 and {budget}. Raise the "
                "token budget (policy.sequence_packing.train_mb_tokens) to the longest row."
            )
    bins = _first_fit_decreasing(lengths, budget)
    _split_to_multiple(bins, lengths, multiple)
    return bins


def _first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit over items in decreasing length, by a max-tree over the bins' free room.

    The tree answers "the first bin with at least this much room" in O(log bins).
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    leaves = 1
    while leaves < max(1, len(lengths)):
        leaves *= 2
    room = [budget] * (2 * leaves)
    bins: list[list[int]] = []
    for index in order:
        length = lengths[index]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        position = node - leaves
        if position == len(bins):
            bins.append([])
        bins[position].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            best = max(room[2 * node], room[2 * node + 1])
            if room[node] == best:
                break
            room[node] = best
    return bins


def _split_to_multiple(bins: list[list[int]], lengths: Sequence[int], multiple: int) -> None:
    """Halve the most loaded bins of two or more items until the count is a multiple."""
    while len(bins) % multiple:
        source = max(
            (number for number, members in enumerate(bins) if len(members) > 1),
            key=lambda number: (sum(lengths[i] for i in bins[number]), -number),
        )
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0, 0]
        for index in bins[source]:
            side = 0 if loads[0] <= loads[1] else 1
            halves[side].append(index)
            loads[side] += lengths[index]
        bins[source] = halves[0]
        bins.append(halves[1])
