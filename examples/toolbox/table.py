"""The table at the end of a run."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

COLUMNS = (
    ("step", "step", "d"),
    ("rollouts", "logical_rollouts", "d"),
    ("rows", "valid_rows", "d"),
    ("padding", "padding_rows", "d"),
    ("row tokens", "row_tokens", "d"),
    ("tokens run", "executed_tokens", "d"),
    ("reward", "reward/mean", ".3f"),
    ("gen KL", "gen_kl_error", ".1e"),
    ("TMPE", "token_mult_prob_error", ".6f"),
    ("dropped", "dropped_prompt_groups", "d"),
    ("tokens/s", "tokens_per_second", ".0f"),
)


def step_table(records: Sequence[dict[str, Any]]) -> Table:
    """One line per step record."""
    table = Table(title="GRPO steps", box=box.SIMPLE_HEAD)
    for title, _, _ in COLUMNS:
        table.add_column(title, justify="right")
    for record in records:
        table.add_row(*(_cell(record[name], form) for _, name, form in COLUMNS))
    return table


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(int(value) if form == "d" else value, form)
