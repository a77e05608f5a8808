"""A killed run goes on: nothing is trained twice, nothing usable is lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forest_schema import CallRecord, Reason, SchemaError
from megatron_forest_trainer.config import load_config
from megatron_forest_trainer.controller import archive, journal
from megatron_forest_trainer.controller.archive import SnapshotRefused
from megatron_forest_trainer.controller.recovery import (
    Checkpoints,
    ControllerState,
    recover,
)
from megatron_forest_trainer.controller.run_dir import RunDirectory, RunExists
from megatron_forest_trainer.controller.setup import set_up
from megatron_forest_trainer.controller.tasks import TaskStream, load_tasks
from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.filters import Decision
from megatron_forest_trainer.core.metrics import TokenErrors
from megatron_forest_trainer.core.types import Finalized
from megatron_forest_trainer.logging_.records import read_records
from megatron_forest_trainer.store import open_reader
from vllm_forest_renderer.errors import AttemptError

from tests.support.byte_model import make_byte_model
from tests.support.engine import wait_until
from tests.support.forests import Forest
from tests.support.scripted_server import ScriptedServer
from tests.trainer.controller.training import ForkedRun, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture
def server(tmp_path: Path, model: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path / "server", model, vocab=259) as running:
        yield running


SETTINGS: Any = {
    "forest_training": True,
    "row_multiple": 1,
    "require_routes": False,
    "on_evidence_error": "mask",
}
"""What `recover` compares saved rollouts with."""


def config_of(
    server: ScriptedServer, model: Path, tmp_path: Path, *, save_period: int = 1, **sections: Any
) -> Path:
    return write_config(
        tmp_path,
        url=server.url,
        token_file=server.token_file,
        model=model,
        **{
            "harness": {"target": "tests.trainer.controller.agents:say_four"},
            "checkpointing": {"enabled": True, "save_period": save_period},
            "grpo": {"max_num_steps": 3},
            **sections,
        },
    )


def stall(tasks: Path, position: int) -> None:
    """The task at `position` waits for the server's gate in its last call."""
    loaded = load_tasks(tasks)
    loaded[TaskStream(loaded, seed=42).at(position).index]["last"] = "wait"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in loaded))


def chats(server: ScriptedServer) -> int:
    return sum(request.endswith("/chat/completions") for request in server.requests)


@pytest.mark.requirement("I20", "J1", "J6", "H10")
@pytest.mark.parametrize(("save_period", "repeated_chats"), [(1, 6 + 12), (2, 12 + 12)])
def test_a_run_killed_in_the_middle_of_a_step_goes_on(
    server: ScriptedServer,
    model: Path,
    tmp_path: Path,
    save_period: int,
    repeated_chats: int,
) -> None:
    """Killed in step 2, when one of its groups is complete and the other is in mid-attempt.

    With a checkpoint after step 1 the complete group is used again. With checkpoints every second
    step the run starts again from its initial weights: step 1 is trained from its archived
    rollouts, and step 2's group, which weights of the lost history generated, runs again.
    """
    config = config_of(server, model, tmp_path, save_period=save_period)
    stall(tmp_path / "tasks.jsonl", 2)
    out = tmp_path / "out"
    second = out / "rollouts" / "step000002"
    running = ForkedRun(config)
    try:
        wait_until(
            lambda: server.open_now == 2 and len(list(second.glob("*.rollout.json"))) == 2, 120
        )
    finally:
        running.kill()
    assert [record["step"] for record in read_records(out)] == [1]
    first_step = {f: f.read_bytes() for f in (out / "rollouts" / "step000001").glob("*.json")}
    first_step = {f: d for f, d in first_step.items() if f.name != archive.DECISIONS_FILE}
    unfinished = set(journal.attempts(second)) - {
        snapshot.receipt.attempt_id for snapshot in archive.read_rollouts(second)
    }
    assert len(unfinished) == 2
    server.gate.set()
    before, updates = chats(server), list(server.engine.updates)
    assert updates == ["step-0", "step-1"]

    again = ForkedRun(config)
    assert again.wait() == 0, again.stderr
    records = read_records(out)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["logical_rollouts"] == 4 for record in records)
    assert chats(server) - before == repeated_chats
    start = [] if save_period == 1 else ["step-0"]
    assert server.engine.updates == [*updates, *start, "step-1", "step-2", "step-3"]
    # Rows and padding of the first step are byte for byte what they were.
    assert {f: f.read_bytes() for f in first_step} == first_step
    # Every prompt was used once: groups kept the tasks that they had taken.
    positions = [
        group.task_position
        for step in (1, 2, 3)
        for group in archive.read_groups(out / "rollouts" / f"step{step:06d}")
    ]
    assert sorted(positions) == list(range(6))
    for attempt in unfinished:
        assert f"DELETE /v1/forest/control/attempts/{attempt}" in server.requests
        with pytest.raises(AttemptError):
            server.run(server.capture.ledger.receipt(attempt))
    assert list(server.store.glob("*/*.safetensors")) == []


