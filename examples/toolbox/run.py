"""Run an example from nothing to a table: server, rollouts, GRPO steps, checks.

Guarantees: exits with 0 only when every check of `checks.py` holds; the server is stopped in any
case; OUT holds the checkpoint that was served, the tasks, the logs, the store with its shards, the
receipts, the step records (steps.jsonl) and the table.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from megatron_forest_trainer.config import ConfigError, load_config
from rich.console import Console
from rich.markup import escape

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pictures.task import tasks as picture_tasks  # noqa: E402
from toolbox.checks import failed_checks  # noqa: E402
from toolbox.server import ServerFailed, reserve, serving  # noqa: E402
from toolbox.table import step_table  # noqa: E402
from toolbox.task import tasks as box_tasks  # noqa: E402

TASKS = 256
TASK_SEED = 1


class FlavourName(StrEnum):
    """The examples that this file runs."""

    BOXES = "boxes"
    IMAGES = "images"


@dataclass(frozen=True)
class Flavour:
    """One example."""

    folder: Path
    """Holds `config.yaml` and the checkpoint `model/`."""
    tasks: Callable[[int], Iterator[dict[str, Any]]]
    server_arguments: tuple[str, ...]


FLAVOURS = {
    FlavourName.BOXES: Flavour(
        HERE,
        box_tasks,
        ("--reasoning-parser", "qwen3",
         "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ),
    FlavourName.IMAGES: Flavour(
        HERE.parent / "pictures",
        picture_tasks,
        ("--limit-mm-per-prompt", '{"image": 2, "video": 0}'),
    ),
}  # fmt: skip

console = Console(width=None if sys.stdout.isatty() else 120)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/demo"),
    flavour: Annotated[FlavourName, typer.Option(help="Which example.")] = FlavourName.BOXES,
    model: Annotated[Path | None, typer.Option(help="Checkpoint to start from.")] = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel trainer processes.", min=1)] = 2,
    forest_execution: Annotated[
        bool, typer.Option("--forest-execution", help="Compute tokens that rows share once.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Configuration overrides.")
    ] = None,
) -> None:
    """Capture a tiny agent's calls, train on them, and check the run."""
    example = FLAVOURS[flavour]
    model = model or example.folder / "model"
    out = out.absolute()
    if (out / "steps.jsonl").exists():
        _fail(f"{out} holds the results of an earlier run; remove it or choose another OUT")
    out.mkdir(parents=True, exist_ok=True)
    overrides = overrides or []
    if forest_execution:
        overrides = ["policy.forest_execution.enabled=true", *overrides]
    started = time.monotonic()
    with (out / "tasks.jsonl").open("w", encoding="utf-8") as file:
        some = itertools.islice(example.tasks(TASK_SEED), TASKS)
        file.writelines(json.dumps(task) + "\n" for task in some)
    config, server = example.folder / "config.yaml", reserve(out)
    settings = {
        **server.settings(),
        "policy.model_name": str(model),
        "data.train.data_path": str(out / "tasks.jsonl"),
        "logger.log_dir": str(out),
    }
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
    try:
        # The trainer would say the same, after a minute in which the server starts.
        load_config(config, overrides, for_training=True)
        with serving(server, model, out, console, example.server_arguments):
            status = _train(out, config, ranks, overrides)
    except (ConfigError, ServerFailed) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted")
    if status:
        _fail(f"the trainer exited with status {status}; its messages are above")
    records = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    table = step_table(records)
    console.print(table)
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=120).print(table)
    failed = failed_checks(records)
    for line in failed:
        console.print(f"[red]failed[/red] {line}")
    if failed:
        raise typer.Exit(1)
    console.print(
        f"[green]All checks hold[/green] after {time.monotonic() - started:.0f} s. Results: {out}"
    )


def _train(out: Path, config: Path, ranks: int, overrides: list[str]) -> int:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", "-m", "megatron_forest_trainer.cli",
        "grpo", "--config", str(config), *overrides,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    with _shown(out / "trainer.log") as stream:
        return subprocess.run(command, env=environment, stderr=stream, check=False).returncode


@contextlib.contextmanager
def _shown(path: Path) -> Iterator[int | None]:
    """Standard error of the trainer: the terminal, which draws its progress, or a copy in a log."""
    if sys.stderr.isatty():
        yield None
        return
    tee = subprocess.Popen(["tee", str(path)], stdin=subprocess.PIPE, stdout=sys.stderr)
    assert tee.stdin is not None
    try:
        yield tee.stdin.fileno()
    finally:
        tee.stdin.close()
        tee.wait()


def _fail(message: str) -> None:
    console.print(f"[red]demo:[/red] {escape(message)}", soft_wrap=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
