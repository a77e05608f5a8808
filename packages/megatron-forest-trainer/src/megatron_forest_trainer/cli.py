"""The command line: `forest-train grpo` and `forest-train inspect`.

Guarantees: every problem of a configuration is printed at once, with the keys to change, before
anything starts; a failure exits with a status other than 0 and one readable message, with which
torchrun's own report of the failure ends.
"""

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from megatron_forest_trainer.config import ConfigError, config_to_yaml, load_config

app = typer.Typer(
    name="forest-train",
    help="Train on the captured calls of agents whose context is rewritten.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def grpo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file.", exists=True, dir_okay=False)
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the whole configuration and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log debug messages.")] = False,
) -> None:
    """Run GRPO against a running server. Under torchrun for more than one rank."""
    _log_to_stderr(verbose)
    if not verbose:
        # Megatron-Core warns on import about optional packages that nobody asked for.
        warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.")
    try:
        loaded = load_config(config, overrides or (), for_training=not print_config)
    except ConfigError as error:
        _fail(str(error))
    if print_config:
        typer.echo(config_to_yaml(loaded), nl=False)
        return
    # Importing torch and Megatron takes seconds; a wrong configuration must not wait for it.
    from megatron_forest_trainer.controller.run import RunFailed, run_grpo

    try:
        run_grpo(loaded)
    except RunFailed as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted", status=130)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A run's folder, a step's folder, or one rollout's file.")
    ],
    step: Annotated[int | None, typer.Option(help="Only this step of a run.")] = None,
    rollout: Annotated[
        str | None, typer.Option(help="Only rollouts whose id contains this.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for scripts.")] = False,
) -> None:
    """Show captured calls, the selected forest, rows, masks and advantages."""
    from megatron_forest_trainer.inspect_.load import InspectError, load_reports
    from megatron_forest_trainer.inspect_.show import as_tables, to_json

    try:
        reports = load_reports(path, step=step, rollout=rollout)
    except InspectError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps([to_json(report) for report in reports], indent=2))
        return
    console = Console()
    for report in reports:
        for renderable in as_tables(report):
            console.print(renderable)


def _log_to_stderr(verbose: bool) -> None:
    rank = os.environ.get("RANK", "0")
    console = Console(stderr=True)
    handler: logging.Handler
    if console.is_terminal and rank == "0":
        handler = RichHandler(console=console, show_path=False, rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter(
                f"[%(asctime)s] rank {rank} %(levelname)s: %(message)s",
                datefmt="%Y-%m-%d %H:%M:%S",
            )
        )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("megatron_forest_trainer").setLevel(
        logging.DEBUG if verbose else logging.INFO if rank == "0" else logging.WARNING
    )


def _fail(message: str, *, status: int = 1) -> "typer.Exit":
    text = f"forest-train: {message}"
    typer.echo(text, err=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # What torchrun shows of a failed rank, last of all: the form of torch's `ErrorHandler`
        # without a call stack. Written here, since importing torch takes seconds.
        told = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")
    raise typer.Exit(status)


if __name__ == "__main__":
    app(prog_name="forest-train")
