"""A scripted server per test, and what runs rollouts against it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from megatron_forest_trainer.config.policies import resolve
from megatron_forest_trainer.controller.book import Book
from megatron_forest_trainer.controller.client import ControlClient
from megatron_forest_trainer.controller.collect import DropPolicy, StepCollector
from megatron_forest_trainer.controller.rollouts import (
    DroppedGroup,
    GroupRequest,
    GroupRunner,
    Rollout,
    RolloutSettings,
)
from megatron_forest_trainer.controller.run_dir import RunDirectory
from megatron_forest_trainer.controller.tasks import TaskStream
from megatron_forest_trainer.store import open_reader

from tests.support.engine import CONTROL_TOKEN
from tests.support.scripted_server import ScriptedServer
from tests.trainer.controller.scripts import Scripted


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 61}))
    (model / "tokenizer.json").write_text("{}")
    with ScriptedServer(tmp_path / "server", model) as running:
        yield running


@dataclass
class Events:
    """Records what an observer hears."""

    finished: list[Rollout] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)

    def step_started(self, step: int) -> None:
        pass

    def step_finished(self, step: int) -> None:
        pass

    def rollout_finished(self, request: GroupRequest, rollout: Rollout) -> None:
        self.finished.append(rollout)

    def group_dropped(self, dropped: DroppedGroup) -> None:
        self.dropped.append(dropped)


MakeCollector = Callable[..., StepCollector]


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def make_collector(server: ScriptedServer, events: Events, tmp_path: Path) -> MakeCollector:
    """A collector of groups whose rollouts follow `scripts`, one list per task."""

    def make(
        client: ControlClient,
        tasks: Sequence[Sequence[Sequence[str]]],
        *,
        groups: int = 1,
        harness: Any = None,
        timeout_s: float | None = 20.0,
        pending_wait_s: float = 5.0,
        concurrent: int = 8,
        extra: dict[str, Any] | None = None,
        **policy: Any,
    ) -> StepCollector:
        run = RunDirectory.open(tmp_path / "run", resume=True)
        settings = RolloutSettings(
            harness=harness or Scripted(),
            model="tiny",
            sampling={"temperature": 1.0},
            options={},
            group_size=len(tasks[0]),
            max_concurrent_attempts=concurrent,
            rollout_timeout_s=timeout_s,
            pending_wait_s=pending_wait_s,
            seed=0,
        )
        book = Book(
            run=run,
            reader=open_reader(store_path=server.store),
            policy=resolve("returned_history"),
            forest_training=True,
            on_evidence_error="mask",
            row_multiple=4,
        )
        stream = [
            {"scripts": [list(script) for script in scripts], "extra": extra or {}}
            for scripts in tasks
        ]
        defaults: dict[str, Any] = {
            "max_dropped_groups": 0,
            "max_replacements": 0,
            "min_step_batch_fraction": None,
            "min_valid_fraction_per_group": None,
        }
        return StepCollector(
            runner=GroupRunner(client, settings, book, events),
            tasks=TaskStream(stream, seed=0, shuffle=False),
            policy=DropPolicy(groups=groups, **(defaults | policy)),
            partition=run.partition,
        )

    return make


def client_of(server: ScriptedServer) -> ControlClient:
    return ControlClient(server.url, CONTROL_TOKEN, backoff_s=0.01)
