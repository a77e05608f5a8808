"""The folder of a run.

Guarantees: everything that a run writes lies under `logger.log_dir`; a run keeps its id across
restarts; files appear whole (written aside and renamed) or not at all.

| path | content |
| --- | --- |
| `run.json` | the run's id |
| `config.yaml` | the whole configuration, defaults included |
| `steps.jsonl` | one record per optimizer step |
| `rollouts/step000001/` | receipts, results, selections and decisions of the step |
| `weights/step-1/` | Hugging Face checkpoint that step 1 produced; the newest two are kept |
| `checkpoints/step-10/` | training checkpoints |
"""

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_forest_trainer.durable import write_whole
from megatron_forest_trainer.logging_.records import RECORDS_FILE

_VERSION = re.compile(r"step-(\d+)")

KEPT_WEIGHTS = 2
"""Directories of served weights that stay: the server's and the one before."""


class _RunFile(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str


def weight_version(step: int) -> str:
    """Name of the weights after `step` optimizer steps; `step-0` are the initial ones."""
    return f"step-{step}"


def version_step(version: str) -> int | None:
    """Optimizer steps behind a weight version; None for a name that is not ours."""
    match = _VERSION.fullmatch(version)
    return int(match[1]) if match else None


class RunExists(ValueError):
    """The folder holds a run that this one would overwrite."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    root: Path
    run_id: str
    stale: tuple[str, ...] = ()
    """Partitions of an earlier start whose folder this run took over."""

    @classmethod
    def open(cls, root: Path, *, resume: bool) -> "RunDirectory":
        """The run in `root`: the one that is there, or a new one.

        Without `resume` a run that has trained a step is refused, and what an earlier start left
        is cleared away. Raises `RunExists`.
        """
        root.mkdir(parents=True, exist_ok=True)
        file = root / "run.json"
        if file.is_file() and resume:
            run = msgspec.json.decode(file.read_bytes(), type=_RunFile)
            return cls(root.resolve(), run.run_id)
        trained = (root / RECORDS_FILE).is_file() and (root / RECORDS_FILE).stat().st_size > 0
        if trained:
            raise RunExists(
                f"logger.log_dir {root} holds a run that has trained; name another folder, or "
                "continue it with checkpointing.enabled: true and checkpointing.resume: true"
            )
        stale: tuple[str, ...] = ()
        if file.is_file():
            earlier = cls(root, msgspec.json.decode(file.read_bytes(), type=_RunFile).run_id)
            stale = tuple(earlier.partition(step) for step in earlier.begun_steps())
        for name in ("rollouts", "weights"):
            shutil.rmtree(root / name, ignore_errors=True)
        run = _RunFile(run_id=secrets.token_hex(4))
        write_whole(file, msgspec.json.encode(run))
        return cls(root.resolve(), run.run_id, stale)

    def partition(self, step: int) -> str:
        """Partition of the attempts of `step`, unique to the run."""
        return f"run-{self.run_id}-step{step:06d}"

    def begun_steps(self) -> list[int]:
        """Steps that have a rollout folder, oldest first."""
        folders = (self.root / "rollouts").glob("step*")
        return sorted(int(folder.name.removeprefix("step")) for folder in folders)

    def rollouts(self, step: int) -> Path:
        """Folder of the step's rollouts."""
        return self.root / "rollouts" / f"step{step:06d}"

    def weights(self, step: int) -> Path:
        """Folder of the Hugging Face checkpoint after `step` optimizer steps."""
        return self.root / "weights" / weight_version(step)

    def prune_weights(self) -> list[Path]:
        """Delete all but the newest weight folders; returns what was deleted."""
        return prune_steps(self.root / "weights", keep=KEPT_WEIGHTS)


def prune_steps(folder: Path, *, keep: int) -> list[Path]:
    """Delete all but the `keep` newest `step-<n>` folders; returns what was deleted."""
    found = steps_in(folder)
    removed = [folder / weight_version(step) for step in found[: max(0, len(found) - keep)]]
    for path in removed:
        shutil.rmtree(path)
    return removed


def steps_in(folder: Path) -> list[int]:
    """Steps of the `step-<n>` folders, oldest first."""
    if not folder.is_dir():
        return []
    steps = (version_step(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(step for step in steps if step is not None)
