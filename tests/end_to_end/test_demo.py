"""The demo from nothing to its table, with real parts only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import EXAMPLES

FOLDERS = {"boxes": "toolbox", "images": "pictures"}
"""Flavour of the demo -> where its model is made."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.requirement("L3", "L4")
@pytest.mark.parametrize(
    ("flavour", "options"),
    [("boxes", []), ("boxes", ["--forest-execution"]), ("images", [])],
)
def test_the_demo_holds_its_own_gates_and_leaves_its_results(
    tmp_path: Path, flavour: str, options: list[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    script = EXAMPLES / FOLDERS[flavour] / "make_model.py"
    subprocess.run([sys.executable, str(script), str(model)], check=True)
    subprocess.run(
        [sys.executable, str(EXAMPLES / "toolbox" / "run.py"), "--flavour", flavour,
         "--out", str(out), "--model", str(model), *options],
        check=True,
    )  # fmt: skip
    records = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert len(records) >= 10
    assert any(r["valid_rows"] > r["logical_rollouts"] for r in records)
    fewer = all(r["executed_tokens"] < r["row_tokens"] for r in records)
    assert fewer == bool(options)
    assert (out / "table.txt").read_text().count("\n") > len(records)
    assert list((out / "store").rglob("*.safetensors"))


@pytest.mark.requirement("K10", "L4")
def test_a_wrong_override_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "toolbox" / "run.py"), "--out", str(out), "grpo.sed=7"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "grpo.sed: unknown key; did you mean grpo.seed?" in ended.stdout
    assert not (out / "server.log").exists()
