"""Prompt groups against the real ledger, store and control routes."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from forest_schema import Reason, TensorRef
from forest_schema.shards import ShardError
from megatron_forest_trainer.config import parse_config
from megatron_forest_trainer.controller.client import ControlClient
from megatron_forest_trainer.controller.collect import DropBudgetExceeded, StepGroups
from megatron_forest_trainer.controller.rollouts import rollout_seed
from megatron_forest_trainer.controller.setup import sampling_fields
from megatron_forest_trainer.controller.step import prompt_groups

from tests.support.scripted_server import ScriptedServer
from tests.trainer.controller.conftest import Events, MakeCollector, client_of
from tests.trainer.controller.scripts import Scripted

OK = ["say 4"]


def collect(server: ScriptedServer, make: MakeCollector, *args: Any, **kwargs: Any) -> StepGroups:
    """One step."""

    async def body() -> StepGroups:
        async with client_of(server) as client:
            return await make(client, *args, **kwargs).collect(1)

    return asyncio.run(body())


def chat_requests(server: ScriptedServer) -> int:
    return sum(path.endswith("/chat/completions") for path in server.requests)


def reasons(step: StepGroups) -> list[Reason | None]:
    return [rollout.finalized.reason for group in step.groups for rollout in group.rollouts]


@pytest.mark.requirement("F3")
def test_a_group_comes_back_in_generation_order_with_its_rows(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    step = collect(server, make_collector, [[["say 3", "say 4"], ["say 5", "rewrite", "say 2"]]])
    (group,) = step.groups
    first, second = group.rollouts
    assert [r.rollout_id for r in group.rollouts] == ["step000001-g0000-r0", "step000001-g0000-r1"]
    assert [row.owned_tokens for row in first.finalized.rows] == [7]
    assert [row.owned_tokens for row in second.finalized.rows] == [5, 2]
    assert first.receipt.closed
    assert first.receipt.group_id == "step000001-g0000"
    assert first.receipt.metadata == {"task_position": 0}


def test_every_rollout_has_its_own_fixed_seed(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    harness = Scripted()
    collect(server, make_collector, [[OK, OK]], harness=harness)
    expected = {rollout_seed(0, "step000001-g0000", index) for index in range(2)}
    assert set(harness.seeds) == expected
    assert len(expected) == 2


def test_no_more_attempts_are_open_than_permitted(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    tasks = [[OK, OK, OK]] * 4
    step = collect(server, make_collector, tasks, groups=4, concurrent=3)
    assert sum(len(group.rollouts) for group in step.groups) == 12
    assert server.open_most <= 3


@pytest.mark.requirement("XF7", "I3", "I4", "I18")
def test_a_rollout_without_captures_is_masked_and_its_siblings_stay(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    step = collect(server, make_collector, [[OK, ["lose"], OK]], pending_wait_s=0.2)
    assert reasons(step) == [None, Reason.CAPTURE_PENDING, None]
    assert step.groups[0].rollouts[1].finalized.rows == ()
    # The masked rollout keeps its place in the group, without a vote.
    assert len(prompt_groups(step.groups)[0].outcomes) == 3
    assert step.lost == 0


@pytest.mark.requirement("I3", "I4")
def test_a_failed_call_masks_although_the_harness_went_on(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    step = collect(server, make_collector, [[["shrug fail", "say 4"], ["say 4", "shrug fail"], OK]])
    assert reasons(step) == [Reason.CAPTURE_INCOMPLETE, Reason.CAPTURE_INCOMPLETE, None]


@pytest.mark.requirement("E7")
def test_evidence_that_does_not_fit_masks_the_rollout(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    step = collect(server, make_collector, [[OK, ["say 4", "lie"]]])
    assert reasons(step) == [None, Reason.EVIDENCE_ERROR]
    assert "is not that call's whole generation" in step.groups[0].rollouts[1].finalized.detail


@pytest.mark.requirement("I11", "I13")
@pytest.mark.parametrize(
    ("script", "reason", "told"),
    [
        (["say 4", "hang"], Reason.ROLLOUT_TIMEOUT, "rollout_timeout_s = 0.5"),
        (["say 4", "sleep"], Reason.ROLLOUT_TIMEOUT, "rollout_timeout_s = 0.5"),
        (["crash"], Reason.TRANSPORT_FAILURE, "InternalServerError"),
        (["unplug"], Reason.TRANSPORT_FAILURE, "ConnectError"),
        (["refuse"], Reason.HARNESS_ERROR, "context too long"),
        (["break"], Reason.HARNESS_ERROR, "scripted bug"),
    ],
)
def test_a_rollout_without_a_result_drops_its_group_and_only_that(
    server: ScriptedServer,
    make_collector: MakeCollector,
    events: Events,
    script: list[str],
    reason: Reason,
    told: str,
) -> None:
    tasks = [[OK, script], [OK, OK]]
    step = collect(
        server, make_collector, tasks, groups=2, max_dropped_groups=1, max_replacements=5,
        timeout_s=0.5,
    )  # fmt: skip
    assert [group.request.task.index for group in step.groups] == [1]
    assert (step.lost, step.replacements) == (1, 0)
    (dropped,) = step.dropped
    assert dropped is events.dropped[0]
    assert dropped.reason is reason
    assert told in dropped.detail
    # A sibling that was cancelled while it opened its attempt leaves it to the partition's end.
    assert 1 <= len(dropped.attempts) <= 2
    opened = [p for p in server.requests if p == "POST /v1/forest/control/attempts"]
    assert len(opened) == 4
    for attempt in dropped.attempts:
        assert server.run(server.capture.ledger.receipt(attempt)).closed


@pytest.mark.requirement("I16")
def test_a_server_error_is_not_tried_again_by_the_client(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    with pytest.raises(DropBudgetExceeded):
        collect(server, make_collector, [[["crash"]]])
    assert chat_requests(server) == 1


@pytest.mark.requirement("I16")
def test_a_server_that_vanishes_drops_the_group_as_a_transport_failure(
    server: ScriptedServer, make_collector: MakeCollector, events: Events
) -> None:
    async def body() -> None:
        async with ControlClient("http://127.0.0.1:9", "t", attempts=1) as client:
            with pytest.raises(DropBudgetExceeded, match="transport_failure"):
                await make_collector(client, [[OK]]).collect(1)

    asyncio.run(body())


@pytest.mark.requirement("I12", "G23")
def test_the_drop_budget_is_of_the_whole_run(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    async def body() -> None:
        async with client_of(server) as client:
            collector = make_collector(client, [[["break"]], [OK]], groups=2, max_dropped_groups=1)
            assert (await collector.collect(1)).lost == 1
            with pytest.raises(DropBudgetExceeded, match="max_dropped_groups permits 1") as caught:
                await collector.collect(2)
            assert caught.value.reason is Reason.DROP_BUDGET_EXCEEDED
            assert "scripted bug" in str(caught.value)

    asyncio.run(body())


@pytest.mark.requirement("I12", "K9")
def test_a_step_below_its_floor_stops_the_run_and_the_other_rollouts(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    tasks = [[["break"]], [["say 4", "hang"]], [["say 4", "hang"]]]
    with pytest.raises(DropBudgetExceeded, match=r"min_step_batch_fraction = 0\.9 asks for 3"):
        collect(
            server, make_collector, tasks, groups=3, max_dropped_groups=9,
            min_step_batch_fraction=0.9, timeout_s=60,
        )  # fmt: skip


@pytest.mark.requirement("I12")
def test_a_step_without_any_group_stops_the_run(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    with pytest.raises(DropBudgetExceeded, match="0 of 1 prompt groups are left"):
        collect(server, make_collector, [[["break"]]], max_dropped_groups=9)


@pytest.mark.requirement("I5")
def test_a_group_without_any_valid_rollout_has_no_layout_and_is_dropped(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    tasks = [[["shrug fail"], ["shrug fail"]], [OK, OK]]
    step = collect(server, make_collector, tasks, groups=2, max_dropped_groups=1)
    assert [group.reason for group in step.dropped] == [Reason.NO_VALID_LAYOUT]
    assert len(step.groups) == 1


@pytest.mark.requirement("G12")
def test_a_group_below_the_valid_fraction_is_replaced_by_a_fresh_prompt(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    bad = ["shrug fail", "say 4"]
    tasks = [[OK, bad], [OK, OK], [OK, OK]]
    step = collect(
        server, make_collector, tasks, groups=2, min_valid_fraction_per_group=1.0,
        max_replacements=1,
    )  # fmt: skip
    assert [group.request.task.position for group in step.groups] == [1, 2]
    assert [group.reason for group in step.dropped] == [Reason.BELOW_MIN_VALID_FRACTION]
    assert (step.lost, step.replacements) == (0, 1)
    assert step.dropped_by_reason() == {"below_min_valid_fraction": 1}


@pytest.mark.requirement("G12", "I12")
def test_without_a_replacement_left_the_group_counts_as_dropped(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    bad = ["shrug fail", "say 4"]
    with pytest.raises(DropBudgetExceeded, match="below_min_valid_fraction: 1 of 2 rollouts"):
        collect(
            server, make_collector, [[OK, bad]], min_valid_fraction_per_group=0.9,
            max_replacements=2,
        )  # fmt: skip


@pytest.mark.requirement("G12")
def test_half_of_the_rollouts_verified_is_enough_for_a_minimum_of_a_half(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    step = collect(
        server, make_collector, [[OK, ["shrug fail", "say 4"]]], min_valid_fraction_per_group=0.5
    )
    assert len(step.groups) == 1


@pytest.mark.requirement("I14")
def test_an_integrity_error_raises_and_is_no_drop(
    server: ScriptedServer, make_collector: MakeCollector, tmp_path: Path
) -> None:
    class Damaged:
        def read(self, ref: TensorRef) -> Any:
            raise ShardError(Reason.DIGEST_MISMATCH, "damaged")

    async def body() -> None:
        async with client_of(server) as client:
            collector = make_collector(client, [[OK, OK]], max_dropped_groups=9)
            object.__setattr__(collector.runner.book, "reader", Damaged())
            with pytest.raises(ShardError, match="damaged"):
                await collector.collect(1)

    asyncio.run(body())


@pytest.mark.requirement("I14")
def test_cancellation_passes_through_and_leaves_no_task(
    server: ScriptedServer, make_collector: MakeCollector
) -> None:
    async def body() -> None:
        async with client_of(server) as client:
            collector = make_collector(client, [[["hang"], ["hang"]]], timeout_s=60)
            running = asyncio.create_task(collector.collect(1))
            while server.open_now < 2:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert collector.dropped_until(1) == 0

    asyncio.run(body())


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "returned NoneType"),
        ({"responses": []}, "reward'] is None"),
        ({"responses": [], "reward": math.nan}, "is nan"),
        ({"responses": [], "reward": True}, "is True"),
        ({"responses": [object()], "reward": 1}, "not plain JSON data"),
    ],
)
def test_a_result_that_cannot_be_used_is_the_harness_s_error(
    server: ScriptedServer, make_collector: MakeCollector, result: Any, told: str
) -> None:
    async def harness(*_: Any, **__: Any) -> Any:
        return result

    with pytest.raises(DropBudgetExceeded, match="harness_error") as caught:
        collect(server, make_collector, [[OK]], harness=harness)
    assert told in str(caught.value)


@pytest.mark.requirement("C22")
@pytest.mark.parametrize(("overrides", "top_k"), [([], -1), (["policy.generation.top_k=20"], 20)])
def test_the_request_states_the_whole_distribution(overrides: list[str], top_k: int) -> None:
    fields = sampling_fields(parse_config("", overrides))
    assert fields == {"temperature": 1.0, "top_p": 1.0, "extra_body": {"top_k": top_k}}
