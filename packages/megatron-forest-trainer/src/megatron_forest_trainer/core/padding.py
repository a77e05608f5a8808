"""Execution padding: rows that only fill up microbatches.

Guarantees: padding rows have no tokens of their own, no loss, no advantage and no vote; their
number and ids follow from the real rows and the row multiple alone, so that they are fixed before
anything is published and the same after a restart.
"""

from collections.abc import Sequence

from megatron_forest_trainer.core.plan import PlannedRow


def padding_ids(group_id: str, rows: int, multiple: int) -> tuple[str, ...]:
    """Ids of the padding rows that bring `rows` rows of a prompt group to a multiple.

    A group without rows needs none.
    """
    return tuple(f"{group_id}/pad{n}" for n in range(-rows % multiple))


def pad_groups(
    groups: Sequence[tuple[str, Sequence[PlannedRow]]], multiple: int
) -> tuple[PlannedRow, ...]:
    """Rows of all prompt groups (id, rows), each group filled up to a multiple of `multiple`."""
    padded: list[PlannedRow] = []
    for group_id, rows in groups:
        padded += rows
        padded += (
            PlannedRow(row_id=row_id, plan=None)
            for row_id in padding_ids(group_id, len(rows), multiple)
        )
    return tuple(padded)
