"""One run: everything that can be refused is refused before the first rollout.

Guarantees: rank 0 checks configuration, harness, tasks, token, writers, checkpoints and the
server's handshake before it loads the model; the other ranks only follow. An expected failure
becomes one `RunFailed` with a readable message; anything else keeps its traceback.
"""

import asyncio
import logging
import os
from pathlib import Path

import torch
from forest_schema import SchemaError
from forest_schema.model_files import model_digests
from forest_schema.routes import ROUTES
from forest_schema.shards import ShardError

from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.controller import handshake as handshakes
from megatron_forest_trainer.controller.archive import SnapshotRefused
from megatron_forest_trainer.controller.channel import Channel, Stopped, serve
from megatron_forest_trainer.controller.client import ControlClient, ControlError, TransportFailure
from megatron_forest_trainer.controller.collect import DropBudgetExceeded
from megatron_forest_trainer.controller.harness import HarnessNotFound
from megatron_forest_trainer.controller.loop import WeightsNotTaken
from megatron_forest_trainer.controller.run_dir import RunExists
from megatron_forest_trainer.controller.setup import (
    Setup,
    SetupError,
    control_token,
    make_loop,
    open_store,
    recovered,
    required,
    set_up,
)
from megatron_forest_trainer.controller.tasks import TaskSourceError
from megatron_forest_trainer.controller.worker import LearnerThread, Worker
from megatron_forest_trainer.core.errors import EvidenceError, IntegrityError, SelectionError
from megatron_forest_trainer.core.plan import NoRetainedTokens
from megatron_forest_trainer.learner import Learner, NonFiniteGradientError
from megatron_forest_trainer.logging_.progress import Reporter
from megatron_forest_trainer.logging_.records import MissingWriter
from megatron_forest_trainer.model.hf_config import UnsupportedModelError

logger = logging.getLogger(__name__)

NEEDED_FEATURES = frozenset({"chat", "weights"})
"""Server features that every run needs."""

_EXPECTED = (
    ControlError,
    DropBudgetExceeded,
    EvidenceError,
    HarnessNotFound,
    IntegrityError,
    MissingWriter,
    NoRetainedTokens,
    NonFiniteGradientError,
    RunExists,
    SchemaError,
    SelectionError,
    SetupError,
    ShardError,
    SnapshotRefused,
    Stopped,
    TaskSourceError,
    TransportFailure,
    UnsupportedModelError,
    WeightsNotTaken,
    handshakes.HandshakeError,
)


class RunFailed(RuntimeError):
    """A run that could not start or had to stop, with the reason in words."""


def run_grpo(config: Config) -> None:
    """Run GRPO on this rank. Raises `RunFailed`."""
    try:
        _check_device(config)
        if int(os.environ.get("RANK", "0")) == 0:
            asyncio.run(_lead(set_up(config)))
        else:
            worker, channel = _make_worker(config)
            serve(channel, worker.execute)
            channel.leave()
    except _EXPECTED as error:
        raise RunFailed(str(error)) from error


async def _lead(setup: Setup) -> None:
    config = setup.config
    learner = LearnerThread()
    try:
        async with ControlClient(
            required(config.server.url),
            setup.token,
            api_key=config.server.api_key,
            timeout_s=config.server.request_timeout_s,
        ) as client:
            served_model = await _shake_hands(config, client)
            with open_store(config, setup.token) as reader, Reporter() as reporter:
                left = await asyncio.to_thread(recovered, setup, reader)
                await learner.start(lambda: _make_worker(config))
                if setup.state is not None and setup.checkpoints is not None:
                    await learner.load(setup.checkpoints.learner(setup.state.step))
                loop = make_loop(
                    setup,
                    left,
                    client=client,
                    learner=learner,
                    reader=reader,
                    reporter=reporter,
                    served_model=served_model,
                )
                await loop.cleaner.started(left.abandoned, left.uncleaned)
                await loop.run()
    except BaseException as error:
        await learner.stop(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        setup.writer.close()
    await learner.stop()


async def _shake_hands(config: Config, client: ControlClient) -> str:
    """Check the server; returns the served model's name."""
    tokenizer = config.policy.tokenizer.name
    try:
        digests = model_digests(
            Path(required(config.policy.model_name)),
            tokenizer=Path(tokenizer) if tokenizer else None,
        )
    except FileNotFoundError as error:
        raise SetupError(f"policy.model_name or policy.tokenizer.name: {error}") from error
    try:
        found = await client.handshake()
    except TransportFailure as error:
        raise SetupError(f"server.url {config.server.url}: no answer: {error}") from error
    except ControlError as error:
        keys = "server.control_token_file, server.api_key" if error.status == 401 else "server.url"
        raise SetupError(f"{keys}: {error}") from error
    handshakes.check(
        found,
        handshakes.Expectation(
            digests=digests,
            max_row_tokens=config.policy.max_total_sequence_length,
            features=NEEDED_FEATURES | ({ROUTES} if config.policy.router_replay.enabled else set()),
        ),
    )
    logger.info(
        "server %s: vLLM %s, renderer %s, model %s",
        client.url,
        found.vllm_version,
        found.renderer_version,
        found.model,
    )
    return found.model


def _make_worker(config: Config) -> tuple[Worker, Channel]:
    """The learner of this rank, in the thread that will use it. Collective."""
    if config.policy.device == "cpu":
        # Only a run that asks for the CPU by name loads the patches.
        from megatron_forest_trainer.testing import cpu

        cpu.enable()
    learner = Learner(config, Path(required(config.policy.model_name)))
    return Worker(learner, open_store(config, control_token(config))), Channel()


def _check_device(config: Config) -> None:
    if config.policy.device == "cuda" and not torch.cuda.is_available():
        raise SetupError(
            "policy.device is cuda, but this machine has no CUDA device; set policy.device: cpu "
            "to run the demonstration path on the CPU"
        )
    if config.policy.device == "cpu" and torch.cuda.is_available():
        raise SetupError("policy.device is cpu, but this machine has a CUDA device; remove the key")
