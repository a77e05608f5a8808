"""Progress of rollouts for the person who watches the run.

Guarantees: one unit of work per step, a part per logical rollout; drops and masks are logged with
their reason as they happen.
"""

import logging

from megatron_forest_trainer.controller.rollouts import DroppedGroup, GroupRequest, Rollout
from megatron_forest_trainer.logging_.progress import Reporter, Work

logger = logging.getLogger(__name__)


class ProgressObserver:
    """Turns rollout events into progress and log lines."""

    def __init__(self, reporter: Reporter, groups: int, group_size: int) -> None:
        self._reporter = reporter
        self._group_size = group_size
        self._groups = groups
        self._work: dict[int, Work] = {}
        self._rewards: dict[int, list[float]] = {}

    def step_started(self, step: int) -> None:
        """Rollouts of `step` begin."""
        self._work[step] = self._reporter.start(
            f"step {step} rollouts", self._groups * self._group_size
        )
        self._rewards[step] = []

    def step_finished(self, step: int) -> None:
        """All rollouts of `step` are back, or given up."""
        self._work.pop(step).finish()
        self._rewards.pop(step)

    def rollout_finished(self, request: GroupRequest, rollout: Rollout) -> None:
        """A rollout came back and was finalised."""
        rewards = self._rewards[request.step]
        rewards.append(rollout.reward)
        finalized = rollout.finalized
        if not finalized.verified:
            logger.warning(
                "rollout %s masked: %s: %s",
                rollout.rollout_id,
                finalized.reason,
                finalized.detail,
            )
        self._work[request.step].advance(note=f"reward {sum(rewards) / len(rewards):.3f}")

    def group_dropped(self, dropped: DroppedGroup) -> None:
        """A group left the step."""
        logger.warning(
            "prompt group %s dropped: %s: %s",
            dropped.request.group_id,
            dropped.reason,
            dropped.detail,
        )
