"""Reports for people and for scripts.

Guarantees: pure; the two forms show the same facts.
"""

from typing import Any

import msgspec
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from megatron_forest_trainer.inspect_.load import CallReport, RolloutReport, RowReport


def to_json(report: RolloutReport) -> dict[str, Any]:
    """The report as plain JSON data."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain


def as_tables(report: RolloutReport) -> list[RenderableType]:
    """Header, forest of calls, rows, and what is missing."""
    parts: list[RenderableType] = [_header(report), _forest(report)]
    if report.rows:
        parts.append(_rows(report))
    parts += [
        Text(f"  failed call {_short(one.call_id)}: {one.reason} {one.detail}", "red")
        for one in report.failures
    ]
    parts += [Text(f"  pending call {_short(call)}", "yellow") for call in report.pending]
    return parts


def _header(report: RolloutReport) -> Panel:
    facts = [
        ("step", report.step),
        ("task", report.task_position),
        ("reward", report.reward),
        ("advantage", None if report.advantage is None else f"{report.advantage:+.4f}"),
        ("trains", report.trains),
        ("votes", report.votes),
    ]
    line = Text("   ".join(f"{name} {value}" for name, value in facts if value is not None))
    if report.reason is not None:
        line.append(f"\n{report.reason}", "bold red")
        line.append(f": {report.detail}" if report.detail else "")
    if report.step is None:
        line.append("a receipt does not say what was selected")
    return Panel(line, title=f"{report.rollout_id}  ({report.attempt_id})", title_align="left")


def _forest(report: RolloutReport) -> Tree:
    children: dict[str | None, list[CallReport]] = {}
    for call in sorted(report.calls, key=lambda call: call.order):
        children.setdefault(call.parent_call_id, []).append(call)
    many = "" if len(report.calls) == 1 else "s"
    root = Tree(f"{len(report.calls)} captured call{many}", guide_style="dim")
    decided = report.step is not None

    def grow(branch: Tree, parent: str | None) -> None:
        for call in children.get(parent, ()):
            grow(branch.add(_call(call, decided=decided)), call.call_id)

    grow(root, None)
    return root


def _call(call: CallReport, *, decided: bool) -> Text:
    line = Text(f"#{call.order} ", "bold" if call.selected else "dim")
    line.append(f"{_short(call.call_id)}  ", "" if call.selected else "dim")
    line.append(f"{call.prev_len} + {call.prompt_delta_len} prompt ")
    line.append(f"+ {call.generated_len} generated", "green" if call.selected else "dim")
    line.append(f" = {call.cum_len}  {call.finish_reason or call.status}")
    if call.images:
        line.append(f"  {call.images} image{'s' * (call.images > 1)}", "blue")
    if call.root_reason is not None:
        line.append(f"  root: {call.root_reason}", "cyan")
    if call.weight_versions:
        line.append(f"  {'+'.join(call.weight_versions)}", "dim")
    if call.scored:
        line.append("  scored", "bold magenta")
    if decided and call.why_not is not None:
        line.append(f"  left out: {call.why_not}", "yellow")
    return line


def _rows(report: RolloutReport) -> Table:
    orders = {call.call_id: call.order for call in report.calls}
    table = Table(title="rows", title_justify="left", title_style="bold", box=None, pad_edge=True)
    for name in ("row", "calls", "tokens", "owned", "owned spans", "borrowed spans", "prob. error"):
        table.add_column(name, justify="left" if "span" in name or name == "row" else "right")
    for row in report.rows:
        table.add_row(
            row.row_id.rpartition("/")[2],
            " > ".join(f"#{orders[call_id]}" for call_id in row.calls),
            str(row.length),
            str(row.owned_tokens),
            _spans(row, owned=True),
            _spans(row, owned=False),
            "-" if row.mult_prob_error is None else f"{row.mult_prob_error:.6f}",
        )
    return table


def _spans(row: RowReport, *, owned: bool) -> str:
    return " ".join(f"{s.start}:{s.end}" for s in row.spans if s.owned is owned) or "-"


def _short(call_id: str) -> str:
    return call_id if len(call_id) <= 16 else f"{call_id[:13]}..."
