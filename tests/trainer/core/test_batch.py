from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema import Reason
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.batch import (
    AdvantageRules,
    Outcome,
    PromptGroup,
    batch_metrics,
    plan_batch,
)
from megatron_forest_trainer.core.filters import decide, group_problem, step_floor
from megatron_forest_trainer.core.metrics import TokenErrors, error_metrics, rollout_metrics
from megatron_forest_trainer.core.plan import FixedShape, NoRetainedTokens, PackedShape
from megatron_forest_trainer.core.types import Finalized
from megatron_forest_trainer.finalize import finalize_rollout

from tests.support.forests import Forest

ONE_BY_ONE = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)
MEAN = {"leave_one_out": False, "normalize": False}


def rollout(
    group: str, name: str, rows: int = 1, generated: int = 4, finish: str = "stop"
) -> Finalized:
    """A verified rollout of `rows` independent roots."""
    forest = Forest(group_id=group, rollout_id=name, attempt_id=f"att_{group}{name}")
    calls = [forest.call(generated=generated, finish_reason=finish) for _ in range(rows)]
    return finalize_rollout(forest.receipt(), forest.result(*calls), forest.reader())


def masked(group: str, name: str) -> Finalized:
    return Finalized(
        group_id=group, rollout_id=name, attempt_id="att", reason=Reason.CAPTURE_INCOMPLETE
    )


def group(name: str, rewards: list[float], rollouts: list[Finalized], **more: Any) -> PromptGroup:
    outcomes = tuple(
        Outcome(rollout=r, reward=reward, **more)
        for r, reward in zip(rollouts, rewards, strict=True)
    )
    return PromptGroup(group_id=name, outcomes=outcomes)


def rules(count: int, **options: Any) -> AdvantageRules:
    return AdvantageRules(generations_per_prompt=count, **options)


@pytest.mark.requirement("XL1", "F18", "G1", "G2")
def test_every_row_gets_its_rollouts_advantage() -> None:
    groups = [group("g", [1, 0], [rollout("g", "r0", rows=3), rollout("g", "r1")])]
    batch = plan_batch(0, groups, rules(2, **MEAN), ONE_BY_ONE)
    assert [row.advantage for row in batch.plan.rows] == [0.5, 0.5, 0.5, -0.5]
    assert batch.advantages == {"g/r0": 0.5, "g/r1": -0.5}


@pytest.mark.requirement("XL2", "F18", "G15")
def test_rows_of_different_lengths_share_one_advantage() -> None:
    forest = Forest(group_id="g")
    calls = [forest.call(generated=n) for n in (5, 9, 3)]
    first = finalize_rollout(forest.receipt(), forest.result(*calls), forest.reader())
    groups = [group("g", [1, 0], [first, rollout("g", "r1")])]
    batch = plan_batch(0, groups, rules(2, **MEAN), ONE_BY_ONE)
    assert [(row.retained_tokens, row.advantage) for row in batch.plan.rows[:3]] == [
        (5, 0.5),
        (9, 0.5),
        (3, 0.5),
    ]
    assert batch.plan.retained_tokens == 5 + 9 + 3 + 4


@pytest.mark.requirement("G3")
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=2, max_size=5))
@settings(deadline=None, max_examples=30)
def test_whole_group_sharding_changes_no_advantage(rewards: list[list[int]]) -> None:
    groups = [
        group(
            f"g{n}",
            list(map(float, row)),
            [rollout(f"g{n}", f"r{i}", rows=i + 1) for i in range(3)],
        )
        for n, row in enumerate(rewards)
    ]
    whole = plan_batch(0, groups, rules(3), ONE_BY_ONE)
    sharded: dict[str, float] = {}
    for one in groups:
        sharded |= plan_batch(0, [one], rules(3), ONE_BY_ONE).advantages
    assert sharded == whole.advantages


@pytest.mark.requirement("G1")
def test_an_incomplete_group_is_refused() -> None:
    groups = [group("g", [1.0], [rollout("g", "r0")])]
    with pytest.raises(ValueError, match="has 1 of 2 rollouts"):
        plan_batch(0, groups, rules(2), ONE_BY_ONE)


@pytest.mark.requirement("XL7", "I12")
def test_no_step_splits_a_rollout() -> None:
    rollouts = [rollout("g", f"r{i}", rows=rows) for i, rows in enumerate((1, 4, 2))]
    batch = plan_batch(0, [group("g", [0, 1, 2], rollouts)], rules(3), ONE_BY_ONE)
    assert [row.row_id for row in batch.plan.rows] == [
        row.row_id for one in rollouts for row in one.rows
    ]


