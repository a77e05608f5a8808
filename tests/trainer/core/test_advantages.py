import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.core.advantages import check_complete_group, group_advantages

# Tenths, which binary floats only approximate: sums of equal rewards are inexact.
REWARDS = st.lists(st.integers(-20, 20).map(lambda n: n / 10), min_size=1, max_size=8)


def oracle(
    rewards: list[float], votes: list[bool], leave_one_out: bool, normalize: bool
) -> list[float]:
    """The formulas of docs/formulas.md, rollout by rollout, in exact arithmetic."""
    total = sum(votes)
    values = []
    for i, reward in enumerate(rewards):
        others = [
            Fraction(r)
            for j, (r, vote) in enumerate(zip(rewards, votes, strict=True))
            if vote and not (leave_one_out and j == i)
        ]
        if total <= 1 or not votes[i]:
            values.append(0.0)
            continue
        m = len(others)
        baseline = sum(others) / m
        advantage = float(Fraction(reward) - baseline)
        if normalize and m > 1:
            square = sum(r * r for r in others) / m
            deviation = math.sqrt((square - baseline * baseline) * m / (m - 1))
            if deviation > 0:
                advantage /= deviation + 1e-6
        values.append(advantage)
    return values


@pytest.mark.requirement("G1", "G2")
@given(REWARDS, st.data(), st.booleans(), st.booleans())
def test_advantages_are_the_written_formulas(
    rewards: list[float], data: st.DataObject, leave_one_out: bool, normalize: bool
) -> None:
    votes = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    got = group_advantages(rewards, votes, leave_one_out=leave_one_out, normalize=normalize)
    want = oracle(rewards, votes, leave_one_out, normalize)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


TABLE = [
    # rewards, votes, mean, mean normalised, leave-one-out, leave-one-out normalised
    (
        [1, 1, 0, 0],
        [1, 0, 1, 1],
        [2 / 3, 0, -1 / 3, -1 / 3],
        [1.1547, 0, -0.5773, -0.5773],
        [1, 0, -0.5, -0.5],
        [1, 0, -0.7071, -0.7071],
    ),
    (
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [0.5, 0.5, -0.5, -0.5],
        [0.866, 0.866, -0.866, -0.866],
        [2 / 3, 2 / 3, -2 / 3, -2 / 3],
        [1.1547, 1.1547, -1.1547, -1.1547],
    ),
    ([0, 2, 4], [1] * 3, [-2, 0, 2], [-1, 0, 1], [-3, 0, 3], [-2.1213, 0, 2.1213]),
    ([1, 0], [1, 1], [0.5, -0.5], [0.7071, -0.7071], [1, -1], [1, -1]),
    (
        [1, 0, 0, 0],
        [1] * 4,
        [0.75, -0.25, -0.25, -0.25],
        [1.5, -0.5, -0.5, -0.5],
        [1, -1 / 3, -1 / 3, -1 / 3],
        [1, -0.5773, -0.5773, -0.5773],
    ),
]


@pytest.mark.requirement("XL5", "XL6", "XL1")
@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_golden_advantages(
    row: tuple[list[float], ...], leave_one_out: bool, normalize: bool
) -> None:
    rewards, votes, *expected = row
    got = group_advantages(rewards, votes, leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(got, expected[2 * leave_one_out + normalize], atol=1e-4)


@pytest.mark.requirement("G4", "G5")
def test_clipping_comes_before_filtering() -> None:
    got = group_advantages(
        [10, 0, 0, 0],
        [1, 1, 1, 1],
        retained=[1, 1, 0, 1],
        normalize=False,
        clip_low=0.5,
        clip_high=2.0,
    )
    np.testing.assert_allclose(got, [2.0, 0.5, 0.0, 0.5])


@pytest.mark.requirement("G5")
def test_a_rollout_that_does_not_vote_has_no_advantage_either() -> None:
    got = group_advantages([1, 0, 0], [1, 0, 1], normalize=False, clip_low=0.25)
    assert got[1] == 0.0


@pytest.mark.requirement("G8")
def test_an_included_masked_reward_stays_in_the_baseline_once() -> None:
    got = group_advantages([1, 1, 0, 0], [1] * 4, retained=[1, 0, 1, 1], normalize=False)
    np.testing.assert_allclose(got, [2 / 3, 0, -2 / 3, -2 / 3])


@pytest.mark.requirement("G1")
@pytest.mark.parametrize("votes", [[0, 0, 0], [0, 1, 0]])
def test_fewer_than_two_votes_give_no_advantage(votes: list[int]) -> None:
    assert not group_advantages([3, 1, 2], votes).any()


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.booleans(), st.booleans())
def test_equal_rewards_give_exactly_zero(
    reward: float, size: int, leave_one_out: bool, normalize: bool
) -> None:
    got = group_advantages(
        [reward] * size, [True] * size, leave_one_out=leave_one_out, normalize=normalize
    )
    assert not got.any()


@pytest.mark.requirement("G1", "G2")
@pytest.mark.parametrize("others", [[0.6, 0.6, 0.6], [0.2, 0.2, 0.2], [0.3, 0.1 + 0.2, 0.3]])
def test_a_deviation_that_is_only_rounding_does_not_divide(others: list[float]) -> None:
    got = group_advantages([1.0, *others], [True] * 4)
    np.testing.assert_allclose(got[0], 1.0 - others[0])
    assert np.abs(got).max() < 1


@pytest.mark.requirement("G1")
def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([float("nan"), 1.0], [True, True])
    # The reward of a rollout that neither votes nor trains does not matter.
    got = group_advantages([float("nan"), 1.0, 0.0], [False, True, True], normalize=False)
    np.testing.assert_allclose(got, [0, 1, -1])


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="one length"):
        group_advantages([1.0, 2.0], [True])


@pytest.mark.requirement("G1", "I12")
def test_a_group_must_be_whole() -> None:
    check_complete_group(["a", "b"], 2, group_id="g")
    with pytest.raises(ValueError, match="has 1 of 2"):
        check_complete_group(["a"], 2, group_id="g")
    with pytest.raises(ValueError, match="present twice"):
        check_complete_group(["a", "a"], 2, group_id="g")
