"""Progress of long work: a bar in a terminal, plain log lines elsewhere.

Guarantees: where standard error is no terminal nothing is drawn, and work that takes longer than
`every_s` seconds logs a line at its next part.
"""

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

logger = logging.getLogger(__name__)


class Reporter:
    """Reports units of work, one after the other. Use as a context manager."""

    def __init__(self, console: Console | None = None, *, every_s: float = 10.0) -> None:
        self.console = console or Console(stderr=True)
        self._every_s = every_s
        self._bar: Progress | None = None
        if self.console.is_terminal and sys.stderr.isatty():
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> "Reporter":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str, total: int) -> "Work":
        """Begin a unit of work of `total` parts."""
        return Work(what, total, self._bar, self._every_s)


class Work:
    """One unit of work that is being reported. As a context manager it finishes at the end."""

    def __init__(self, what: str, total: int, bar: Progress | None, every_s: float) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._bar = bar
        self._every_s = every_s
        self._told_at = time.monotonic()
        self._task: TaskID | None = (
            None if bar is None else bar.add_task(what, total=total, note="")
        )

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more parts are done; `note` is shown beside them."""
        self._done += count
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=count, note=note)
            return
        now = time.monotonic()
        if now - self._told_at >= self._every_s:
            self._told_at = now
            logger.info("%s: %d of %d %s", self._what, self._done, self._total, note)

    def __enter__(self) -> "Work":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """The work is over, complete or not."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
