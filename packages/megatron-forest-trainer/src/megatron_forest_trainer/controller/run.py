"""Setting up a run: everything that can be refused is refused before the first rollout.

Guarantees: rank 0 checks configuration, harness, tasks, token, writers and the server's handshake
before it loads the model; the other ranks only follow. An expected failure becomes one `RunFailed`
with a readable message; anything else keeps its traceback.
"""

import asyncio
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from forest_schema import SchemaError
from forest_schema.model_files import model_digests
from forest_schema.shards import ShardError

from megatron_forest_trainer.config import config_to_yaml, policies
from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.controller import handshake as handshakes
from megatron_forest_trainer.controller.channel import Channel, Stopped, serve
from megatron_forest_trainer.controller.cleanup import Cleaner
from megatron_forest_trainer.controller.client import ControlClient, ControlError, TransportFailure
from megatron_forest_trainer.controller.collect import (
    DropBudgetExceeded,
    DropPolicy,
    StepCollector,
)
from megatron_forest_trainer.controller.finishing import Finisher
from megatron_forest_trainer.controller.harness import Harness, HarnessNotFound, resolve_harness
from megatron_forest_trainer.controller.loop import GrpoLoop, WeightsNotTaken
from megatron_forest_trainer.controller.observe import ProgressObserver
from megatron_forest_trainer.controller.rollouts import GroupRunner, RolloutSettings
from megatron_forest_trainer.controller.run_dir import RunDirectory, write_whole
from megatron_forest_trainer.controller.step import batch_shape
from megatron_forest_trainer.controller.tasks import TaskSourceError, TaskStream, load_tasks
from megatron_forest_trainer.controller.worker import LearnerThread, Worker
from megatron_forest_trainer.core.errors import EvidenceError, IntegrityError, SelectionError
from megatron_forest_trainer.core.plan import NoRetainedTokens
from megatron_forest_trainer.learner import Learner, NonFiniteGradientError
from megatron_forest_trainer.logging_.progress import Reporter
from megatron_forest_trainer.logging_.records import (
    JsonLinesWriter,
    MissingWriter,
    RecordWriter,
    RecordWriters,
    TensorBoardWriter,
    WandbWriter,
)
from megatron_forest_trainer.model.parallel import Parallelism
from megatron_forest_trainer.store import StoreReader, open_reader

logger = logging.getLogger(__name__)

NEEDED_FEATURES = frozenset({"chat", "weights"})

_EXPECTED = (
    handshakes.HandshakeError,
    ControlError,
    DropBudgetExceeded,
    EvidenceError,
    HarnessNotFound,
    IntegrityError,
    MissingWriter,
    NoRetainedTokens,
    NonFiniteGradientError,
    SchemaError,
    SelectionError,
    ShardError,
    Stopped,
    TaskSourceError,
    TransportFailure,
    WeightsNotTaken,
)


class RunFailed(RuntimeError):
    """A run that could not start or had to stop, with the reason in words."""


