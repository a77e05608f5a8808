"""The trainer's log-probabilities are those that the real engine reported, for every sampling."""

import pytest
from forest_schema import decode_receipt

from tests.support.distributed import run_ranks
from tests.support.models import make_qwen3_model
from tests.trainer.megatron.support import make_config

SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.3, "extra_body": {"top_k": 20}},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.1, "top_p": 0.5, "extra_body": {"top_k": 50}},
]
"""One call each, continued in this order."""


def generate(model, state) -> bytes:
    """An attempt on a real server with one continuation per sampling; its receipt."""
    import msgspec
    import openai

    from tests.support.engine import EngineServer

    with EngineServer(model, forest={"state_dir": str(state)}) as server:
        attempt = server.open_attempt()
        client = openai.OpenAI(base_url=server.base_url(attempt), api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Count to ten."}]
        for number, sampling in enumerate(SAMPLINGS):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=24, seed=number, **sampling
            )
            content = answer.choices[0].message.content
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"Go on, {number}."},
            ]
        return msgspec.json.encode(server.close(attempt))


def trainer_errors(config, hf_dir, receipt: bytes, store):
    """Mean multiplicative error of every call by itself, and how many tokens were excluded."""
    from megatron_forest_trainer.core.forest import build_rows
    from megatron_forest_trainer.core.plan import FixedShape, PlannedRow, plan_step
    from megatron_forest_trainer.learner import Learner
    from megatron_forest_trainer.store import open_reader

    learner = Learner(config, hf_dir)
    calls = decode_receipt(receipt).calls
    shape = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
    found = []
    with open_reader(store_path=store) as reader:
        rows = build_rows(calls, group_id="g", rollout_id="r")
        planned = [PlannedRow(row_id=row.row_id, plan=row, train=True) for row in rows]
        plan = plan_step(0, planned, shape)
        errors = learner.logprobs(plan, reader)
        for row in rows:
            error = errors[row.row_id]
            found.append((row.owned_tokens, error.tokens, error.mult / error.tokens))
    return len(calls), found


@pytest.mark.requirement("XL12", "C22")
def test_logprobs_agree_with_the_engine(tmp_path):
    model = make_qwen3_model(tmp_path / "model")
    (receipt,) = run_ranks(generate, model, tmp_path / "state", timeout_s=300)
    records = decode_receipt(receipt).calls
    samplings = [
        (record.sampling.temperature, record.sampling.top_p, record.sampling.top_k)
        for record in records
    ]
    assert samplings == [
        (1.0, 1.0, 0), (0.6, 1.0, 0), (0.0, 1.0, 0),
        (1.3, 1.0, 20), (0.6, 0.9, 0), (1.1, 0.5, 50),
    ]  # fmt: skip

    ((calls, rows),) = run_ranks(
        trainer_errors, make_config(), model, receipt, tmp_path / "state" / "store"
    )
    assert calls == len(SAMPLINGS)
    generated = sum(record.generated_len for record in records)
    assert sum(owned for owned, *_ in rows) == generated
    # A token whose cumulative mass ties with the limit may fall outside; it leaves the sums.
    assert sum(tokens for _, tokens, _ in rows) >= generated - 2
    assert all(error < 1.001 for *_, error in rows)
