"""From a configuration to the parts of a run.

Guarantees: everything that needs neither the server nor the model is checked here, before either is
touched; nothing here starts a rollout.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_forest_trainer.config import config_to_yaml, policies
from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.controller.book import Book
from megatron_forest_trainer.controller.cleanup import Cleaner
from megatron_forest_trainer.controller.client import ControlClient
from megatron_forest_trainer.controller.collect import DropPolicy, StepCollector
from megatron_forest_trainer.controller.harness import Harness, resolve_harness
from megatron_forest_trainer.controller.loop import GrpoLoop
from megatron_forest_trainer.controller.observe import ProgressObserver
from megatron_forest_trainer.controller.recovery import (
    Checkpoints,
    ControllerState,
    Recovered,
    check_state,
    recover,
)
from megatron_forest_trainer.controller.rollouts import GroupRunner, RolloutSettings
from megatron_forest_trainer.controller.run_dir import RunDirectory
from megatron_forest_trainer.controller.step import batch_shape
from megatron_forest_trainer.controller.tasks import TaskStream, load_tasks
from megatron_forest_trainer.controller.worker import LearnerThread
from megatron_forest_trainer.core.plan import BatchShape
from megatron_forest_trainer.core.selection import SelectionPolicy
from megatron_forest_trainer.durable import write_whole
from megatron_forest_trainer.logging_.progress import Reporter
from megatron_forest_trainer.logging_.records import (
    JsonLinesWriter,
    RecordWriter,
    RecordWriters,
    TensorBoardWriter,
    WandbWriter,
)
from megatron_forest_trainer.model.parallel import Parallelism
from megatron_forest_trainer.store import StoreReader, open_reader

_EVERY_TOKEN = -1
"""vLLM's `top_k` without a limit."""


class SetupError(ValueError):
    """Something that the configuration names cannot be used."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The checked parts of a run."""

    config: Config
    harness: Harness
    tasks: TaskStream
    policy: SelectionPolicy
    token: str
    shape: BatchShape
    run: RunDirectory
    checkpoints: Checkpoints | None
    resumes: bool
    """Continue what the run directory holds, from a checkpoint or from the start."""
    state: ControllerState | None
    """Of the checkpoint to continue from; None starts from the initial weights."""
    writer: RecordWriter


def set_up(config: Config) -> Setup:
    """Check and build what needs neither the server nor the model.

    Raises `SetupError`, `HarnessNotFound`, `TaskSourceError`, `MissingWriter`, `RunExists`,
    `SnapshotRefused` and `SchemaError`.
    """
    harness = resolve_harness(required(config.harness.target))
    _check_options(harness, _harness_options(config))
    tasks = TaskStream(
        load_tasks(Path(required(config.data.train.data_path))),
        seed=config.grpo.seed,
        shuffle=config.data.shuffle,
    )
    token = control_token(config)
    shape = _shape(config)
    checkpointing = config.checkpointing
    resumes = checkpointing.enabled and checkpointing.resume
    try:
        run = RunDirectory.open(Path(config.logger.log_dir), resume=resumes)
    except OSError as error:
        raise SetupError(f"logger.log_dir: cannot be written: {error}") from error
    checkpoints = None
    if checkpointing.enabled:
        folder = Path(checkpointing.checkpoint_dir or run.root / "checkpoints")
        checkpoints = Checkpoints(folder.resolve(), checkpointing.keep_top_k)
    state = checkpoints.newest() if checkpoints is not None and resumes else None
    if state is not None:
        check_state(
            state,
            run,
            forest_training=config.token_capture.forest_training,
            row_multiple=shape.row_multiple,
        )
    write_whole(run.root / "config.yaml", config_to_yaml(config).encode())
    return Setup(
        config=config,
        harness=harness,
        tasks=tasks,
        policy=policies.resolve(config.token_capture.selection_policy),
        token=token,
        shape=shape,
        run=run,
        checkpoints=checkpoints,
        resumes=resumes,
        state=state,
        writer=_open_writers(config, run, first_step=state.step + 1 if state else 1),
    )


def recovered(setup: Setup, reader: StoreReader) -> Recovered:
    """What an interrupted run left; nothing for a new run. Blocking."""
    if not setup.resumes:
        return Recovered()
    return recover(
        setup.run,
        setup.state,
        reader,
        forest_training=setup.config.token_capture.forest_training,
        row_multiple=setup.shape.row_multiple,
        require_routes=_require_routes(setup.config),
        on_evidence_error=setup.config.token_capture.on_evidence_error,
    )


def _require_routes(config: Config) -> bool:
    """A rollout with a call that has no routed experts is masked."""
    replay = config.policy.router_replay
    return replay.enabled and replay.on_missing_routes == "mask"