def run_grpo(config: Config) -> None:
    """Run GRPO on this rank. Raises `RunFailed`."""
    try:
        _check_device(config)
        if _rank() == 0:
            asyncio.run(_lead(config))
        else:
            worker, channel = _make_worker(config)
            serve(channel, worker.execute)
    except _EXPECTED as error:
        raise RunFailed(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Setup:
    """What rank 0 could check without the server and the model."""

    harness: Harness
    tasks: TaskStream
    token: str
    run: RunDirectory
    writer: RecordWriter


async def _lead(config: Config) -> None:
    setup = _set_up(config)
    async with ControlClient(
        _required(config.server.url),
        setup.token,
        api_key=config.server.api_key,
        timeout_s=config.server.request_timeout_s,
    ) as client:
        served_model = await _shake_hands(config, client)
        learner = LearnerThread()
        try:
            await learner.start(lambda: _make_worker(config))
            with _open_reader(config, setup.token) as reader, Reporter() as reporter:
                loop = _make_loop(config, setup, client, learner, reader, reporter, served_model)
                await loop.run()
        except BaseException as error:
            await learner.stop(error=f"{type(error).__name__}: {error}")
            raise
        finally:
            setup.writer.close()
        await learner.stop()


def _set_up(config: Config) -> _Setup:
    harness = resolve_harness(_required(config.harness.target))
    tasks = TaskStream(
        load_tasks(Path(_required(config.data.train.data_path))),
        seed=config.grpo.seed,
        shuffle=config.data.shuffle,
    )
    token = _control_token(config)
    run = RunDirectory.open(Path(config.logger.log_dir))
    write_whole(run.root / "config.yaml", config_to_yaml(config).encode())
    return _Setup(harness, tasks, token, run, _open_writers(config, run, first_step=1))


async def _shake_hands(config: Config, client: ControlClient) -> str:
    """Check the server; returns the served model's name."""
    found = await client.handshake()
    handshakes.check(
        found,
        handshakes.Expectation(
            digests=model_digests(Path(_required(config.policy.model_name))),
            max_row_tokens=config.policy.max_total_sequence_length,
            features=NEEDED_FEATURES,
        ),
    )
    logger.info(
        "server %s: vLLM %s, renderer %s, model %s", client.url, found.vllm_version,
        found.renderer_version, found.model,
    )  # fmt: skip
    return found.model


def _make_loop(
    config: Config,
    setup: _Setup,
    client: ControlClient,
    learner: LearnerThread,
    reader: StoreReader,
    reporter: Reporter,
    served_model: str,
) -> GrpoLoop:
    cfg = config.policy.megatron_cfg
    parallelism = Parallelism(
        tensor=cfg.tensor_model_parallel_size,
        pipeline=cfg.pipeline_model_parallel_size,
        context=cfg.context_parallel_size,
        expert=cfg.expert_model_parallel_size,
        sequence_parallel=cfg.sequence_parallel,
    )
    shape = batch_shape(
        config,
        data_parallel=parallelism.data_parallel(int(os.environ.get("WORLD_SIZE", "1"))),
        slot_multiple=math.lcm(
            config.policy.make_sequence_length_divisible_by, parallelism.token_multiple
        ),
    )
    observer = ProgressObserver(
        reporter, config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    )
    finisher = Finisher(
        run=setup.run,
        reader=reader,
        policy=policies.resolve(config.token_capture.selection_policy),
        forest_training=config.token_capture.forest_training,
        on_evidence_error=config.token_capture.on_evidence_error,
        row_multiple=shape.row_multiple,
    )
    failure = config.async_rl.rollout_failure
    collector = StepCollector(
        runner=GroupRunner(
            client, _rollout_settings(config, setup.harness, served_model), finisher, observer
        ),
        tasks=setup.tasks,
        policy=DropPolicy(
            groups=config.grpo.num_prompts_per_step,
            max_dropped_groups=failure.max_dropped_groups,
            max_replacements=failure.max_replacements,
            min_step_batch_fraction=failure.min_step_batch_fraction,
            min_valid_fraction_per_group=config.token_capture.min_valid_fraction_per_group,
        ),
        observer=observer,
        partition=setup.run.partition,
    )
    return GrpoLoop(
        config=config,
        run_directory=setup.run,
        client=client,
        learner=learner,
        collector=collector,
        cleaner=Cleaner(
            client,
            keep_captures=config.token_capture.keep_captures,
            wait_for_checkpoint=config.checkpointing.enabled,
        ),
        writer=setup.writer,
        shape=shape,
    )


def _rollout_settings(config: Config, harness: Harness, served_model: str) -> RolloutSettings:
    return RolloutSettings(
        harness=harness,
        model=served_model,
        sampling=_sampling(config),
        options={
            **config.harness.options,
            "max_response_retries": config.harness.max_response_retries,
            "max_model_calls": config.harness.max_model_calls,
            "context_history": msgspec.to_builtins(config.context_history),
        },
        group_size=config.grpo.num_generations_per_prompt,
        max_concurrent_attempts=config.async_rl.max_concurrent_attempts,
        rollout_timeout_s=config.rollout_timeout_s,
        pending_wait_s=config.token_capture.pending_wait_s,
        seed=config.grpo.seed,
        api_key=config.server.api_key or "forest",
    )


def _sampling(config: Config) -> dict[str, Any]:
    """Fields of an OpenAI request; what the OpenAI API lacks goes into `extra_body`."""
    generation = config.policy.generation
    sampling: dict[str, Any] = {"temperature": generation.temperature, "top_p": generation.top_p}
    if generation.max_new_tokens is not None:
        sampling["max_tokens"] = generation.max_new_tokens
    if generation.top_k is not None:
        sampling["extra_body"] = {"top_k": generation.top_k}
    return sampling


def _make_worker(config: Config) -> tuple[Worker, Channel]:
    """The learner of this rank, in the thread that will use it. Collective."""
    if config.policy.device == "cpu":
        # Only a run that asks for the CPU by name loads the patches.
        from megatron_forest_trainer.testing import cpu

        cpu.enable()
    learner = Learner(config, Path(_required(config.policy.model_name)))
    channel = Channel()
    return Worker(learner, _open_reader(config, _control_token(config))), channel


def _open_reader(config: Config, token: str) -> StoreReader:
    server = config.server
    return open_reader(
        store_path=server.store_path,
        url=server.url,
        control_token=token,
        timeout_s=server.request_timeout_s,
    )


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
                config=msgspec.to_builtins(config),
            )
        )
    return RecordWriters(writers)


def _control_token(config: Config) -> str:
    path = Path(_required(config.server.control_token_file))
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RunFailed(f"server.control_token_file: {error}") from error
    if not token:
        raise RunFailed(f"server.control_token_file: {path} is empty")
    return token


def _check_device(config: Config) -> None:
    if config.policy.device == "cuda" and not torch.cuda.is_available():
        raise RunFailed(
            "policy.device is cuda, but this machine has no CUDA device; set policy.device: cpu "
            "to run the demonstration path on the CPU"
        )
    if config.policy.device == "cpu" and torch.cuda.is_available():
        raise RunFailed("policy.device is cpu, but this machine has a CUDA device; remove the key")


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _required(value: str | None) -> str:
    # The configuration check for training names every missing key before this runs.
    assert value is not None
    return value
