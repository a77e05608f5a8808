"""The benchmarks still run, and what they measure arrives in the documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.figures import Goal, figure, slope
from benchmarks.report import Run, plot, replace_between_markers, text_tables, write_documentation

ROOT = Path(__file__).resolve().parent.parent


def quick(out: Path, *names: str) -> Run:
    """A quick run of some benchmarks, or of all."""
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--out", str(out), *names]
    answer = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    run = Run.read(out)
    for row in run.figures:
        assert row.section in answer.stdout
    return run


def test_benchmarks_without_an_engine_run(tmp_path):
    run = quick(tmp_path, "splice", "durable", "reading", "training", "images")
    sections = {row.section for row in run.figures}
    assert sections >= {
        "Resolution and splice",
        "Durable capture",
        "Forests",
        "Images",
        "Training steps",
    }
    assert all(row.ours.median > 0 for row in run.figures)


@pytest.mark.slow
def test_every_benchmark_runs(tmp_path):
    assert "Server" in {row.section for row in quick(tmp_path).figures}


@pytest.fixture
def run():
    made = figure(
        "Section", "the case", "ms", [1.0, 2.0, 3.0],
        peers={"peer": [10.0, 40.0, 30.0]}, limits={"limit": [0.5, 1.0, 1.5]},
        x=1_000, headline="the headline",
    )  # fmt: skip
    goals = (Goal("0.2 of peer", made.other("peer").ratio, 0.2), Goal("1 ms", 2.0, 1.0))
    first = msgspec.structs.replace(made, goals=goals)
    second = msgspec.structs.replace(made, case="another case", x=2_000, headline="")
    return Run(machine="a machine", commit="abc", date="a day", figures=(first, second))


def test_ratio_is_of_neighbouring_rounds(run):
    row = run.figures[0]
    assert (row.ours.median, row.ours.low, row.ours.high) == (2.0, 1.5, 2.5)
    assert row.other("peer").ratio == pytest.approx(0.1)
    assert row.other("limit").ratio == pytest.approx(2.0)


def test_slope_is_the_exponent():
    assert slope([10, 100, 1_000], [3 * x**1.5 for x in (10, 100, 1_000)]) == pytest.approx(1.5)


def test_goals_are_judged(run):
    text = text_tables(run.figures)
    assert "0.2 of peer: 0.1 reached" in text
    assert "1 ms: 2 MISSED" in text
    assert Goal("2 GB/s", 2.5, 2.0, at_least=True).reached
    assert not Goal("2 GB/s", 1.5, 2.0, at_least=True).reached


def test_a_run_is_kept(run, tmp_path):
    run.save(tmp_path)
    assert Run.read(tmp_path) == run


def test_documentation_is_written(run, tmp_path):
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/benchmarks.md"):
        (tmp_path / page).write_text((ROOT / page).read_text())
    write_documentation(run, tmp_path)
    write_documentation(run, tmp_path)
    for page, shown in (
        ("README.md", "| the headline | 2"),
        ("docs/benchmarks.md", "| the case |"),
    ):
        before, after = (ROOT / page).read_text(), (tmp_path / page).read_text()
        assert after.count(shown) == 1
        between = re.compile("<!-- benchmarks: begin -->.*<!-- benchmarks: end -->", re.DOTALL)
        assert between.sub("", after) == between.sub("", before)
    assert "<svg" in (tmp_path / "docs" / "benchmarks.svg").read_text()


def test_a_page_without_markers_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(ValueError, match=re.escape(str(page))):
        replace_between_markers(page, "text")
    assert page.read_text() == "no markers"


def test_a_run_without_curves_has_no_plot(run, tmp_path):
    plot(run.figures[:1], tmp_path / "plot.svg")
    assert not (tmp_path / "plot.svg").exists()