def make_loop(
    setup: Setup,
    left: Recovered,
    *,
    client: ControlClient,
    learner: LearnerThread,
    reader: StoreReader,
    reporter: Reporter,
    served_model: str,
) -> GrpoLoop:
    """The loop, ready to run."""
    config = setup.config
    observer = ProgressObserver(
        reporter, config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    )
    book = Book(
        run=setup.run,
        reader=reader,
        policy=setup.policy,
        forest_training=config.token_capture.forest_training,
        on_evidence_error=config.token_capture.on_evidence_error,
        row_multiple=setup.shape.row_multiple,
        require_routes=_require_routes(config),
    )
    failure = config.async_rl.rollout_failure
    collector = StepCollector(
        runner=GroupRunner(
            client,
            _rollout_settings(config, setup.harness, served_model),
            book,
            observer,
            finished=dict(left.rollouts),
        ),
        tasks=setup.tasks,
        policy=DropPolicy(
            groups=config.grpo.num_prompts_per_step,
            max_dropped_groups=failure.max_dropped_groups,
            max_replacements=failure.max_replacements,
            min_step_batch_fraction=failure.min_step_batch_fraction,
            min_valid_fraction_per_group=config.token_capture.min_valid_fraction_per_group,
        ),
        partition=setup.run.partition,
        next_position=left.next_position,
        taken=dict(left.positions),
        dropped_before=left.dropped_groups,
    )
    return GrpoLoop(
        config=config,
        run_directory=setup.run,
        client=client,
        learner=learner,
        reader=reader,
        collector=collector,
        cleaner=Cleaner(
            client,
            setup.run,
            keep_captures=config.token_capture.keep_captures,
            wait_for_checkpoint=config.checkpointing.enabled,
        ),
        writer=setup.writer,
        shape=setup.shape,
        reporter=reporter,
        checkpoints=setup.checkpoints,
        completed=left.step,
    )


def open_store(config: Config, token: str) -> StoreReader:
    """The delta store, by shared folder or over HTTP."""
    server = config.server
    return open_reader(
        store_path=server.store_path,
        url=server.url,
        control_token=token,
        api_key=server.api_key,
        timeout_s=server.request_timeout_s,
    )


def control_token(config: Config) -> str:
    """The control routes' token. Raises `SetupError`."""
    path = Path(required(config.server.control_token_file))
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"server.control_token_file: {error}") from error
    if not (token.isascii() and token.isprintable() and token and " " not in token):
        raise SetupError(
            f"server.control_token_file: {path} holds no token, which is one word of visible "
            "ASCII characters"
        )
    return token


def required(value: str | None) -> str:
    """A key that the configuration check for training has found set."""
    assert value is not None
    return value


def _shape(config: Config) -> BatchShape:
    cfg = config.policy.megatron_cfg
    parallelism = Parallelism(
        tensor=cfg.tensor_model_parallel_size,
        pipeline=cfg.pipeline_model_parallel_size,
        context=cfg.context_parallel_size,
        expert=cfg.expert_model_parallel_size,
        expert_tensor=cfg.expert_tensor_parallel_size,
        sequence_parallel=cfg.sequence_parallel,
    )
    try:
        data_parallel = parallelism.data_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise SetupError(str(error)) from error
    return batch_shape(
        config,
        data_parallel=data_parallel,
        slot_multiple=math.lcm(
            config.policy.make_sequence_length_divisible_by, parallelism.token_multiple
        ),
    )


def _rollout_settings(config: Config, harness: Harness, served_model: str) -> RolloutSettings:
    return RolloutSettings(
        harness=harness,
        model=served_model,
        sampling=sampling_fields(config),
        options=_harness_options(config),
        group_size=config.grpo.num_generations_per_prompt,
        max_concurrent_attempts=config.async_rl.max_concurrent_attempts,
        rollout_timeout_s=config.rollout_timeout_s,
        pending_wait_s=config.token_capture.pending_wait_s,
        seed=config.grpo.seed,
        api_key=config.server.api_key or "forest",
    )


def _harness_options(config: Config) -> dict[str, Any]:
    return {
        **config.harness.options,
        "max_response_retries": config.harness.max_response_retries,
        "max_model_calls": config.harness.max_model_calls,
        "context_history": msgspec.to_builtins(config.context_history),
    }


def _check_options(harness: Harness, options: dict[str, Any]) -> None:
    """Let a harness that can refuse options do it before the first rollout."""
    check = getattr(harness, "check_options", None)
    if check is None:
        return
    try:
        check(options)
    except ValueError as error:
        raise SetupError(str(error)) from error


def sampling_fields(config: Config) -> dict[str, Any]:
    """Fields of an OpenAI request; what the OpenAI API lacks goes into `extra_body`.

    The distribution is asked for in full: a field that is left out takes the server's default,
    which comes from the model's generation_config.json.
    """
    generation = config.policy.generation
    sampling: dict[str, Any] = {
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "extra_body": {"top_k": _EVERY_TOKEN if generation.top_k is None else generation.top_k},
    }
    if generation.max_new_tokens is not None:
        sampling["max_tokens"] = generation.max_new_tokens
    return sampling


def _open_writers(config: Config, run: RunDirectory, *, first_step: int) -> RecordWriter:
    writers: list[RecordWriter] = [JsonLinesWriter(run.root, first_step=first_step)]
    if config.logger.tensorboard_enabled:
        writers.append(TensorBoardWriter(run.root, first_step=first_step))
    if config.logger.wandb_enabled:
        wandb = config.logger.wandb
        writers.append(
            WandbWriter(
                run.root,
                project=wandb.project,
                name=wandb.name,
                run_id=run.run_id,
                config=msgspec.to_builtins(config),
            )
        )
    return RecordWriters(writers)
