"""Whole training processes against scripted generations: what stops a run, and how."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_forest_trainer.config import load_config
from megatron_forest_trainer.controller.archive import read_decisions, read_groups
from megatron_forest_trainer.controller.channel import Channel, ExportWeights, Stop, Stopped, serve
from megatron_forest_trainer.controller.run import RunFailed, run_grpo
from megatron_forest_trainer.logging_.records import read_records

from tests.support.byte_model import make_byte_model
from tests.support.distributed import RankError, run_ranks
from tests.support.engine import wait_until
from tests.support.models import REPOSITORY
from tests.support.scripted_server import ScriptedServer
from tests.trainer.controller.training import (
    ForkedRun,
    command,
    environment,
    train,
    write_config,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture
def server(tmp_path: Path, model: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(tmp_path / "server", model, vocab=259) as running:
        yield running


def config_of(server: ScriptedServer, model: Path, tmp_path: Path, **sections: object) -> Path:
    return write_config(
        tmp_path,
        url=server.url,
        token_file=server.token_file,
        model=model,
        **{"harness": {"target": "tests.trainer.controller.agents:say_four"}, **sections},
    )


@pytest.mark.requirement("H1", "H10", "G3")
def test_two_ranks_train_what_one_trains(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    config = config_of(server, model, tmp_path)
    run = train(config, ranks=2)
    assert run.returncode == 0, run.stderr
    out = tmp_path / "out"
    records = read_records(out)
    assert [record["step"] for record in records] == [1, 2]
    # Three rows per rollout, two rollouts per group: six rows, a multiple of two ranks.
    assert [record["valid_rows"] for record in records] == [12, 12]
    assert [record["excluded_tokens"] for record in records] == [0, 0]
    assert server.engine.updates == ["step-0", "step-1", "step-2"]
    groups = read_groups(out / "rollouts" / "step000001")
    assert [group.row_multiple for group in groups] == [2, 2]
    # Nothing of the steps is left on the server.
    assert list(server.store.glob("*/*.safetensors")) == []


@pytest.mark.requirement("XL9", "G24")
def test_a_step_whose_rollouts_are_all_above_the_threshold_changes_nothing(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    config = config_of(server, model, tmp_path)
    run = ForkedRun(config, "grpo.seq_logprob_error_threshold=1.0001")
    assert run.wait() == 1
    assert "step 1: none of the 12 rows has a token to train on" in run.stderr
    assert "Traceback" not in run.stderr
    assert read_records(tmp_path / "out") == []
    assert server.engine.updates == ["step-0"]
    assert read_decisions(tmp_path / "out" / "rollouts" / "step000001") is None


@pytest.mark.requirement("K13", "K10")
def test_another_tokenizer_is_refused_before_the_first_rollout(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    other = make_byte_model(tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    with pytest.raises(RunFailed, match="tokenizer: digest"):
        run_grpo(load_config(config_of(server, other, tmp_path), for_training=True))
    assert server.requests == ["GET /v1/forest/control/handshake"]


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("harness.target=nowhere:f", "cannot import 'nowhere'"),
        ("data.train.data_path=/missing.jsonl", "data.train.data_path: /missing.jsonl is no file"),
        ("server.control_token_file=/missing", "server.control_token_file"),
        ("logger.wandb_enabled=true", "logger.wandb_enabled: the package wandb is not installed"),
        ("server.url=http://127.0.0.1:9", "GET /handshake at http://127.0.0.1:9"),
        ("policy.device=cuda", "set policy.device: cpu"),
        ("policy.router_replay.enabled=true", "routes; .*--enable-return-routed-experts"),
        ("harness.target=simple_agent_with_compaction", r"harness\.options: .*environment"),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", "1 ranks are not a multiple"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_first_rollout(
    server: ScriptedServer, model: Path, tmp_path: Path, override: str, told: str
) -> None:
    config = load_config(config_of(server, model, tmp_path), [override], for_training=True)
    with pytest.raises(RunFailed, match=told):
        run_grpo(config)
    assert not any("attempts" in request for request in server.requests)


@pytest.mark.requirement("K10")
def test_an_option_that_the_model_has_no_use_for_is_refused_before_the_first_rollout(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    frozen = "policy.megatron_cfg.freeze_vision_model=true"
    run = ForkedRun(config_of(server, model, tmp_path), frozen)
    assert run.wait() == 1
    assert "the model has no vision tower; remove it" in run.stderr
    assert "Traceback" not in run.stderr
    assert not any("attempts" in request for request in server.requests)


def test_a_dropped_budget_ends_the_run_with_the_cause(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    broken = "harness.target=tests.trainer.controller.agents:broken"
    run = ForkedRun(config_of(server, model, tmp_path), broken)
    assert run.wait() == 1
    assert "max_dropped_groups permits 0" in run.stderr
    assert "KeyError: 'scripted bug'" in run.stderr


@pytest.mark.requirement("I14")
def test_an_interrupted_run_ends_at_once(
    server: ScriptedServer, model: Path, tmp_path: Path
) -> None:
    config = config_of(server, model, tmp_path)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"last": "wait"}\n' * 4)
    running = subprocess.Popen(
        command(config),
        cwd=REPOSITORY,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, this test perhaps among them, are started to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: server.open_now == 4, 120)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130
    assert told.endswith("forest-train: interrupted\n")


# Ranks that fail.


def _one_rank_fails(failing: int) -> str:
    import torch
    import torch.distributed as dist
    from megatron_forest_trainer.model.parallel import Parallelism, initialize

    initialize(Parallelism(), seed=0)
    channel = Channel()

    def execute(command: object) -> None:
        if channel.rank == failing:
            raise ValueError(f"rank {failing} is broken")
        dist.all_reduce(torch.ones(1))

    if channel.rank != 0:
        serve(channel, execute)
        return "served"
    channel.send(ExportWeights(directory="x"))
    execute(None)
    return "executed"


def _rank_0_stops() -> str:
    from megatron_forest_trainer.model.parallel import Parallelism, initialize

    initialize(Parallelism(), seed=0)
    channel = Channel()
    if channel.rank == 0:
        channel.send(Stop(error="the budget is spent"))
        return "stopped"
    try:
        serve(channel, lambda _: None)
    except Stopped as error:
        return str(error)
    return "served"


def test_a_failing_rank_ends_the_others_with_its_error() -> None:
    with pytest.raises(RankError, match=r"rank 1 is broken|[Cc]onnection"):
        run_ranks(_one_rank_fails, 1, ranks=2, timeout_s=60)


def test_rank_0_tells_the_others_why_it_stops() -> None:
    assert run_ranks(_rank_0_stops, ranks=2, timeout_s=60) == [
        "stopped",
        "rank 0 stopped the run: the budget is spent",
    ]


@pytest.mark.requirement("K10", "K13")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.model_name=/nope", r"policy\.model_name.*/nope has no config\.json"),
        ("server.url=http://127.0.0.1:9", r"server\.url http://127\.0\.0\.1:9: no answer"),
        ("server.control_token_file=config.yaml", r"server\.control_token_file: .* holds no token"),
        ("server.control_token_file=wrong", r"server\.control_token_file.*401"),
        ("server.control_token_file=absent", r"server\.control_token_file: .*absent"),
        ("logger.log_dir=config.yaml", r"logger\.log_dir: cannot be written"),
        ("data.train.data_path=config.yaml", r"data\.train\.data_path: .*:1: not JSON"),
    ],
)
def test_what_cannot_be_reached_is_named_by_its_key(
    server: ScriptedServer, model: Path, tmp_path: Path, override: str, told: str
) -> None:
    path = config_of(server, model, tmp_path)
    (tmp_path / "wrong").write_text("wrong-token")
    for name in ("config.yaml", "wrong", "absent"):
        override = override.replace(f"={name}", f"={tmp_path / name}")
    with pytest.raises(RunFailed, match=told):
        run_grpo(load_config(path, [override], for_training=True))


@pytest.mark.requirement("H8")
def test_the_forest_in_one_pass_takes_the_steps_of_the_rows(model: Path, tmp_path: Path) -> None:
    """The same rollouts, on fewer tokens: the turn that two branches share runs once."""
    runs = []
    for enabled in ("false", "true"):
        with ScriptedServer(tmp_path / f"server-{enabled}", model, vocab=259) as server:
            config = config_of(
                server,
                model,
                tmp_path / enabled,
                harness={"target": "tests.trainer.controller.agents:branch"},
                token_capture={"selection_policy": "all_captured"},
                # One after the other, so that the scripted tokens are the same in both runs.
                async_rl={"max_concurrent_attempts": 1},
            )
            run = ForkedRun(config, f"policy.forest_execution.enabled={enabled}")
            assert run.wait() == 0, run.stderr
        runs.append(read_records(tmp_path / enabled / "out"))
    for rows, forest in zip(*runs, strict=True):
        assert rows["executed_tokens"] == rows["row_tokens"] == forest["row_tokens"]
        assert forest["executed_tokens"] == forest["unique_tokens"]
        assert rows["executed_tokens"] > forest["executed_tokens"]  # type: ignore[operator]
        for name in ("loss", "grad_norm", "gen_kl_error", "entropy", "retained_tokens"):
            assert forest[name] == pytest.approx(rows[name], rel=1e-4, abs=1e-7), name


@pytest.mark.requirement("F11")
def test_a_step_says_how_many_tokens_ran_without_replayed_routes(tmp_path: Path) -> None:
    """A server that should report routes and captured none, and a run that trains all the same."""
    mixture = make_byte_model(tmp_path / "mixture", mixture=True)
    with ScriptedServer(tmp_path / "server", mixture, vocab=259) as server:
        server.engine.features += ("routes",)
        policy = {"router_replay": {"enabled": True, "on_missing_routes": "live"}}
        run = ForkedRun(config_of(server, mixture, tmp_path, policy=policy), "grpo.max_num_steps=1")
        assert run.wait() == 0, run.stderr
    (record,) = read_records(tmp_path / "out")
    # The last token of a row never has a route.
    assert record["live_routed_tokens"] == record["row_tokens"] - record["valid_rows"]  # type: ignore[operator]
