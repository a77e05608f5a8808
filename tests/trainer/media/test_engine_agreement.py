"""From the real engine's images to the trainer: rows, pixels and log-probabilities."""

import asyncio
import random
import shutil

import msgspec
import numpy as np
import pytest
from forest_schema import decode_receipt
from forest_schema.media import tensor_name
from megatron_forest_trainer.core.plan import PackedShape, PlannedRow, plan_step
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.finalize import finalize_rollout
from megatron_forest_trainer.store import open_reader
from safetensors.numpy import load_file, save_file

from examples.pictures.task import look, make_task
from tests.support.distributed import run_ranks
from tests.support.models import REPOSITORY
from tests.trainer.megatron.support import make_config

MODEL = REPOSITORY / "examples" / "pictures" / "model"
ROLLOUTS = 4


def generate(model, state, weights=None) -> list[tuple[bytes, dict]]:
    """The example's harness on a real server: a receipt and a result per rollout.

    `weights` are sent to the server first.
    """
    import openai

    from tests.support.engine import EngineServer

    found = []
    rng = random.Random(5)
    with EngineServer(model, forest={"state_dir": str(state)}) as server:
        if weights is not None:
            answer = server.control.post("/weights", json={"path": str(weights), "version": "new"})
            assert answer.is_success, answer.text
        for number in range(ROLLOUTS):
            attempt = server.open_attempt(rollout=f"r{number}")
            client = openai.AsyncOpenAI(
                base_url=server.base_url(attempt), api_key="none", max_retries=0
            )
            sampling = {"temperature": 1.2, "seed": 10 * number, "max_tokens": 8}
            result = asyncio.run(
                look(client, make_task(rng), model="tiny", sampling=sampling, options={})
            )
            found.append((msgspec.json.encode(server.close(attempt)), result))
    return found


def plan_of(captured, reader):
    """Every row of the captured rollouts, in one step."""
    rows = [
        PlannedRow(row_id=plan.row_id, plan=plan, advantage=1.0, train=True)
        for receipt, result in captured
        for plan in finalize_rollout(decode_receipt(receipt), result, reader).rows
    ]
    return plan_step(0, rows, PackedShape(data_parallel=1, train_tokens=256, logprob_tokens=256))


def trainer_error(config, hf_dir, captured, store):
    """Compared tokens, and their mean multiplicative error."""
    from megatron_forest_trainer.learner import Learner

    with open_reader(store_path=store) as reader:
        errors = Learner(config, hf_dir).logprobs(plan_of(captured, reader), reader).values()
    tokens = sum(error.tokens for error in errors)
    return tokens, sum(error.mult for error in errors) / tokens


def train(config, hf_dir, captured, store, target):
    """One optimizer step, exported."""
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    with open_reader(store_path=store) as reader:
        plan = plan_of(captured, reader)
        learner.logprobs(plan, reader)
        learner.train_step(plan, reader)
    learner.export_hf(target)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    (found,) = run_ranks(generate, MODEL, state, timeout_s=300)
    return found, state / "store"


@pytest.mark.requirement("B2", "B3", "B4", "B11", "XM3", "XM7")
def test_a_rewrite_gives_a_row_of_its_own_with_its_picture_stored_again(captured):
    found, store = captured
    with open_reader(store_path=store) as reader:
        for receipt, result in found:
            calls = decode_receipt(receipt).calls
            assert [len(call.media) for call in calls] == [1, 1, 1]
            assert [call.parent_call_id for call in calls] == [None, calls[0].call_id, None]
            final = finalize_rollout(decode_receipt(receipt), result, reader)
            assert final.verified, final.detail
            both, rewritten = (assemble(plan, reader) for plan in final.rows)
            assert [o.blob for o in both.media.occurrences] == [
                calls[0].media[0].blob,
                calls[1].media[0].blob,
            ]
            (kept,) = rewritten.media.occurrences
            assert kept.blob == calls[1].media[0].blob
            assert kept.offset < both.media.occurrences[1].offset
            assert np.array_equal(
                rewritten.media.tensors[0]["pixel_values"],
                both.media.tensors[1]["pixel_values"],
            )
            assert tensor_name(kept.blob, "pixel_values") in reader.read(calls[2].delta)


@pytest.mark.requirement("B2", "L3")
def test_logprobs_agree_with_the_engine(captured):
    found, store = captured
    ((tokens, error),) = run_ranks(trainer_error, make_config(), MODEL, found, store)
    generated = sum(
        call.generated_len for receipt, _ in found for call in decode_receipt(receipt).calls
    )
    assert tokens == generated
    assert error < 1.00001


@pytest.mark.requirement("B2", "L3")
def test_a_trained_tower_reaches_the_engine(captured, tmp_path):
    found, store = captured
    trained, state = tmp_path / "trained", tmp_path / "state"
    config = make_config(policy__megatron_cfg__optimizer__lr=1e-2)
    run_ranks(train, config, MODEL, found, store, trained)
    (fresh,) = run_ranks(generate, MODEL, state, trained, timeout_s=300)

    old_tower = tmp_path / "old_tower"
    shutil.copytree(trained, old_tower)
    weights = load_file(trained / "model.safetensors")
    before = load_file(MODEL / "model.safetensors")
    weights |= {name: array for name, array in before.items() if name.startswith("visual.")}
    save_file(weights, old_tower / "model.safetensors")

    errors = [
        run_ranks(trainer_error, config, model, fresh, state / "store")[0][1]
        for model in (trained, old_tower)
    ]
    assert errors[0] < 1.00001
    assert errors[1] > 1.001
