"""The GRPO loop on rank 0.

Guarantees: step k trains on rollouts whose weights lag at most `max_staleness` steps behind the
ones it updates (0 without asynchronous mode); the server's weights carry the name of the step that
made them before any rollout uses them; a step is recorded after its optimizer step and its weight
update; captures are deleted only for steps that need no repetition; whatever ends the loop, no task
of it goes on.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forest_schema.control import WeightUpdate

from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.controller import archive
from megatron_forest_trainer.controller import step as steps
from megatron_forest_trainer.controller.cleanup import Cleaner
from megatron_forest_trainer.controller.client import ControlClient
from megatron_forest_trainer.controller.collect import StepCollector, StepGroups
from megatron_forest_trainer.controller.recovery import Checkpoints, ControllerState
from megatron_forest_trainer.controller.run_dir import RunDirectory, weight_version
from megatron_forest_trainer.controller.worker import LearnerThread
from megatron_forest_trainer.core.batch import Batch
from megatron_forest_trainer.core.metrics import TokenErrors
from megatron_forest_trainer.core.plan import BatchShape
from megatron_forest_trainer.core.types import DeltaReader
from megatron_forest_trainer.logging_.progress import Reporter
from megatron_forest_trainer.logging_.records import RecordWriter, StepRecord
from megatron_forest_trainer.logging_.step_line import step_line

logger = logging.getLogger(__name__)


class WeightsNotTaken(RuntimeError):
    """The server does not say that it serves the weights that it was given."""


@dataclass
class GrpoLoop:
    """Runs steps until `grpo.max_num_steps`."""

    config: Config
    run_directory: RunDirectory
    client: ControlClient
    learner: LearnerThread
    reader: DeltaReader
    collector: StepCollector
    cleaner: Cleaner
    writer: RecordWriter
    shape: BatchShape
    reporter: Reporter
    checkpoints: Checkpoints | None
    """None where the run writes no checkpoints."""
    completed: int = 0
    """Optimizer steps that the learner's weights have behind them."""
    _collecting: dict[int, "asyncio.Task[StepGroups]"] = field(default_factory=dict)

    async def run(self) -> None:
        """Train until the last step. Raises what stops the run."""
        last = self.config.grpo.max_num_steps
        try:
            await self.publish_weights(self.completed)
            for step in range(self.completed + 1, last + 1):
                started = time.monotonic()
                for ahead in range(step, min(step + self._staleness, last) + 1):
                    self._start_collecting(ahead)
                collected = await self._collecting.pop(step)
                record = await self.train(step, collected, started)
                self.writer.write(record)
                logger.info("%s", step_line(record, last))
                await self.cleaner.step_done(step, collected.attempts)
                if step % self.config.checkpointing.save_period == 0 or step == last:
                    await self.save_checkpoint()
        finally:
            await self._stop_collecting()
        await self.cleaner.run_done()

    async def train(self, step: int, collected: StepGroups, started: float) -> StepRecord:
        """One optimizer step on `collected`, and its weights to the server.

        `started` is the monotonic time at which the step began. Raises `NoRetainedTokens` before
        the optimizer step where nothing is left to train on.
        """
        rollouts_done = time.monotonic()
        groups = steps.prompt_groups(collected.groups)
        shared = await asyncio.to_thread(steps.shared_tokens, groups, self.shape, self.reader)
        layout = steps.plan(step, groups, self.config, self.shape, shared=shared)
        with self.reporter.start(f"step {step} training", 3) as work:
            row_errors = await self.learner.logprobs(layout.plan)
            work.advance(note="log-probabilities")
            batch = steps.plan(step, groups, self.config, self.shape, row_errors, shared)
            stats = await self.learner.train_step(batch.plan)
            work.advance(note="optimizer step")
            self.completed = step
            await self._save_decisions(step, batch, row_errors)
            await self.publish_weights(step)
            work.advance(note="weights served")
        done = time.monotonic()
        return steps.step_record(
            step,
            weight_version=weight_version(step),
            collected=collected,
            groups=groups,
            batch=batch,
            row_errors=row_errors,
            stats=stats,
            replayed=self.config.policy.router_replay.enabled,
            rollout_s=rollouts_done - started,
            train_s=done - rollouts_done,
            step_s=done - started,
        )

    async def _save_decisions(
        self, step: int, batch: Batch, row_errors: Mapping[str, TokenErrors]
    ) -> None:
        await asyncio.to_thread(
            archive.save_decisions,
            self.run_directory.rollouts(step),
            step=step,
            weight_version=weight_version(step - 1),
            decisions=batch.decisions,
            advantages=batch.advantages,
            row_errors=row_errors,
        )

    async def publish_weights(self, step: int) -> None:
        """Export the learner's weights and load them into the running server."""
        directory, version = self.run_directory.weights(step), weight_version(step)
        if directory.exists():
            await asyncio.to_thread(shutil.rmtree, directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        await self.learner.export_hf(directory)
        state = await self.client.update_weights(WeightUpdate(path=str(directory), version=version))
        if state.weight_version != version or state.paused:
            raise WeightsNotTaken(
                f"after the update to {version} the server reports {state.weight_version!r}, "
                f"{'paused' if state.paused else 'running'}"
            )
        await asyncio.to_thread(self.run_directory.prune_weights)

    async def save_checkpoint(self) -> None:
        """Write the state after the completed steps, if the run writes checkpoints."""
        if self.checkpoints is None:
            return
        step = self.completed
        await self.learner.save(await asyncio.to_thread(self.checkpoints.prepare, step))
        state = ControllerState(
            run_id=self.run_directory.run_id,
            step=step,
            forest_training=self.config.token_capture.forest_training,
            row_multiple=self.shape.row_multiple,
            dropped_groups=self.collector.dropped_until(step),
            next_position=self.collector.next_position,
        )
        await asyncio.to_thread(self.checkpoints.complete, state)
        await self.cleaner.checkpoint_saved()

    @property
    def _staleness(self) -> int:
        mode = self.config.async_rl
        return mode.max_staleness if mode.enabled else 0

    def _start_collecting(self, step: int) -> None:
        if step not in self._collecting:
            self._collecting[step] = asyncio.create_task(
                self.collector.collect(step), name=f"rollouts of step {step}"
            )

    async def _stop_collecting(self) -> None:
        tasks: Sequence[asyncio.Task[StepGroups]] = tuple(self._collecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._collecting.clear()