@pytest.mark.requirement("J1")
def test_a_finished_run_has_nothing_more_to_do(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    config = config_of(server, model, tmp_path, grpo={"max_num_steps": 1})
    assert ForkedRun(config).wait() == 0
    before = chats(server)
    again = ForkedRun(config)
    assert again.wait() == 0, again.stderr
    assert chats(server) == before
    longer = ForkedRun(config, "grpo.max_num_steps=2")
    assert longer.wait() == 0, longer.stderr
    assert [record["step"] for record in read_records(tmp_path / "out")] == [1, 2]


# What cannot be continued, without any process.


@pytest.fixture
def saved(server: ScriptedServer, model: Path, tmp_path: Path) -> tuple[Path, RunDirectory]:
    """A configuration whose run has a checkpoint after step 2."""
    config = config_of(server, model, tmp_path)
    run = set_up(load_config(config, for_training=True)).run
    state = ControllerState(
        run_id=run.run_id,
        step=2,
        forest_training=True,
        row_multiple=1,
        dropped_groups=1,
        next_position=4,
    )
    Checkpoints(run.root / "checkpoints", None).complete(state)
    return config, run


def test_a_run_continues_from_its_newest_checkpoint(saved: tuple[Path, RunDirectory]) -> None:
    config, run = saved
    (run.root / "checkpoints" / "step-7" / "learner").mkdir(parents=True)
    setup = set_up(load_config(config, for_training=True))
    # The checkpoint after step 7 was never completed.
    assert setup.state is not None
    assert (setup.state.step, setup.state.next_position, setup.run.run_id) == (2, 4, run.run_id)


@pytest.mark.requirement("J4", "J5")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("token_capture.forest_training=false", r"token_capture\.forest_training: true; resume"),
        ("policy.train_micro_batch_size=2", "a multiple of 1 rows, this run pads to 2"),
    ],
)
def test_another_mode_or_row_multiple_is_refused(
    saved: tuple[Path, RunDirectory], override: str, told: str
) -> None:
    with pytest.raises(SnapshotRefused, match=told):
        set_up(load_config(saved[0], [override], for_training=True))


@pytest.mark.requirement("J2", "J3", "J7")
@pytest.mark.parametrize("schema", [2, 3, 4, 6])
def test_a_checkpoint_of_another_schema_is_refused_by_name(
    saved: tuple[Path, RunDirectory], schema: int
) -> None:
    config, run = saved
    path = run.root / "checkpoints" / "step-2" / "controller.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "schema": schema}))
    with pytest.raises(SchemaError, match=f"schema version {schema} is not supported"):
        set_up(load_config(config, for_training=True))