@pytest.mark.requirement("XL8", "G14", "E16")
def test_overlong_filtering_leaves_out_every_row_of_the_rollout() -> None:
    forest = Forest(group_id="g")
    first = forest.call(finish_reason="length")
    calls = [first, forest.call(first), forest.call(prompt=1, generated=1)]
    long = finalize_rollout(forest.receipt(), forest.result(*calls), forest.reader())
    groups = [group("g", [1, 0], [long, rollout("g", "r1")])]
    kept = plan_batch(0, groups, rules(2, **MEAN), ONE_BY_ONE)
    assert all(row.train for row in kept.plan.rows)
    batch = plan_batch(0, groups, rules(2, overlong_filtering=True, **MEAN), ONE_BY_ONE)
    assert [row.train for row in batch.plan.rows] == [False, False, True]
    # The filtered rollout still votes: the other's baseline is unchanged.
    assert [row.advantage for row in batch.plan.rows] == [0.0, 0.0, -0.5]
    assert batch.plan.retained_tokens == 4
    assert batch_metrics(groups, batch)["overlong_filtered"] == 1.0


@pytest.mark.requirement("XL9", "G24")
def test_a_step_without_a_retained_token_is_refused() -> None:
    groups = [group("g", [1, 0], [rollout("g", "r0"), rollout("g", "r1")])]
    errors = {f"g/r{i}/s0": TokenErrors(tokens=4, mult=8.0) for i in (0, 1)}
    with pytest.raises(NoRetainedTokens, match="none of the 2 rows"):
        plan_batch(0, groups, rules(2, logprob_error_threshold=1.5), ONE_BY_ONE, row_errors=errors)


@pytest.mark.requirement("G6", "G7", "G8", "G11")
def test_the_error_filter_pools_over_the_rollout_and_keeps_equality() -> None:
    """Row means 2 and 1 with 3 and 1 tokens pool to 1.75, whatever the rows are."""
    groups = [
        group("g", [1, 1, 0, 0], [rollout("g", f"r{i}", rows=1 + (i == 0)) for i in range(4)])
    ]
    errors = {f"g/r{i}/s0": TokenErrors(tokens=4, mult=4.0) for i in range(4)}
    errors["g/r0/s0"] = TokenErrors(tokens=3, mult=6.0)
    errors["g/r0/s1"] = TokenErrors(tokens=1, mult=1.0)

    def planned(threshold: float, policy: str) -> Any:
        options = rules(4, logprob_error_threshold=threshold, masked_reward_policy=policy, **MEAN)
        return plan_batch(0, groups, options, ONE_BY_ONE, row_errors=errors)

    equal = planned(1.75, "exclude")
    assert all(row.train for row in equal.plan.rows)
    excluded = planned(1.74, "exclude")
    assert [row.train for row in excluded.plan.rows] == [False, False, True, True, True]
    np.testing.assert_allclose(
        [row.advantage for row in excluded.plan.rows], [0, 0, 2 / 3, -1 / 3, -1 / 3]
    )
    included = planned(1.74, "include")
    np.testing.assert_allclose(
        [row.advantage for row in included.plan.rows], [0, 0, 0.5, -0.5, -0.5]
    )
    metrics = batch_metrics(groups, excluded)
    assert metrics["num_masked_sequences"] == 2.0
    assert metrics["masked_correct_pct"] == 1.0
    assert metrics["valid_rows"] == 3.0


@pytest.mark.requirement("G10")
def test_without_a_threshold_errors_only_report() -> None:
    groups = [group("g", [1, 0], [rollout("g", "r0"), rollout("g", "r1")])]
    errors = {f"g/r{i}/s0": TokenErrors(tokens=1, mult=99.0) for i in (0, 1)}
    batch = plan_batch(0, groups, rules(2), ONE_BY_ONE, row_errors=errors)
    assert all(row.train for row in batch.plan.rows)


