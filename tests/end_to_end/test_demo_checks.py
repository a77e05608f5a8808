"""What the demo accepts as a good run, and the task it runs."""

import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from toolbox.checks import failed_checks  # noqa: E402
from toolbox.table import step_table  # noqa: E402
from toolbox.task import BoxTask, tasks  # noqa: E402
from toolbox.transcripts import Habits, episode  # noqa: E402


def good_run():
    return [
        {
            "step": step,
            "logical_rollouts": 64,
            "valid_rows": 64 + 10 * (step % 2),
            "padding_rows": 0,
            "row_tokens": 20_000,
            "executed_tokens": 9_000,
            "reward/mean": 0.4 + 0.02 * step,
            "gen_kl_error": 1e-13,
            "token_mult_prob_error": 1.000001,
            "dropped_prompt_groups": 0,
            "tokens_per_second": 500.0,
        }
        for step in range(1, 11)
    ]


@pytest.mark.requirement("L3")
def test_a_good_run_passes():
    assert failed_checks(good_run()) == []
    assert step_table(good_run()).row_count == 10


@pytest.mark.requirement("L4")
def test_a_run_without_a_context_boundary_fails():
    records = [{**record, "valid_rows": 64} for record in good_run()]
    (failure,) = failed_checks(records)
    assert "no context was rewritten" in failure


@pytest.mark.requirement("L3")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward/mean": 0.4}, "is not above"),
        ({"gen_kl_error": 0.05}, "largest gen_kl_error is 0.050000"),
        ({"token_mult_prob_error": 1.06}, "largest token_mult_prob_error is 1.060000"),
        ({"token_mult_prob_error": None}, "token_mult_prob_error is missing"),
    ],
)
def test_each_limit_is_checked(change, message):
    records = [{**record, **change} for record in good_run()]
    assert any(message in failure for failure in failed_checks(records))


def test_a_short_run_fails():
    assert failed_checks(good_run()[:9]) == ["9 step records, at least 10 are required"]


@given(st.integers(0, 10_000))
def test_a_flawless_episode_solves_its_task(seed):
    steps = episode(random.Random(seed), Habits(hasty=0.0, malformed=0.0), keep_rounds=1)
    assert len(steps) == 4
    answer = steps[-1].answer.rsplit("</think>", 1)[1]
    (task,) = itertools.islice(tasks(seed), 1)
    assert BoxTask(task).reward(answer) == 1.0
    assert BoxTask(task).reward(None) == 0.0
