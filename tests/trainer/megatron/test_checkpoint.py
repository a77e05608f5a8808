"""Saved, resumed and resharded training continues like uninterrupted training."""

import pytest
from megatron_forest_trainer.core.plan import FixedShape

from tests.support.distributed import run_ranks
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    make_config,
    make_step,
    random_rollout,
    resume,
    train_and_save,
)

CFG = "policy__megatron_cfg__"
TENSOR = {f"{CFG}tensor_model_parallel_size": 2}
PIPELINE = {f"{CFG}pipeline_model_parallel_size": 2}
EXPERT = {f"{CFG}expert_model_parallel_size": 2}
SHARDED = {f"{CFG}optimizer__use_distributed_optimizer": True}
SCHEDULE = {
    f"{CFG}scheduler__lr_decay_style": "cosine",
    f"{CFG}scheduler__lr_warmup_iters": 1,
    f"{CFG}scheduler__lr_decay_iters": 8,
}


def step_for(data_parallel: int):
    rollouts = [random_rollout("x", BRANCHES, seed=1), random_rollout("y", CHAIN, seed=2)]
    shape = FixedShape(data_parallel=data_parallel, train_micro_batch=1, logprob_micro_batch=1)
    return make_step(rollouts, {"x": 1.0, "y": -0.5}, shape)


@pytest.mark.requirement("J1", "J6")
@pytest.mark.parametrize(
    ("saved", "data_parallel", "others"),
    [
        ({}, 2, [(1, 1, {}), (2, 1, TENSOR), (2, 1, PIPELINE)]),
        (TENSOR, 1, [(1, 1, {})]),
        (PIPELINE, 1, [(1, 1, {})]),
        (SHARDED, 2, [(1, 1, SHARDED), (2, 1, SHARDED | TENSOR)]),
    ],
    ids=["data", "tensor", "pipeline", "sharded"],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, untied, saved, data_parallel, others):
    assert_resumes(untied, tmp_path / "checkpoint", saved, data_parallel, others)


@pytest.mark.requirement("J1", "J6")
@pytest.mark.parametrize(
    ("saved", "others"),
    [
        ({}, [(1, 1, {}), (2, 1, PIPELINE)]),
        (EXPERT, []),
        (SHARDED | EXPERT, []),
    ],
    ids=["data", "expert", "sharded-expert"],
)
def test_a_mixture_resumes_too(tmp_path, mixture, saved, others):
    assert_resumes(mixture, tmp_path / "checkpoint", saved, 2, others)


def assert_resumes(hf_dir, directory, saved, data_parallel, others):
    config = make_config(**saved, **SCHEDULE)
    step = step_for(data_parallel)
    uninterrupted = run_ranks(train_and_save, config, hf_dir, step, directory, 2, 2, ranks=2)[0]

    (resumed, _) = run_ranks(resume, config, hf_dir, step, directory, 2, ranks=2)
    assert resumed == uninterrupted
    assert [stats["step"] for stats in resumed] == [3, 4]

    for ranks, other_data_parallel, overrides in others:
        resharded = run_ranks(
            resume,
            make_config(**overrides, **SCHEDULE),
            hf_dir,
            step_for(other_data_parallel),
            directory,
            2,
            ranks=ranks,
        )[0]
        for found, expected in zip(resharded, uninterrupted, strict=True):
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
            assert found["lr"] == expected["lr"]
            assert found["step"] == expected["step"]


@pytest.mark.requirement("J2")
def test_the_experts_optimizer_must_be_there_again(tmp_path, mixture):
    directory = tmp_path / "checkpoint"
    run_ranks(train_and_save, make_config(**EXPERT), mixture, step_for(2), directory, 1, 0, ranks=2)
    (kind,) = run_ranks(error_of, "load", make_config(), mixture, directory)
    assert "expert_model_parallel_size was above 1" in kind


@pytest.mark.requirement("J2", "J3")
def test_foreign_checkpoints_are_refused(tmp_path, untied):
    directory = tmp_path / "checkpoint"
    run_ranks(train_and_save, make_config(), untied, step_for(1), directory, 1, 0)
    (exists,) = run_ranks(error_of_save, make_config(), untied, step_for(1), directory)
    assert "never overwritten" in exists
    (kind,) = run_ranks(error_of, "load", make_config(**SHARDED), untied, directory)
    assert "use_distributed_optimizer: false" in kind

    older = tmp_path / "older"
    run_ranks(save_as_schema, 4, make_config(), untied, step_for(1), older)
    (version,) = run_ranks(error_of, "load", make_config(), untied, older)
    assert "schema version 4 is not supported" in version
    (early,) = run_ranks(error_of, "save", make_config(), untied, tmp_path / "new")
    assert "before the first optimizer step" in early
    (missing,) = run_ranks(error_of, "load", make_config(), untied, tmp_path / "none")
    assert "no checkpoint directory" in missing


def error_of(method, config, hf_dir, directory) -> str:
    from megatron_forest_trainer.learner import Learner

    try:
        getattr(Learner(config, hf_dir), method)(directory)
    except (ValueError, OSError) as error:
        return str(error)
    return "accepted"


def save_as_schema(schema, config, hf_dir, step, directory) -> None:
    from megatron_forest_trainer.checkpoint import distributed

    distributed.SNAPSHOT_SCHEMA = schema
    train_and_save(config, hf_dir, step, directory, 1, 0)


@pytest.mark.requirement("J1")
@pytest.mark.parametrize("overrides", [{}, SHARDED], ids=["plain", "sharded"])
def test_a_resumed_run_uses_its_own_hyperparameters(tmp_path, untied, overrides):
    directory = tmp_path / "checkpoint"
    linear = {
        f"{CFG}scheduler__lr_decay_style": "linear",
        f"{CFG}scheduler__lr_decay_iters": 10,
    }
    first = make_config(**overrides, **linear)
    (before,) = run_ranks(train_and_save, first, untied, step_for(1), directory, 2, 1)
    slower = {f"{CFG}optimizer__lr": 1e-4, f"{CFG}optimizer__adam_beta2": 0.9}
    second = make_config(**overrides, **linear, **slower)
    (after,) = run_ranks(resume, second, untied, step_for(1), directory, 1)
    assert before[0]["lr"] == pytest.approx(1e-3 * 0.8)
    assert after[0]["lr"] == pytest.approx(1e-4 * 0.8)


def error_of_save(config, hf_dir, step, directory) -> str:
    try:
        train_and_save(config, hf_dir, step, directory, 1, 0)
    except OSError as error:
        return str(error)
    return "accepted"