def test_the_layout_does_not_depend_on_the_errors() -> None:
    groups = [group("g", [1, 0], [rollout("g", "r0", rows=3), rollout("g", "r1", rows=2)])]
    shape = FixedShape(data_parallel=2, train_micro_batch=1, logprob_micro_batch=2)
    options = rules(2, logprob_error_threshold=1.5)
    errors = {
        row.row_id: TokenErrors(tokens=4, mult=4.0)
        for o in groups[0].outcomes
        for row in o.rollout.rows
    }
    errors["g/r0/s1"] = TokenErrors(tokens=4, mult=400.0)
    before = plan_batch(0, groups, options, shape).plan
    after = plan_batch(0, groups, options, shape, row_errors=errors).plan
    assert (before.train, before.logprob) == (after.train, after.logprob)
    assert [row.row_id for row in before.rows] == [row.row_id for row in after.rows]
    assert after.retained_tokens == 8


@pytest.mark.requirement("I3", "I18", "H4", "XF7")
def test_a_masked_sibling_leaves_the_group_complete() -> None:
    groups = [group("g", [1, 9, 0], [rollout("g", "r0"), masked("g", "r1"), rollout("g", "r2")])]
    batch = plan_batch(0, groups, rules(3, **MEAN), ONE_BY_ONE)
    assert batch.advantages == {"g/r0": 0.5, "g/r1": 0.0, "g/r2": -0.5}
    assert len(batch.plan.rows) == 2


@pytest.mark.requirement("G13", "G20")
def test_environment_masks_count_once_and_keep_the_vote() -> None:
    first = Outcome(rollout=rollout("g", "r0", rows=3), reward=1.0, environment_mask=True)
    second = Outcome(rollout=rollout("g", "r1"), reward=0.0)
    groups = [PromptGroup(group_id="g", outcomes=(first, second))]
    shape = FixedShape(data_parallel=4, train_micro_batch=2, logprob_micro_batch=1)
    batch = plan_batch(0, groups, rules(2, **MEAN), shape)
    metrics = batch_metrics(groups, batch)
    assert metrics["environment_filtered"] == 1.0
    assert metrics["padding_rows"] == 4.0
    assert batch.advantages == {"g/r0": 0.0, "g/r1": -0.5}
    generation = rollout_metrics([o.rollout for o in groups[0].outcomes], [1.0, 0.0])
    assert generation["gen_tokens_per_sample"] == (12 + 4) / 2


@pytest.mark.requirement("XL3", "H4", "G2", "G13")
@pytest.mark.parametrize("multiple", [5, 8, 12])
def test_padding_changes_neither_metrics_nor_the_normaliser(multiple: int) -> None:
    """0, 3 and 7 padding rows behind the same 5 rows."""
    groups = [group("g", [1, 0], [rollout("g", "r0", rows=3), rollout("g", "r1", rows=2)])]
    shape = FixedShape(data_parallel=multiple, train_micro_batch=1, logprob_micro_batch=1)
    batch = plan_batch(0, groups, rules(2), shape)
    plain = plan_batch(0, groups, rules(2), ONE_BY_ONE)
    assert batch.plan.retained_tokens == plain.plan.retained_tokens == 20
    assert batch.advantages == plain.advantages
    padding = batch.plan.rows[5:]
    assert len(padding) == multiple - 5
    assert all(
        (row.plan, row.advantage, row.train, row.retained_tokens) == (None, 0.0, False, 0)
        for row in padding
    )
    ours, theirs = batch_metrics(groups, batch), batch_metrics(groups, plain)
    assert ours.pop("padding_rows") == multiple - 5
    assert theirs.pop("padding_rows") == 0
    assert ours == theirs


@pytest.mark.requirement("H1", "H2", "H10", "XL11")
def test_thirteen_rows_of_two_groups_over_four_ranks_get_three_padding_rows() -> None:
    groups = [
        group("g0", [1, 0, 1], [rollout("g0", f"r{i}", rows=n) for i, n in enumerate((3, 2, 2))]),
        group("g1", [1, 0, 1], [rollout("g1", f"r{i}", rows=n) for i, n in enumerate((1, 4, 1))]),
    ]
    shape = FixedShape(data_parallel=4, train_micro_batch=1, logprob_micro_batch=1)
    batch = plan_batch(0, groups, rules(3), shape)
    rows = batch.plan.rows
    assert len(rows) == 16
    assert [row.row_id for row in rows if row.plan is None] == ["g0/pad0", "g1/pad0", "g1/pad1"]
    assert [row.row_id for row in rows].index("g0/pad0") == 7
    few = [group("g", [1, 0, 1], [rollout("g", f"r{i}") for i in range(3)])]
    assert len(plan_batch(0, few, rules(3), shape).plan.rows) == 4


