"""Tables, plot and documentation from the figures of a run.

    python -m benchmarks.report OUT_DIR [--write]

Guarantees: everything shown is in `OUT_DIR/figures.json`; `--write` replaces only what lies between
the markers of README.md and docs/benchmarks.md, and docs/benchmarks.svg.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import Figure, Goal, Other, Spread

ROOT = Path(__file__).resolve().parent.parent
FIGURES_FILE = "figures.json"
PLOT_FILE = "benchmarks.svg"
_BEGIN, _END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: where it was measured, and what."""

    machine: str
    commit: str
    date: str
    figures: tuple[Figure, ...]

    @classmethod
    def read(cls, directory: Path) -> "Run":
        """The run that was saved in `directory`."""
        return msgspec.json.decode((directory / FIGURES_FILE).read_bytes(), type=cls)

    def save(self, directory: Path) -> None:
        """Keep the run in `directory`."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (directory / FIGURES_FILE).write_bytes(data + b"\n")


def number(value: float) -> str:
    """Three significant digits, without powers of ten."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = f"{value:.3g}"
    return f"{value:.6f}".rstrip("0") if "e" in digits else digits


def _spread(spread: Spread) -> str:
    half = (spread.high - spread.low) / 2
    return number(spread.median) + (f" ±{number(half)}" if spread.rounds > 1 else "")


def _beside(other: Other) -> str:
    return f"{_spread(other.spread)} ({number(other.ratio)}x)"


def _goal(goal: Goal) -> str:
    return f"{goal.text}: {number(goal.value)} {'reached' if goal.reached else 'MISSED'}"


def _sections(figures: Sequence[Figure]) -> Iterator[tuple[str, list[Figure], list[str]]]:
    """(section, its rows, the names of everything that stands beside ours)."""
    sections: dict[str, list[Figure]] = {}
    for row in figures:
        sections.setdefault(row.section, []).append(row)
    for section, rows in sections.items():
        peers = [other.name for row in rows for other in row.others if not other.limit]
        limits = [other.name for row in rows for other in row.others if other.limit]
        yield section, rows, list(dict.fromkeys(peers + limits))


def _cells(rows: Sequence[Figure], names: Sequence[str]) -> list[list[str]]:
    """Header and lines of one section; columns that would be empty are left out."""
    table = [["", "unit", "Forest", *names, "goal"]]
    for row in rows:
        beside = {other.name: _beside(other) for other in row.others}
        goals = "; ".join(_goal(goal) for goal in row.goals)
        cells = [beside.get(name, "") for name in names]
        table.append([row.case, row.unit, _spread(row.ours), *cells, goals])
    if not any(line[-1] for line in table[1:]):
        table = [line[:-1] for line in table]
    return table


def text_tables(figures: Sequence[Figure]) -> str:
    """The report for a terminal."""
    lines: list[str] = []
    for section, rows, names in _sections(figures):
        table = _cells(rows, names)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", section, "-" * len(section)]
        for cells in table:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _markdown(table: Sequence[Sequence[str]]) -> list[str]:
    header, *lines = (f"| {' | '.join(cells)} |" for cells in table)
    return [header, "|" + " --- |" * len(table[0]), *lines]


def markdown_tables(run: Run) -> str:
    """The whole report for docs/benchmarks.md."""
    lines = [_origin(run)]
    for section, rows, names in _sections(run.figures):
        lines += ["", f"### {section}", *_markdown(_cells(rows, names))]
    return "\n".join(lines)


def markdown_headlines(run: Run) -> str:
    """The short table for README.md."""
    table = [["", "Forest", "beside it", "physical limit"]]
    for row in run.figures:
        if row.headline:
            peers, limits = (
                "; ".join(
                    f"{other.name} {number(other.spread.median)} ({number(other.ratio)}x)"
                    for other in row.others
                    if other.limit == limit
                )
                for limit in (False, True)
            )
            table.append([row.headline, f"{_spread(row.ours)} {row.unit}", peers, limits])
    return "\n".join([_origin(run), "", *_markdown(table)])


def _origin(run: Run) -> str:
    return (
        f"Measured by `make bench` on {run.machine}, {run.date}, commit {run.commit}. Medians "
        "±half the interquartile range; in brackets: Forest divided by it."
    )


def plot(figures: Sequence[Figure], path: Path) -> None:
    """One panel per section whose rows have an `x`, on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "forest", "svg.fonttype": "none", "font.size": 8}
    panels = []
    for section, rows, names in _sections(figures):
        shown = [row for row in rows if row.x is not None]
        if len({row.x for row in shown}) > 1:
            panels.append((section, shown, names))
    if not panels:
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    whole, axes = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        _panel(axis, *panel)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    whole.savefig(path, metadata={"Date": None})
    pyplot.close(whole)


def _panel(axis: Any, section: str, rows: Sequence[Figure], names: Sequence[str]) -> None:
    for name in ("Forest", *names):
        points = []
        for row in rows:
            found = [row.ours] if name == "Forest" else [
                other.spread for other in row.others if other.name == name
            ]  # fmt: skip
            points += [(row.x, spread) for spread in found]
        if not points:
            continue
        limit = any(other.limit for row in rows for other in row.others if other.name == name)
        middle = [spread.median for _, spread in points]
        below = [spread.median - spread.low for _, spread in points]
        above = [spread.high - spread.median for _, spread in points]
        axis.errorbar(
            [x for x, _ in points],
            middle,
            yerr=[below, above],
            label=name,
            marker="o",
            markersize=3,
            linewidth=2 if name == "Forest" else 1,
            linestyle=":" if limit else "-",
        )
    axis.set(title=section, xlabel=rows[0].x_label, ylabel=rows[0].unit, xscale="log", yscale="log")
    axis.legend(fontsize=6)


def replace_between_markers(page: Path, text: str) -> None:
    """Put `text` between the page's markers. Raises `ValueError` where they are missing."""
    before = page.read_text()
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    after, count = pattern.subn(lambda _: f"{_BEGIN}\n{text}\n{_END}", before)
    if count != 1:
        raise ValueError(f"{page}: needs {_BEGIN} and {_END} once")
    page.write_text(after)


def write_documentation(run: Run, root: Path = ROOT) -> None:
    """Bring README.md, docs/benchmarks.md and the plot up to the run."""
    replace_between_markers(root / "README.md", markdown_headlines(run))
    replace_between_markers(root / "docs" / "benchmarks.md", markdown_tables(run))
    plot(run.figures, root / "docs" / PLOT_FILE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Show a saved run again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("out", type=Path, help="where `make bench OUT=...` kept the run")
    parser.add_argument("--write", action="store_true", help="update the documentation")
    options = parser.parse_args(arguments)
    run = Run.read(options.out)
    print(text_tables(run.figures))
    if options.write:
        write_documentation(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
