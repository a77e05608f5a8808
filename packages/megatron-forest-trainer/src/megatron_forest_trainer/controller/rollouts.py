"""Running prompt groups: attempts in parallel, each through the user's harness.

Guarantees: at most `max_concurrent_attempts` attempts are open at once; a rollout without a result
(timeout, transport failure, an exception of the harness) drops its whole prompt group, which is not
sent again; a rollout whose capture cannot be verified is masked inside its group by finalisation;
an integrity error stops everything; cancellation passes through. A group either comes back
complete, in generation order, or dropped with one reason and the attempts that it opened.
"""

import asyncio
import importlib
import logging
import math
import random
import ssl
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import httpx
import msgspec
import openai
from forest_schema import Reason, Receipt
from forest_schema.control import OpenAttempt

from megatron_forest_trainer.controller.book import Book
from megatron_forest_trainer.controller.client import (
    IDLE_S,
    ControlClient,
    ControlError,
    TransportFailure,
)
from megatron_forest_trainer.controller.harness import Harness
from megatron_forest_trainer.controller.tasks import Task
from megatron_forest_trainer.core.types import Finalized

logger = logging.getLogger(__name__)

# The generation of httpx that the installed openai is built on: while a stream is read, its errors
# reach the harness as they are.
_CLIENT_HTTP = importlib.import_module(
    type(openai.DEFAULT_CONNECTION_LIMITS).__module__.partition(".")[0]
)

_TRANSPORT_ERRORS = (
    openai.APIConnectionError,
    openai.InternalServerError,
    _CLIENT_HTTP.TransportError,
    httpx.TransportError,
    TransportFailure,
)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What every rollout of a run shares."""

    harness: Harness
    model: str
    sampling: Mapping[str, Any]
    """Sampling fields of the OpenAI request; each rollout gets its own `seed` beside them."""
    options: Mapping[str, Any]
    """Harness options of the configuration."""
    group_size: int
    max_concurrent_attempts: int
    rollout_timeout_s: float | None
    """Seconds for the harness to come back with a result; None waits for ever."""
    pending_wait_s: float
    """Seconds that closing waits for admitted calls."""
    seed: int
    api_key: str = "forest"
    """vLLM's own `--api-key`, where the server has one."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A prompt group to run."""

    step: int
    group_id: str
    partition: str
    task: Task


@dataclass(frozen=True, slots=True)
class Rollout:
    """One logical rollout with its verified rows, or with the reason of its mask."""

    rollout_id: str
    receipt: Receipt
    result: dict[str, Any]
    reward: float
    finalized: Finalized