@pytest.mark.requirement("H3")
def test_packed_rows_need_only_the_data_parallel_size() -> None:
    groups = [group("g", [1, 0], [rollout("g", "r0", rows=3), rollout("g", "r1", rows=2)])]
    shape = PackedShape(data_parallel=2, train_tokens=64, logprob_tokens=64)
    assert len(plan_batch(0, groups, rules(2), shape).plan.rows) == 6


# Group and step filters


@pytest.mark.requirement("G12", "K9")
def test_the_minimum_valid_fraction_counts_rollouts_once() -> None:
    four = [rollout("g", "r0", rows=5), rollout("g", "r1"), masked("g", "r2"), masked("g", "r3")]
    assert group_problem(four, None) is None
    assert group_problem(four, 0.5) is None
    assert group_problem(four, 0.51) is Reason.BELOW_MIN_VALID_FRACTION


@pytest.mark.requirement("I5")
def test_a_group_without_any_row_has_no_layout() -> None:
    assert group_problem([masked("g", "r0")], None) is Reason.NO_VALID_LAYOUT


@pytest.mark.requirement("I12", "K9")
@pytest.mark.parametrize(
    ("prompts", "fraction", "floor"),
    [(8, None, 1), (8, 1.0, 8), (8, 0.9, 8), (10, 0.9, 9), (100, 0.55, 55), (4, 0.01, 1)],
)
def test_the_step_floor_rounds_up(prompts: int, fraction: float | None, floor: int) -> None:
    assert step_floor(prompts, fraction) == floor


@pytest.mark.requirement("G7")
def test_an_error_that_is_no_number_masks() -> None:
    decision = decide(rollout("g", "r0"), logprob_error=float("nan"), logprob_error_threshold=1.5)
    assert decision.reason is Reason.LOGPROB_ERROR_ABOVE_THRESHOLD
    assert not decision.trains


@pytest.mark.requirement("G8")
def test_an_unverified_rollout_never_votes() -> None:
    for policy in ("include", "exclude"):
        decision = decide(masked("g", "r0"), masked_reward_policy=policy)  # type: ignore[arg-type]
        assert (decision.trains, decision.votes) == (False, False)


@pytest.mark.requirement("E30", "G16", "G17", "G18", "G20")
def test_rollout_metrics_have_one_observation_per_rollout() -> None:
    closed = rollout("g", "r0", rows=2, generated=6, finish="length")
    omitted = msgspec.structs.replace(masked("g", "r1"), reason=Reason.SELECTION_NOT_CLOSED)
    got = rollout_metrics([closed, omitted, masked("g", "r2")], [1.0, 0.0, None])
    assert got == {
        "logical_rollouts": 3.0,
        "gen_tokens_per_sample": 4.0,
        "max_gen_tokens_per_turn": 6.0,
        "total_tokens_per_sample": 3.0,
        "truncated_rollouts": 1.0,
        "unique_tokens": 18.0,
        "row_tokens": 18.0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "finalize/masked_rollouts": 2.0,
        "finalize/selection_not_closed_rollouts": 1.0,
        "finalize/masked_rollouts/capture_incomplete": 1.0,
        "finalize/masked_rollouts/selection_not_closed": 1.0,
    }


@pytest.mark.requirement("F11")
def test_tokens_without_replayed_routes_are_counted_in_every_row() -> None:
    forest = Forest(mixture=(2, 2, 8))
    parent = forest.call(prompt=3, generated=4, routed=False)
    calls = [parent, *(forest.call(parent, prompt=2, generated=3, routed=r) for r in (True, False))]
    live = finalize_rollout(forest.receipt(), forest.result(*calls), forest.reader())
    replayed = rollout_metrics([live, masked("g", "r1")], [1.0, 0.0], replayed=True)
    # Both rows have the parent's tokens; the first child brings a route for the last of them.
    assert replayed["live_routed_tokens"] == 6 + (7 + 4)
    assert "live_routed_tokens" not in rollout_metrics([live], [1.0])


def test_every_metric_is_documented() -> None:
    groups = [group("g", [1, 0], [rollout("g", "r0"), rollout("g", "r1")])]
    batch = plan_batch(0, groups, rules(2), ONE_BY_ONE)
    names = {
        **rollout_metrics([o.rollout for o in groups[0].outcomes], [1.0, 0.0], replayed=True),
        **batch_metrics(groups, batch),
        **error_metrics([TokenErrors(tokens=1, mult=1.0)]),
    }
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    undocumented = [
        name for name in names if name not in page and f"`/{name.rpartition('/')[2]}`" not in page
    ]
    assert undocumented == []