def test_the_checkpoint_of_another_run_is_refused(saved: tuple[Path, RunDirectory]) -> None:
    config, run = saved
    (run.root / "run.json").write_text('{"run_id": "other"}')
    with pytest.raises(SnapshotRefused, match="holds run other"):
        set_up(load_config(config, for_training=True))


def test_a_folder_with_a_trained_run_is_not_overwritten(saved: tuple[Path, RunDirectory]) -> None:
    config, run = saved
    (run.root / "steps.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunExists, match=r"checkpointing\.resume: true"):
        set_up(load_config(config, ["checkpointing.resume=false"], for_training=True))


def test_an_earlier_start_that_trained_nothing_is_cleared_away(tmp_path: Path) -> None:
    first = RunDirectory.open(tmp_path / "run", resume=False)
    journal.append(first.rollouts(1), journal.GroupBegun("g", 0))
    second = RunDirectory.open(tmp_path / "run", resume=False)
    assert second.run_id != first.run_id
    assert second.stale == (first.partition(1),)
    assert second.begun_steps() == []


@pytest.mark.requirement("H10", "F12")
def test_a_group_whose_rows_are_not_the_saved_ones_is_refused(tmp_path: Path) -> None:
    common: Any = {"step": 1, "group_id": "g", "task_position": 0, "forest_training": True}
    archive.save_group(tmp_path, [], row_multiple=4, **common)
    archive.save_group(tmp_path, [], row_multiple=4, **common)
    with pytest.raises(IntegrityError, match="not those that were saved"):
        archive.save_group(tmp_path, [], row_multiple=8, **common)


@pytest.mark.parametrize("mult", [float("nan"), float("inf")])
def test_decisions_about_a_row_without_a_finite_error_can_be_read(
    tmp_path: Path, mult: float
) -> None:
    archive.save_decisions(
        tmp_path,
        step=1,
        weight_version="step-0",
        decisions={"g/r": Decision(False, True, Reason.LOGPROB_ERROR_ABOVE_THRESHOLD)},
        advantages={"g/r": 0.0},
        row_errors={"g/r/s0": TokenErrors(tokens=2, mult=mult, gen_kl=0.5)},
    )
    found = archive.read_decisions(tmp_path)
    assert found is not None
    error = found.row_errors["g/r/s0"]
    assert (error.tokens, error.gen_kl) == (2, 0.5)
    assert error.mult > 1e300


@pytest.mark.requirement("J1")
def test_a_torn_journal_line_is_ignored(tmp_path: Path) -> None:
    journal.append(tmp_path, journal.GroupBegun("g0", 3))
    journal.append(tmp_path, journal.AttemptOpened("g0-r0", "att_1"))
    with (tmp_path / journal.JOURNAL_FILE).open("ab") as file:
        file.write(b'{"type": "attempt", "roll')
    assert journal.positions(tmp_path) == {"g0": 3}
    assert journal.attempts(tmp_path) == {"att_1": "g0-r0"}
    # A resumed run goes on in the same file.
    journal.append(tmp_path, journal.GroupBegun("g1", 4))
    assert journal.positions(tmp_path) == {"g0": 3, "g1": 4}
    assert journal.attempts(tmp_path) == {"att_1": "g0-r0"}


@pytest.mark.requirement("J4")
def test_a_rollout_of_another_mode_is_refused(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    run = RunDirectory.open(tmp_path / "run", resume=True)
    folder = run.rollouts(1)
    folder.mkdir(parents=True)
    receipt = {
        "store": "s", "partition": "p", "attempt_id": "att_1", "rollout_id": "r", "group_id": "g",
        "closed": True, "calls": [], "schema": 3,
    }  # fmt: skip
    snapshot = msgspec.convert(
        {
            "forest_training": False, "step": 1, "group_id": "g", "rollout_id": "r",
            "task_position": 0, "receipt": receipt, "result": {}, "reward": 0.0, "selected": [],
            "terminal_response_id": None, "reason": "capture_incomplete", "detail": "",
            "row_ids": [],
        },
        archive.RolloutSnapshot,
    )  # fmt: skip
    archive.rollout_file(folder, "r").write_bytes(msgspec.json.encode(snapshot))
    with (
        open_reader(store_path=server.store) as reader,
        pytest.raises(SnapshotRefused, match="rollout r was saved with"),
    ):
        recover(run, None, reader, **SETTINGS)


@pytest.mark.requirement("J6", "F11")
def test_a_saved_rollout_without_routes_is_refused_where_they_are_required(tmp_path: Path) -> None:
    forest = Forest(mixture=(1, 1, 4))
    routed, dense = forest.call(), forest.call(routed=False)

    def saved(selected: CallRecord) -> archive.RolloutSnapshot:
        finalized = Finalized(
            group_id="g0", rollout_id="r0", attempt_id="att_0", selected=(selected.call_id,)
        )
        archive.save_rollout(
            tmp_path, forest.receipt(), {}, 0.0, finalized, step=1, task_position=0,
            forest_training=True,
        )  # fmt: skip
        return archive.read_rollout(archive.rollout_file(tmp_path, "r0"))

    archive.check_routes(saved(routed))
    with pytest.raises(SnapshotRefused, match=f"{dense.call_id} has no routed experts"):
        archive.check_routes(saved(dense))


@pytest.mark.requirement("J1", "J6", "F11")
@pytest.mark.parametrize(
    ("reason", "masks", "lifts", "key"),
    [
        (
            Reason.MISSING_ROUTES,
            {"require_routes": True},
            {"require_routes": False},
            "policy.router_replay.on_missing_routes",
        ),
        (
            Reason.EVIDENCE_ERROR,
            {"on_evidence_error": "mask"},
            {"on_evidence_error": "raise"},
            "token_capture.on_evidence_error",
        ),
    ],
    ids=["routes", "evidence"],
)
def test_a_rollout_runs_again_once_its_mask_is_lifted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reason: Reason,
    masks: dict[str, Any],
    lifts: dict[str, Any],
    key: str,
) -> None:
    """Its sibling, which no key masked, stays as it was judged."""
    run = RunDirectory.open(tmp_path / "run", resume=True)
    folder = run.rollouts(1)
    judged = {"r0": reason, "r1": Reason.CAPTURE_PENDING}
    finalized = []
    journal.append(folder, journal.GroupBegun("g0", 5))
    for rollout_id, why in judged.items():
        forest = Forest(attempt_id=f"att_{rollout_id}", rollout_id=rollout_id)
        forest.call()
        receipt = msgspec.structs.replace(forest.receipt(), calls=())
        journal.append(folder, journal.AttemptOpened(rollout_id, receipt.attempt_id))
        finalized.append(
            Finalized(
                group_id="g0", rollout_id=rollout_id, attempt_id=receipt.attempt_id, reason=why
            )
        )
        archive.save_rollout(
            folder, receipt, {}, 0.0, finalized[-1], step=1, task_position=5, forest_training=True
        )
    archive.save_group(
        folder, finalized, step=1, group_id="g0", task_position=5, row_multiple=1,
        forest_training=True,
    )  # fmt: skip
    reader = Forest().reader()

    left = recover(run, None, reader, **SETTINGS | masks)
    assert {name: rollout.finalized.reason for name, rollout in left.rollouts.items()} == judged
    assert (left.abandoned, len(archive.read_groups(folder))) == ((), 1)
    with caplog.at_level("INFO"):
        left = recover(run, None, reader, **SETTINGS | lifts)
    assert list(left.rollouts) == ["r1"]
    assert (left.abandoned, left.positions) == (("att_r0",), {"g0": 5})
    assert archive.read_groups(folder) == []
    told = f"rollout r0 was masked ({reason}) and runs again: {key} no longer masks it"
    assert told in caplog.messages
