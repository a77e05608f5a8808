"""The stream of tasks that prompt groups are made of.

Guarantees: the task at a position depends only on the tasks, the seed and the position, so that a
resumed run continues the same stream from a saved number; every epoch visits every task once.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TaskSourceError(ValueError):
    """The configured tasks cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task at its place in the stream."""

    position: int
    """Place in the endless stream, from 0."""
    index: int
    """Place in the loaded list."""
    data: dict[str, Any]
    """What the harness receives."""


class TaskStream:
    """The tasks, repeated for ever, in a fresh seeded order every epoch."""

    def __init__(self, tasks: Sequence[dict[str, Any]], *, seed: int, shuffle: bool = True) -> None:
        if not tasks:
            raise TaskSourceError("data.train.data_path holds no task")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def at(self, position: int) -> Task:
        """The task at `position` of the endless stream."""
        epoch, offset = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        index = self._order[offset]
        return Task(position, index, self._tasks[index])


def load_tasks(path: Path) -> list[dict[str, Any]]:
    """Tasks from a JSON Lines file.

    Raises `TaskSourceError` naming the line that is no JSON object.
    """
    if not path.is_file():
        raise TaskSourceError(f"data.train.data_path: {path} is no file")
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise TaskSourceError(
                f"data.train.data_path: {path}:{number}: not JSON: {error}"
            ) from error
        if not isinstance(value, dict):
            raise TaskSourceError(
                f"data.train.data_path: {path}:{number}: {value!r:.80} is not a JSON object"
            )
        tasks.append(value)
    return tasks
