"""A mixture of experts from capture to new weights: a real engine that reports its routes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forest_schema import decode_receipt
from megatron_forest_trainer.logging_.records import read_records
from safetensors.numpy import load_file, save_file
from vllm_forest_renderer import compat

from tests.support.byte_model import make_byte_model
from tests.support.distributed import run_ranks
from tests.support.engine import CONTROL_TOKEN, EngineServer, returns_routes_on_cpu
from tests.trainer.controller.training import ForkedRun, write_config
from tests.trainer.megatron.support import make_config

pytestmark = [
    pytest.mark.smoke_training,
    pytest.mark.skipif(
        not returns_routes_on_cpu(), reason="this vLLM returns routed experts on a GPU only"
    ),
]

ROUTED = "--enable-return-routed-experts"
REPLAY = {"policy__router_replay__enabled": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("model") / "bytes", mixture=True)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine that loads experts again as it would on a GPU.

    vLLM's CPU backend packs experts at the start only, so the server refuses updates there. The
    engine's process is forked from this one, repair included.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        self.moe_kernel = None
        set_up(self, *args, **kwargs)

    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", set_up_afresh)
        patch.setattr(compat, "inexact_reload", lambda model_config: None)
        with EngineServer(model, ROUTED, forest={"state_dir": str(state)}) as running:
            yield running


@pytest.mark.requirement("C3", "F11", "K5", "K13")
def test_two_steps_with_replay(engine: EngineServer, model: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(CONTROL_TOKEN)
    policy = {"router_replay": {"enabled": True}}
    config = write_config(tmp_path, url=engine.url, token_file=token, model=model, policy=policy)
    run = ForkedRun(config)
    assert run.wait() == 0, run.stderr
    records = read_records(tmp_path / "out")
    assert [record["weight_version"] for record in records] == ["step-1", "step-2"]
    for record in records:
        # The second step's rollouts come from the weights that the first one wrote.
        assert record["logical_rollouts"] == 4
        assert record["valid_rows"] == 8
        assert record["live_routed_tokens"] == 0
        assert record["gen_kl_error"] < 1e-4  # type: ignore[operator]
        assert record["token_mult_prob_error"] < 1.01  # type: ignore[operator]
        assert record["grad_norm"] > 0  # type: ignore[operator]
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "out" / "weights" / "step-2" / "model.safetensors")
    assert before.keys() == after.keys()
    for kind in ("gate.weight", "experts.0.down_proj.weight", "experts.7.gate_proj.weight"):
        name = f"model.layers.1.mlp.{kind}"
        assert np.abs(after[name] - before[name]).max() > 0


def generate(model: Path, state: Path) -> bytes:
    """A conversation on a bfloat16 engine; its receipt."""
    import msgspec
    import openai

    options = (ROUTED, "--dtype", "bfloat16")
    with EngineServer(model, *options, forest={"state_dir": str(state)}) as server:
        attempt = server.open_attempt()
        client = openai.OpenAI(base_url=server.base_url(attempt), api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "Count to ten."}]
        for number in range(4):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=48, seed=number, temperature=1.0
            )
            content = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"Go on, {number}."},
            ]
        return msgspec.json.encode(server.close(attempt))


def trainer_error(config: Any, hf_dir: Path, receipt: bytes, store: Path) -> float:
    """Mean multiplicative error of the trainer's probabilities against the engine's."""
    from megatron_forest_trainer.core.forest import build_rows
    from megatron_forest_trainer.core.metrics import pool
    from megatron_forest_trainer.core.plan import FixedShape, PlannedRow, plan_step
    from megatron_forest_trainer.learner import Learner
    from megatron_forest_trainer.store import open_reader

    learner = Learner(config, hf_dir)
    rows = build_rows(decode_receipt(receipt).calls, group_id="g", rollout_id="r")
    planned = [PlannedRow(row_id=row.row_id, plan=row, train=True) for row in rows]
    shape = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
    with open_reader(store_path=store) as reader:
        errors = pool(learner.logprobs(plan_step(0, planned, shape), reader).values())
    return errors.mult / errors.tokens


@pytest.mark.requirement("F11")
def test_replay_lowers_the_error_against_a_rounding_engine(model: Path, tmp_path: Path) -> None:
    near_ties = make_byte_model(tmp_path / "model", mixture=True)
    weights = load_file(near_ties / "model.safetensors")
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name] *= np.float32(0.02)
        if name.endswith("down_proj.weight"):
            weights[name] *= np.float32(3)
    save_file(weights, near_ties / "model.safetensors", metadata={"format": "pt"})
    (receipt,) = run_ranks(generate, near_ties, tmp_path / "state", timeout_s=300)
    store = tmp_path / "state" / "store"
    live, replayed = (
        run_ranks(trainer_error, make_config(**overrides), near_ties, receipt, store)[0]
        for overrides in ({}, REPLAY)
    )
    assert replayed - 1 < 0.7 * (live - 1), (live, replayed)
