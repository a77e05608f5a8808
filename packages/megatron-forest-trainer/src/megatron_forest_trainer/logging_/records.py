"""Step records: one flat mapping per optimizer step, to JSON Lines and the usual dashboards.

Guarantees: a record is on disk before the next step starts; a resumed run drops the records of
the steps that it repeats, so that the file has each step once, in order; a number that is not
finite is written as null.
"""

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_forest_trainer.durable import write_whole

Value = int | float | str | None
StepRecord = Mapping[str, Value]
"""Metric names of the docs' metric reference, and `step`, `time` and `weight_version`."""

RECORDS_FILE = "steps.jsonl"


class RecordWriter(Protocol):
    """Receives every step record."""

    def write(self, record: StepRecord) -> None:
        """Write one record; it holds `step`."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class MissingWriter(ValueError):
    """The configuration asks for a dashboard whose package is not installed."""


class JsonLinesWriter:
    """Appends records to `steps.jsonl`; keeps those below `first_step` that are there."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / RECORDS_FILE
        kept = [r for r in read_records(directory) if int(r["step"] or 0) < first_step]
        write_whole(self._path, "".join(map(_line, kept)).encode())
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append and sync one record."""
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """Scalars of each record as TensorBoard events."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        _require("tensorboard", "logger.tensorboard_enabled")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def write(self, record: StepRecord) -> None:
        """Add the record's finite numbers at its step."""
        for name, value in _numbers(record):
            self._writer.add_scalar(name, value, global_step=record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbWriter:
    """Scalars of each record in a Weights & Biases run, the same one after a restart."""

    def __init__(
        self,
        directory: Path,
        *,
        project: str,
        name: str | None,
        run_id: str,
        config: Mapping[str, Any],
    ) -> None:
        _require("wandb", "logger.wandb_enabled")
        import wandb

        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            dir=str(directory),
            config=dict(config),
            resume="allow",
        )

    def write(self, record: StepRecord) -> None:
        """Log the record's finite numbers at its step."""
        self._run.log(dict(_numbers(record)), step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class RecordWriters:
    """Several writers as one."""

    def __init__(self, writers: Sequence[RecordWriter]) -> None:
        self._writers = writers

    def write(self, record: StepRecord) -> None:
        """Hand the record to every writer."""
        for writer in self._writers:
            writer.write(record)

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            writer.close()


def read_records(directory: Path) -> list[dict[str, Value]]:
    """Records of a run's folder, oldest first; a torn last line is left out."""
    path = directory / RECORDS_FILE
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _line(record: StepRecord) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _numbers(record: StepRecord) -> Iterable[tuple[str, float]]:
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float) and math.isfinite(value):
            yield name, value


def _require(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingWriter(
            f"{key}: the package {package} is not installed; install it or unset it"
        )
