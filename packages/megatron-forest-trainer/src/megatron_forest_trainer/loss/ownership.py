"""Proof that a step's edges train every selected generated token exactly once.

Guarantees: what is checked is the edges that the ranks really run, not the plan they came from; the
key of a token is (rollout, call, index in the generation).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from megatron_forest_trainer.core.types import Row, RowPlan
from megatron_forest_trainer.loss.edges import Edges


class OwnershipError(RuntimeError):
    """A token would be trained twice, or not at all. The step does not run."""


class OwnedRun(NamedTuple):
    """Consecutive trained tokens `[start, end)` of one call's generation."""

    owner_id: str
    """`owner_id` of the rollout."""
    call_id: str
    start: int
    end: int


def owner_id(plan: RowPlan) -> str:
    """The logical rollout that a row belongs to, unique over prompt groups."""
    return f"{plan.group_id}/{plan.rollout_id}"


def owned_runs(edges: Edges, rows: Mapping[int, Row]) -> list[OwnedRun]:
    """The generated tokens that `edges` train; `rows` are the microbatch's by number."""
    runs = []
    for number, row in rows.items():
        index_N = np.sort(edges.index_E[(edges.row_E == number) & (edges.weight_E != 0)])
        for span in row.plan.spans:
            inside_N = index_N[(index_N >= span.start) & (index_N < span.end)] - span.start
            if len(inside_N) == 0:
                continue
            breaks = np.flatnonzero(np.diff(inside_N) != 1) + 1
            runs += [
                OwnedRun(owner_id(row.plan), span.call_id, int(part[0]), int(part[-1]) + 1)
                for part in np.split(inside_N, breaks)
            ]
    return runs


def check_once_only(runs: Iterable[OwnedRun], expected: Mapping[tuple[str, str], int]) -> None:
    """Raise `OwnershipError` unless `runs` cover `expected` exactly once.

    `expected` maps (owner id, call id) to the generated length of every call that trains.
    """
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        found[run.owner_id, run.call_id].append((run.start, run.end))
    for key in found.keys() - expected.keys():
        raise OwnershipError(f"rollout {key[0]}, call {key[1]}: trained, but not in the step")
    for (owner, call_id), length in expected.items():
        where = f"rollout {owner}, call {call_id}"
        reached = 0
        for start, end in sorted(found[owner, call_id]):
            if start < reached:
                raise OwnershipError(f"{where}: generated token {start} is trained twice")
            if start > reached:
                break
            reached = end
        if reached != length:
            raise OwnershipError(
                f"{where}: generated token {reached} of {length} is trained by no row"
            )
