"""The plan of one optimizer step: which row runs where, with which advantage.

Guarantees (asserted by the tests): a plan is token-free and serialises (`encode`, `decode`); every
row is in exactly one training and one log-probability microbatch, on the same data-parallel rank;
every rank has the same number of microbatches and none is empty, but for the padding bins of a
forest; all rows of a rollout are in the same plan, so that no optimizer step splits a rollout; the
same input gives the same plan.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from megatron_forest_trainer.core.packing import pack
from megatron_forest_trainer.core.tree import SharedPrefixes
from megatron_forest_trainer.core.tree_plan import plan_bins
from megatron_forest_trainer.core.types import RowPlan

PADDING_LENGTH = 1
"""Tokens that a padding row runs: one padding token, no target."""


class PlannedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the step, or an execution-padding row."""

    row_id: str
    plan: RowPlan | None
    """None for a padding row."""
    advantage: float = 0.0
    """The rollout's advantage; 0 for padding and for a row that does not train."""
    train: bool = False
    """False for padding and for a row whose rollout was filtered: it runs without loss."""

    @property
    def length(self) -> int:
        """Tokens that the row runs."""
        return PADDING_LENGTH if self.plan is None else self.plan.length

    @property
    def retained_tokens(self) -> int:
        """Loss targets that count in the normaliser."""
        return self.plan.owned_tokens if self.train and self.plan is not None else 0


Schedule = tuple[tuple[tuple[int, ...], ...], ...]
"""`schedule[data_parallel_rank][microbatch]` = indices into `StepPlan.rows`."""


