"""Filling a step with prompt groups, within the drop budgets.

Guarantees: groups come back in prompt order whatever order they finished in; a failed group is
never sent again; a group below `min_valid_fraction_per_group` is replaced by a fresh prompt within
the replacement budget; the run stops as soon as the step cannot reach its floor, with the
remaining rollouts cancelled.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from forest_schema import Reason

from megatron_forest_trainer.controller.rollouts import (
    DroppedGroup,
    Group,
    GroupRequest,
    GroupRunner,
)
from megatron_forest_trainer.controller.tasks import TaskStream
from megatron_forest_trainer.core.filters import group_problem, step_floor


class DropBudgetExceeded(RuntimeError):
    """More prompt groups were lost than the configuration permits."""

    reason = Reason.DROP_BUDGET_EXCEEDED


@dataclass(frozen=True, slots=True)
class DropPolicy:
    """Which losses a step survives."""

    groups: int
    """`grpo.num_prompts_per_step`."""
    max_dropped_groups: int
    """Groups that the whole run may lose."""
    max_replacements: int
    """Fresh prompts per step in place of groups below the minimum valid fraction."""
    min_step_batch_fraction: float | None
    """Smallest part of `groups` to train on; None accepts any step with one group."""
    min_valid_fraction_per_group: float | None
    """Smallest part of a group's rollouts to be verified; None accepts any."""

    @property
    def floor(self) -> int:
        """Smallest number of groups to train on."""
        return step_floor(self.groups, self.min_step_batch_fraction)


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The prompt groups of one step."""

    groups: tuple[Group, ...]
    dropped: tuple[DroppedGroup, ...]
    """Groups that left the step, replaced or not."""
    replacements: int

    @property
    def lost(self) -> int:
        """Groups that the step is short of."""
        return len(self.dropped) - self.replacements

    @property
    def attempts(self) -> tuple[str, ...]:
        """Every attempt of the step, for cleanup."""
        outcomes: tuple[Group | DroppedGroup, ...] = (*self.groups, *self.dropped)
        return tuple(attempt for outcome in outcomes for attempt in outcome.attempts)

    def dropped_by_reason(self) -> dict[str, int]:
        """Reason -> groups."""
        return dict(Counter(group.reason.value for group in self.dropped))


@dataclass
class StepCollector:
    """Collects the groups of steps; several steps may be collected at the same time."""

    runner: GroupRunner
    tasks: TaskStream
    policy: DropPolicy
    partition: Callable[[int], str]
    """Partition of a step's attempts."""
    next_position: int = 0
    """First task of the stream that no group has taken."""
    taken: dict[str, int] = field(default_factory=dict)
    """Tasks that groups of an interrupted run had taken: group id -> position."""
    dropped_before: int = 0
    """Groups that an interrupted run had lost."""
    _lost: Counter[int] = field(default_factory=Counter)
    """Groups lost, by step."""

    def dropped_until(self, step: int) -> int:
        """Groups that the steps up to `step` lost."""
        return self.dropped_before + sum(n for s, n in self._lost.items() if s <= step)

    async def collect(self, step: int) -> StepGroups:
        """The step's groups. Raises `DropBudgetExceeded`, integrity errors and cancellation."""
        self.runner.observer.step_started(step)
        numbers = itertools.count()
        running = {self._start(step, numbers): None for _ in range(self.policy.groups)}
        complete: list[Group] = []
        dropped: list[DroppedGroup] = []
        replacements = 0
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del running[task]
                    outcome = self._judge(task.result())
                    if isinstance(outcome, Group):
                        complete.append(outcome)
                        continue
                    dropped.append(outcome)
                    if self._replaceable(outcome) and replacements < self.policy.max_replacements:
                        replacements += 1
                        running[self._start(step, numbers)] = None
                    else:
                        self._lose(step, outcome, still_possible=len(complete) + len(running))
        finally:
            await _cancel(running)
            self.runner.observer.step_finished(step)
        complete.sort(key=lambda group: group.request.group_id)
        dropped.sort(key=lambda group: group.request.group_id)
        return StepGroups(tuple(complete), tuple(dropped), replacements)

    def _start(self, step: int, numbers: Iterator[int]) -> "asyncio.Task[Group | DroppedGroup]":
        group_id = f"step{step:06d}-g{next(numbers):04d}"
        position = self.taken.pop(group_id, None)
        if position is None:
            position, self.next_position = self.next_position, self.next_position + 1
            self.runner.book.begun(group_id, step=step, position=position)
        request = GroupRequest(step, group_id, self.partition(step), self.tasks.at(position))
        return asyncio.create_task(self.runner.run(request), name=group_id)

    def _judge(self, outcome: Group | DroppedGroup) -> Group | DroppedGroup:
        if isinstance(outcome, DroppedGroup):
            return outcome
        finalized = [rollout.finalized for rollout in outcome.rollouts]
        reason = group_problem(finalized, self.policy.min_valid_fraction_per_group)
        if reason is None:
            return outcome
        masked = [rollout for rollout in finalized if not rollout.verified]
        counts = Counter(str(rollout.reason) for rollout in masked)
        told = (
            f"{len(finalized) - len(masked)} of {len(finalized)} rollouts verified; masked: "
            f"{dict(counts)}, e.g. {masked[0].detail}"
        )
        lost = DroppedGroup(outcome.request, reason, told, outcome.attempts)
        self.runner.observer.group_dropped(lost)
        return lost

    def _replaceable(self, group: DroppedGroup) -> bool:
        # A group that failed on the way is not sent again: only one that came back with too few
        # verified rollouts is made up for, by another prompt.
        return group.reason is Reason.BELOW_MIN_VALID_FRACTION or (
            group.reason is Reason.NO_VALID_LAYOUT
            and self.policy.min_valid_fraction_per_group is not None
        )

    def _lose(self, step: int, group: DroppedGroup, *, still_possible: int) -> None:
        self._lost[step] += 1
        dropped = self.dropped_before + self._lost.total()
        last = f"the last one was {group.request.group_id}: {group.reason}: {group.detail}"
        limit = self.policy.max_dropped_groups
        if dropped > limit:
            raise DropBudgetExceeded(
                f"step {step}: {dropped} prompt groups of this run were dropped, "
                f"async_rl.rollout_failure.max_dropped_groups permits {limit}; {last}"
            )
        if still_possible < self.policy.floor:
            raise DropBudgetExceeded(
                f"step {step}: {still_possible} of {self.policy.groups} prompt groups are left, "
                f"async_rl.rollout_failure.min_step_batch_fraction = "
                f"{self.policy.min_step_batch_fraction} asks for {self.policy.floor}; {last}"
            )


async def _cancel(running: "dict[asyncio.Task[Group | DroppedGroup], None]") -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