@dataclass(frozen=True, slots=True)
class Group:
    """A complete prompt group."""

    request: GroupRequest
    rollouts: tuple[Rollout, ...]
    """All siblings in generation order."""

    @property
    def attempts(self) -> tuple[str, ...]:
        """Attempts to clean up."""
        return tuple(rollout.receipt.attempt_id for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A prompt group that left the step."""

    request: GroupRequest
    reason: Reason
    detail: str
    attempts: tuple[str, ...]
    """Attempts that it opened, to clean up."""


class RolloutObserver(Protocol):
    """Hears of progress while groups run."""

    def step_started(self, step: int) -> None:
        """Rollouts of `step` begin."""
        ...

    def step_finished(self, step: int) -> None:
        """All rollouts of `step` are back, or given up."""
        ...

    def rollout_finished(self, request: GroupRequest, rollout: Rollout) -> None:
        """A rollout came back and was finalised."""
        ...

    def group_dropped(self, dropped: DroppedGroup) -> None:
        """A group left the step."""
        ...


class RolloutFailed(Exception):
    """A rollout ended without a result that can be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass
class GroupRunner:
    """Runs prompt groups against one server."""

    client: ControlClient
    settings: RolloutSettings
    book: Book
    observer: RolloutObserver
    finished: dict[str, Rollout] = field(default_factory=dict)
    """Rollouts of an interrupted run to use again, by id."""
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.settings.max_concurrent_attempts)

    async def run(self, request: GroupRequest) -> Group | DroppedGroup:
        """The whole group, or why it was dropped. Integrity errors and cancellation raise."""
        opened: list[str] = []
        try:
            async with asyncio.TaskGroup() as siblings:
                tasks = [
                    siblings.create_task(self._rollout(request, index, opened))
                    for index in range(self.settings.group_size)
                ]
        except BaseExceptionGroup as errors:
            failures = [e for e in errors.exceptions if isinstance(e, RolloutFailed)]
            for error in errors.exceptions:
                if not isinstance(error, RolloutFailed):
                    raise error from None
            await self._abandon(opened)
            dropped = DroppedGroup(
                request, failures[0].reason, failures[0].detail, attempts=tuple(opened)
            )
            self.observer.group_dropped(dropped)
            return dropped
        group = Group(request, tuple(task.result() for task in tasks))
        await asyncio.to_thread(
            self.book.group,
            request.group_id,
            [rollout.finalized for rollout in group.rollouts],
            step=request.step,
            position=request.task.position,
        )
        return group

    async def _rollout(self, request: GroupRequest, index: int, opened: list[str]) -> Rollout:
        rollout_id = f"{request.group_id}-r{index}"
        finished = self.finished.pop(rollout_id, None)
        if finished is not None:
            opened.append(finished.receipt.attempt_id)
            self.observer.rollout_finished(request, finished)
            return finished
        async with self._slots:
            attempt_id, base_path = await self._open(request, rollout_id)
            opened.append(attempt_id)
            self.book.opened(rollout_id, attempt_id, step=request.step)
            result = await self._episode(request, index, base_path)
            reward = _reward(result)
            receipt = await self._close(attempt_id)
        finalized = await asyncio.to_thread(
            self.book.rollout,
            receipt,
            result,
            reward,
            step=request.step,
            position=request.task.position,
        )
        rollout = Rollout(rollout_id, receipt, result, reward, finalized)
        self.observer.rollout_finished(request, rollout)
        return rollout

    async def _open(self, request: GroupRequest, rollout_id: str) -> tuple[str, str]:
        try:
            answer = await self.client.open_attempt(
                OpenAttempt(
                    rollout_id=rollout_id,
                    group_id=request.group_id,
                    partition=request.partition,
                    metadata={"task_position": request.task.position},
                )
            )
        except TransportFailure as error:
            raise RolloutFailed(Reason.TRANSPORT_FAILURE, str(error)) from error
        return answer.attempt_id, answer.base_path

    async def _episode(self, request: GroupRequest, index: int, base_path: str) -> dict[str, Any]:
        settings = self.settings
        # One connection pool per attempt: a harness that closes its client after an ambiguous
        # read must not close its siblings' connections.
        async with openai.AsyncOpenAI(
            base_url=self.client.url + base_path,
            api_key=settings.api_key,
            max_retries=0,
            timeout=openai.Timeout(settings.rollout_timeout_s, connect=30.0),
            http_client=openai.DefaultAsyncHttpxClient(
                verify=_tls_context(), limits=_CLIENT_HTTP.Limits(keepalive_expiry=IDLE_S)
            ),
        ) as client:
            deadline = asyncio.timeout(settings.rollout_timeout_s)
            try:
                async with deadline:
                    return await settings.harness(
                        client,
                        dict(request.task.data),
                        model=settings.model,
                        sampling={
                            **settings.sampling,
                            "seed": rollout_seed(settings.seed, request.group_id, index),
                        },
                        options=dict(settings.options),
                    )
            except Exception as error:
                if deadline.expired():
                    raise RolloutFailed(
                        Reason.ROLLOUT_TIMEOUT,
                        f"no result after async_rl.rollout_failure.rollout_timeout_s = "
                        f"{settings.rollout_timeout_s} s",
                    ) from error
                if isinstance(error, _TRANSPORT_ERRORS):
                    raise RolloutFailed(
                        Reason.TRANSPORT_FAILURE, f"{type(error).__name__}: {error}"
                    ) from error
                logger.warning(
                    "harness failed in rollout %s-r%d:\n%s",
                    request.group_id,
                    index,
                    "".join(traceback.format_exception(error)),
                )
                raise RolloutFailed(
                    Reason.HARNESS_ERROR, f"{type(error).__name__}: {error}"
                ) from error

    async def _close(self, attempt_id: str) -> Receipt:
        try:
            return await self.client.close_attempt(attempt_id, wait_s=self.settings.pending_wait_s)
        except TransportFailure as error:
            raise RolloutFailed(Reason.TRANSPORT_FAILURE, str(error)) from error

    async def _abandon(self, attempts: list[str]) -> None:
        """Close admissions of a dropped group; what stays open goes with the partition."""
        for attempt_id in attempts:
            try:
                await self.client.close_attempt(attempt_id, wait_s=0.0)
            except (TransportFailure, ControlError) as error:
                logger.warning("attempt %s of a dropped group stays open: %s", attempt_id, error)


def rollout_seed(seed: int, group_id: str, index: int) -> int:
    """A sampling seed that depends only on the run's seed, the group and the generation."""
    return random.Random(f"{seed}/{group_id}/{index}").getrandbits(31)


def _reward(result: Any) -> float:
    if not isinstance(result, dict):
        raise RolloutFailed(
            Reason.HARNESS_ERROR, f"the harness returned {type(result).__name__}, not a dict"
        )
    reward = result.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutFailed(
            Reason.HARNESS_ERROR, f"result['reward'] is {reward!r}, not a finite number"
        )
    try:
        msgspec.json.encode(result)
    except (TypeError, ValueError) as error:
        raise RolloutFailed(
            Reason.HARNESS_ERROR, f"the harness's result is not plain JSON data: {error}"
        ) from error
    return float(reward)


@cache
def _tls_context() -> ssl.SSLContext:
    # Loading the certificate store takes milliseconds; one context serves all attempts.
    return ssl.create_default_context()