class FixedShape(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """Microbatches of a fixed number of rows."""

    data_parallel: int
    train_micro_batch: int
    logprob_micro_batch: int

    @property
    def row_multiple(self) -> int:
        """Rows per prompt group come in multiples of this."""
        return self.data_parallel * math.lcm(self.train_micro_batch, self.logprob_micro_batch)


class PackedShape(msgspec.Struct, frozen=True, kw_only=True, tag="packed"):
    """Bins of whole rows within a token budget; rows keep separate attention contexts."""

    data_parallel: int
    train_tokens: int
    logprob_tokens: int
    """At least `train_tokens`: log-probability bins are whole training bins put together."""
    align: int = 1
    """A row occupies a multiple of this many tokens of its bin; so do the budgets."""

    @property
    def row_multiple(self) -> int:
        """Rows per prompt group come in multiples of this."""
        return self.data_parallel


class ForestShape(msgspec.Struct, frozen=True, kw_only=True, tag="forest"):
    """Bins of rows that compute each token that they share once (`core.tree`)."""

    data_parallel: int
    max_tokens: int
    """Tokens of a bin, shared ones counted once."""
    across_rollouts: bool
    """Rows of all rollouts of a prompt group share, not only those of one rollout."""
    routed: bool = False
    """Captured routes are replayed: a token is shared only where its experts agree."""
    align: int = 1
    """A bin runs a multiple of this many tokens; so does the budget."""

    @property
    def row_multiple(self) -> int:
        """Any number of rows fits: whole bins are the padding."""
        return 1


BatchShape = FixedShape | PackedShape | ForestShape


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the ranks need to know about one optimizer step, without tokens."""

    step: int
    shape: BatchShape
    rows: tuple[PlannedRow, ...]
    train: Schedule
    logprob: Schedule
    retained_tokens: int
    """Owned tokens of the rows that train, over all ranks: the loss normaliser."""
    executed_tokens: int
    """Tokens that one pass runs over all ranks, padding aside: those of all rows, or of all bins of
    a forest."""

    @property
    def mode(self) -> Literal["fixed", "packed", "forest"]:
        """How microbatches are formed."""
        match self.shape:
            case FixedShape():
                return "fixed"
            case PackedShape():
                return "packed"
            case ForestShape():
                return "forest"

    def encode(self) -> bytes:
        """MessagePack bytes for the broadcast."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "StepPlan":
        """The plan that `encode` wrote."""
        return _DECODER.decode(data)


_DECODER = msgspec.msgpack.Decoder(StepPlan)


class NoRetainedTokens(ValueError):
    """No row of the step trains: there is nothing to take an optimizer step on."""


def plan_step(
    step: int,
    rows: Sequence[PlannedRow],
    shape: BatchShape,
    shared: SharedPrefixes | None = None,
) -> StepPlan:
    """Assign `rows` (padding included, see `core.padding`) to ranks and microbatches.

    Rows are dealt to the ranks by length, so that microbatches that run at the same time on
    different ranks have about the same size. A forest needs what its rows share. Raises
    `NoRetainedTokens` where no owned token trains, and `ValueError` for a row count that is not a
    multiple, for repeated row ids or for `shared` of other rows.
    """
    if len({row.row_id for row in rows}) != len(rows):
        raise ValueError("row ids of a step must be unique")
    retained = sum(row.retained_tokens for row in rows)
    if retained == 0:
        raise NoRetainedTokens(
            f"step {step}: none of the {len(rows)} rows has a token to train on; every rollout "
            "was masked, filtered or empty"
        )
    if len(rows) % shape.row_multiple:
        raise ValueError(
            f"{len(rows)} rows are not a multiple of {shape.row_multiple}; pad them first"
        )
    lengths = [row.length for row in rows]
    executed = sum(row.length for row in rows if row.plan is not None)
    if isinstance(shape, FixedShape):
        train, logprob = _fixed_schedules(lengths, shape)
    elif isinstance(shape, PackedShape):
        train, logprob = _packed_schedules(lengths, shape)
    else:
        train, executed = _forest_schedule(rows, shape, shared)
        logprob = train
    return StepPlan(
        step=step,
        shape=shape,
        rows=tuple(rows),
        train=train,
        logprob=logprob,
        retained_tokens=retained,
        executed_tokens=executed,
    )


def _fixed_schedules(lengths: Sequence[int], shape: FixedShape) -> tuple[Schedule, Schedule]:
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    ranks = [order[rank :: shape.data_parallel] for rank in range(shape.data_parallel)]
    train, logprob = (
        tuple(tuple(tuple(own[i : i + size]) for i in range(0, len(own), size)) for own in ranks)
        for size in (shape.train_micro_batch, shape.logprob_micro_batch)
    )
    return train, logprob


def _packed_schedules(lengths: Sequence[int], shape: PackedShape) -> tuple[Schedule, Schedule]:
    if shape.logprob_tokens < shape.train_tokens:
        raise ValueError(
            f"logprob_tokens {shape.logprob_tokens} is below train_tokens {shape.train_tokens}; "
            "raise policy.sequence_packing.logprob_mb_tokens"
        )
    aligned = [_align(length, shape.align) for length in lengths]
    # The longest legal row fits its bin after alignment too.
    budget = _align(shape.train_tokens, shape.align)
    bins = pack(aligned, budget, multiple=shape.data_parallel)
    bins.sort(key=lambda members: (-sum(aligned[i] for i in members), members[0]))
    ranks: list[list[list[int]]] = [[] for _ in range(shape.data_parallel)]
    for number, members in enumerate(bins):
        turn, position = divmod(number, shape.data_parallel)
        # Back and forth, so that no rank always gets the fuller bin.
        rank = position if turn % 2 == 0 else shape.data_parallel - 1 - position
        ranks[rank].append(members)
    merge = max(1, shape.logprob_tokens // budget)
    train = tuple(tuple(tuple(members) for members in own) for own in ranks)
    logprob = tuple(
        tuple(
            tuple(index for members in own[i : i + merge] for index in members)
            for i in range(0, len(own), merge)
        )
        for own in ranks
    )
    return train, logprob


def _forest_schedule(
    rows: Sequence[PlannedRow], shape: ForestShape, shared: SharedPrefixes | None
) -> tuple[Schedule, int]:
    """(schedule of both passes, tokens that a pass runs)."""
    numbers = {row.row_id: number for number, row in enumerate(rows)}
    if shared is None or set(shared.row_ids) != numbers.keys():
        raise ValueError("a forest needs the shared prefixes of exactly the rows of the step")
    order = [numbers[row_id] for row_id in shared.row_ids]
    bins, executed = plan_bins(
        [rows[number].length for number in order],
        shared.shared,
        _align(shape.max_tokens, shape.align),
        ranks=shape.data_parallel,
    )
    schedule = tuple(
        tuple(tuple(order[place] for place in members) for members in own) for own in bins
    )
    return schedule, executed


def _align(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
