"""The whole loop: a real engine, real Megatron, the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_forest_trainer.controller import archive
from megatron_forest_trainer.logging_.records import read_records

from tests.support.byte_model import make_byte_model
from tests.support.engine import CONTROL_TOKEN, EngineServer
from tests.trainer.controller.training import ForkedRun, train, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    state = tmp_path_factory.mktemp("state")
    with EngineServer(model, forest={"state_dir": str(state)}) as running:
        running.state = state  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(CONTROL_TOKEN)
    return path


@pytest.mark.requirement("L3", "K13", "G2", "F3")
def test_two_steps_of_training_end_to_end(
    engine: EngineServer, model: Path, token_file: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, url=engine.url, token_file=token_file, model=model)
    run = train(config)
    assert run.returncode == 0, run.stderr
    records = read_records(tmp_path / "out")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["logical_rollouts"] == 4
        assert record["valid_rows"] == 8
        assert record["gen_kl_error"] < 1e-4  # type: ignore[operator]
        assert record["token_mult_prob_error"] < 1.01  # type: ignore[operator]
        assert record["grad_norm"] > 0  # type: ignore[operator]
    assert [record["weight_version"] for record in records] == ["step-1", "step-2"]
    # Two more steps would go on from the newest weights; the initial ones are gone.
    assert sorted(p.name for p in (tmp_path / "out" / "weights").iterdir()) == ["step-1", "step-2"]


@pytest.mark.requirement("C23")
def test_rollouts_overlap_training_within_the_permitted_staleness(
    engine: EngineServer, model: Path, token_file: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        url=engine.url,
        token_file=token_file,
        model=model,
        async_rl={"enabled": True, "max_staleness": 1},
        loss_fn={
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_ratio": 2.0,
        },
        grpo={"max_num_steps": 4},
    )
    run = ForkedRun(config)
    assert run.wait() == 0, run.stderr
    records = read_records(tmp_path / "out")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    lags = [record["staleness/max"] for record in records]
    # The first step has nothing to overlap with; of the later ones some were begun a step before.
    assert lags[0] == 0
    assert set(lags[1:]) <= {0, 1}
    assert 1 in lags
    assert all(record["importance_weight"] > 0 for record in records)  # type: ignore[operator]
    for step in (2, 3, 4):
        for rollout in archive.read_rollouts(tmp_path / "out" / "rollouts" / f"step{step:06d}"):
            versions = {s.version for c in rollout.receipt.calls for s in c.weight_spans}
            assert versions <= {f"step-{step - 2}", f"step-{step - 1}"}
