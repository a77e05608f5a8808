"""What `forest-train inspect` shows of a run."""

import asyncio
import io
import json
from pathlib import Path

import msgspec
import pytest
from megatron_forest_trainer.cli import app
from megatron_forest_trainer.controller import archive
from megatron_forest_trainer.controller.collect import StepGroups
from megatron_forest_trainer.core.filters import Decision
from megatron_forest_trainer.core.metrics import TokenErrors
from megatron_forest_trainer.inspect_.load import InspectError, load_reports, report_snapshot
from megatron_forest_trainer.inspect_.show import as_tables
from rich.console import Console
from typer.testing import CliRunner

from tests.support.forests import Forest
from tests.support.scripted_server import ScriptedServer
from tests.trainer.controller.conftest import MakeCollector, client_of
from tests.trainer.media.support import ImageRollout, picture


@pytest.fixture
def run_dir(server: ScriptedServer, make_collector: MakeCollector, tmp_path: Path) -> Path:
    """A step of one group: a rewritten history with a failed call, and a masked rollout."""

    async def body() -> StepGroups:
        async with client_of(server) as client:
            scripts = [["say 3", "rewrite", "say 2", "say 5"], ["say 4", "shrug fail"]]
            return await make_collector(client, [scripts]).collect(1)

    (group,) = asyncio.run(body()).groups
    first, second = (f"{group.request.group_id}/{r.rollout_id}" for r in group.rollouts)
    archive.save_decisions(
        tmp_path / "run" / "rollouts" / "step000001",
        step=1,
        weight_version="step-0",
        decisions={
            first: Decision(trains=True, votes=True),
            second: Decision(trains=False, votes=False, reason=group.rollouts[1].finalized.reason),
        },
        advantages={first: 0.5, second: 0.0},
        row_errors={f"{first}/s0": TokenErrors(tokens=3, mult=3.3)},
    )
    return tmp_path / "run"


def test_a_run_is_shown_as_forest_rows_and_decisions(run_dir: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(run_dir)], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    text = shown.output
    assert "reward 4.0   advantage +0.5000   trains True   votes True" in text
    assert "+ 5 generated" in text
    assert "root: no_match" in text
    assert "scored" in text
    assert "#1 > #2" in text
    assert "1.100000" in text
    assert "capture_incomplete" in text
    assert "left out: nothing was selected" in text
    assert "failed call" in text


def test_json_holds_the_same_facts(run_dir: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(run_dir), "--json", "--rollout", "r0"])
    (report,) = json.loads(shown.output)
    assert report["reward"] == 4.0
    assert [row["owned_tokens"] for row in report["rows"]] == [3, 7]
    assert [span["owned"] for row in report["rows"] for span in row["spans"]] == [True] * 3
    assert report["rows"][0]["mult_prob_error"] == pytest.approx(1.1)
    parents = [call["parent_call_id"] for call in report["calls"]]
    assert parents == [None, None, report["calls"][1]["call_id"]]
    assert [call["scored"] for call in report["calls"]] == [False, False, True]


def test_images_of_a_call_are_counted(tmp_path: Path) -> None:
    rollout = ImageRollout("r0")
    rollout.see("a", None, [1, picture(1, 2, 2), picture(2, 2, 4)], [3])
    rollout.see("b", "a", [picture(1, 2, 2)], [4])
    rollout.see("c", "b", [5], [6])
    (tmp_path / "receipt.json").write_bytes(msgspec.json.encode(rollout.receipt()))
    shown = CliRunner().invoke(
        app, ["inspect", str(tmp_path / "receipt.json")], env={"COLUMNS": "160"}
    )
    lines = [line for line in shown.output.splitlines() if "prompt" in line]
    assert ["2 images" in lines[0], "1 image" in lines[1], "image" in lines[2]] == [
        True,
        True,
        False,
    ]
    assert "images" not in lines[1]


def test_a_step_a_file_and_a_bare_receipt_can_be_named(run_dir: Path, tmp_path: Path) -> None:
    folder = run_dir / "rollouts" / "step000001"
    assert len(load_reports(folder)) == 2
    file = next(folder.glob("*r1.rollout.json"))
    (report,) = load_reports(file)
    assert report.reason == "capture_incomplete"
    receipt = tmp_path / "receipt.json"
    receipt.write_bytes(msgspec.json.encode(archive.read_rollout(file).receipt))
    (bare,) = load_reports(receipt)
    assert (len(bare.calls), len(bare.failures), bare.rows) == (1, 1, ())
    assert bare.calls[0].why_not == "a receipt does not say what was selected"
    assert load_reports(run_dir, step=1)
    shown = CliRunner().invoke(app, ["inspect", str(receipt)], env={"COLUMNS": "160"})
    assert shown.output.count("does not say what was selected") == 1
    assert "1 captured call\n" in shown.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing"], "does not exist"),
        ([".", "--step", "7"], "no rollout matches"),
        (["empty"], "holds no rollouts"),
        (["rollouts/step000001/decisions.json"], "give its folder rollouts/step000001"),
    ],
)
def test_what_cannot_be_shown_is_said(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(run_dir)
    (run_dir / "empty").mkdir()
    shown = CliRunner().invoke(app, ["inspect", *arguments])
    assert shown.exit_code == 1
    assert told in shown.output


@pytest.mark.requirement("J3")
def test_a_file_of_another_schema_is_refused_by_name(run_dir: Path) -> None:
    file = next((run_dir / "rollouts" / "step000001").glob("*r1.rollout.json"))
    old = {**json.loads(file.read_bytes()), "schema": 4}
    file.write_text(json.dumps(old))
    with pytest.raises(InspectError, match="schema version 4 is not supported"):
        load_reports(file)


@pytest.mark.requirement("F6", "E19")
def test_a_shared_ancestor_is_owned_in_the_first_row_and_borrowed_in_the_second() -> None:
    forest = Forest()
    shared = forest.call(prompt=3, generated=4)
    first = forest.call(shared, prompt=2, generated=5)
    second = forest.call(shared, prompt=2, generated=1)
    snapshot = archive.RolloutSnapshot(
        forest_training=True, step=1, group_id="g0", rollout_id="r0", task_position=0,
        receipt=forest.receipt(), result={}, reward=1.0,
        selected=tuple(call.call_id for call in (shared, first, second)),
        terminal_response_id=second.output.response_id, reason=None, detail="", row_ids=(),
    )  # fmt: skip
    report = report_snapshot(snapshot, None)
    assert [[(s.start, s.end, s.owned) for s in row.spans] for row in report.rows] == [
        [(3, 7, True), (9, 14, True)],
        [(3, 7, False), (9, 10, True)],
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    for part in as_tables(report):
        console.print(part)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "s0 #0 > #1 14 9 3:7 9:14 - -" in lines
    assert "s1 #0 > #2 10 1 9:10 3:7 -" in lines
