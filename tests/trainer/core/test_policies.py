from typing import Any

import msgspec
import pytest
from forest_schema import CallRecord, CompletionStatus
from megatron_forest_trainer.core.errors import EvidenceError, SelectionError
from megatron_forest_trainer.core.selection import all_captured, check_selection, select_responses

from tests.support.forests import Forest


def ids(records: Any) -> list[str]:
    return [record.call_id for record in records]


# all_captured


def scored(call: CallRecord) -> dict[str, Any]:
    return {"terminal_response_id": call.output.response_id}


@pytest.mark.requirement("E12", "E19")
def test_all_captured_takes_retries_and_branches() -> None:
    forest = Forest()
    shared = forest.call()
    left, right = forest.call(shared), forest.call(shared)
    retry = forest.call()
    selection = all_captured(forest.calls, scored(left))
    assert ids(selection.records) == ids([shared, left, right, retry])
    assert selection.terminal_response_id == left.output.response_id


BAD_ENDS = [
    (CompletionStatus.FAILED, "abort"),
    (CompletionStatus.UNKNOWN, None),
    (CompletionStatus.INCOMPLETE, "content_filter"),
]


@pytest.mark.requirement("E13", "XF2")
@pytest.mark.parametrize(("status", "finish"), BAD_ENDS)
def test_unscored_leaves_that_ended_badly_are_left_out(
    status: CompletionStatus, finish: str | None
) -> None:
    forest = Forest()
    good = forest.call()
    forest.call(status=status, finish_reason=finish)
    assert ids(all_captured(forest.calls, scored(good)).records) == [good.call_id]


@pytest.mark.requirement("E14")
@pytest.mark.parametrize(("status", "finish"), BAD_ENDS)
def test_they_stay_with_children_or_when_scored(
    status: CompletionStatus, finish: str | None
) -> None:
    forest = Forest()
    parent = forest.call(status=status, finish_reason=finish)
    child = forest.call(parent)
    assert ids(all_captured(forest.calls, scored(child)).records) == ids([parent, child])
    alone = Forest()
    last = alone.call(status=status, finish_reason=finish)
    assert ids(all_captured(alone.calls, scored(last)).records) == [last.call_id]


@pytest.mark.requirement("E16")
def test_length_limited_calls_stay_eligible() -> None:
    forest = Forest()
    good = forest.call()
    cut = forest.call(status=CompletionStatus.INCOMPLETE, finish_reason="length")
    assert ids(all_captured(forest.calls, scored(good)).records) == ids([good, cut])


@pytest.mark.requirement("E15")
@pytest.mark.parametrize("status", [CompletionStatus.COMPLETED, CompletionStatus.INCOMPLETE])
def test_missing_completion_metadata_is_an_error(status: CompletionStatus) -> None:
    forest = Forest()
    good = forest.call()
    forest.call(status=status, finish_reason=None)
    with pytest.raises(EvidenceError, match="without a finish reason"):
        all_captured(forest.calls, scored(good))


@pytest.mark.requirement("E17", "E18")
def test_all_captured_finds_the_scored_call_by_content_but_never_by_order() -> None:
    forest = Forest()
    first, second = forest.call(text="one"), forest.call(text="two")
    by_content = {"response": {"output": [{"role": "assistant", "content": "one"}]}}
    assert all_captured(forest.calls, by_content).terminal_response_id == first.output.response_id
    by_id = {"response": {"id": second.output.response_id}}
    assert all_captured(forest.calls, by_id).terminal_response_id == second.output.response_id
    with pytest.raises(EvidenceError, match="which call was scored"):
        all_captured(forest.calls, {"reward": 1.0})


# The contract of custom policies


@pytest.mark.requirement("E21", "E22", "E23", "F14")
def test_the_policy_contract() -> None:
    forest, stranger = Forest(), Forest(attempt_id="att_1")
    a, b = forest.call(), forest.call()
    foreign = stranger.call()
    terminal = a.output.response_id
    kept = check_selection(forest.calls, [b, a], terminal)
    assert kept.records == (b, a)
    with pytest.raises(SelectionError, match="selected no call"):
        check_selection(forest.calls, [], terminal)
    with pytest.raises(SelectionError, match="selected twice"):
        check_selection(forest.calls, [a, a], terminal)
    with pytest.raises(SelectionError, match="not of this attempt"):
        check_selection(forest.calls, [a, foreign], terminal)
    with pytest.raises(SelectionError, match="was changed"):
        check_selection(forest.calls, [msgspec.structs.replace(a, model="other")], terminal)
    with pytest.raises(SelectionError, match="not a record"):
        check_selection(forest.calls, ["a"], terminal)  # type: ignore[list-item]
    with pytest.raises(SelectionError, match="was not selected"):
        check_selection(forest.calls, [b], terminal)


@pytest.mark.requirement("E25")
def test_a_selection_without_a_scored_response_is_rejected() -> None:
    forest = Forest()
    call = forest.call()
    with pytest.raises(EvidenceError, match="names no scored response"):
        check_selection(forest.calls, [call], None)


@pytest.mark.requirement("E33", "E34", "L6")
def test_an_adapter_selects_by_response_id() -> None:
    forest = Forest()
    a, b = forest.call(), forest.call()
    wanted = [b.output.response_id, a.output.response_id]
    selection = select_responses(forest.calls, wanted, wanted[1])
    assert ids(selection.records) == ids([b, a])
    with pytest.raises(EvidenceError, match="no captured call served response gone"):
        select_responses(forest.calls, [*wanted, "gone"], wanted[0])
