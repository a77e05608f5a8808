from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.errors import EvidenceError
from megatron_forest_trainer.core.selection import (
    returned_history,
)

from tests.support.forests import Forest, forests


def ids(records: Any) -> list[str]:
    return [record.call_id for record in records]


def reasoning_item(text: str, item_id: str = "rs_1") -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": [{"type": "summary_text", "text": text}]}


def message_item(text: str, item_id: str = "msg_1") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": item_id, "role": "assistant", "content": [part]}


def call_item(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def result_item(call_id: str, output: str = "42") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def chat_call(call_id: str, arguments: str = "{}", content: str | None = None) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.fixture
def responses_forest() -> Forest:
    """Three Responses calls: a tool call with reasoning, a rejected answer, the accepted answer."""
    forest = Forest()
    first = forest.call(
        output=[reasoning_item("think", "rs_a"), call_item("look", '{"x": 1}', "call_a")],
        api="responses",
    )
    forest.call(first, output=[message_item("wrong", "msg_b")], api="responses")
    forest.call(first, output=[message_item("right", "msg_c")], api="responses")
    return forest


def whole_output() -> list[dict[str, Any]]:
    return [
        reasoning_item("think", "rs_a"),
        call_item("look", '{"x":1}', "call_a"),
        result_item("call_a"),
        message_item("right", "msg_c"),
    ]


# Evidence forms of returned_history


@pytest.mark.requirement("E2", "E3", "E18")
@given(forests(), st.data())
@settings(deadline=None)
def test_ordered_responses_select_exactly_the_returned_calls(
    forest: Forest, data: st.DataObject
) -> None:
    returned = data.draw(st.lists(st.sampled_from(forest.calls), min_size=1, unique_by=id))
    with_ids = data.draw(st.booleans())
    selection = returned_history(forest.calls, forest.result(*returned, with_ids=with_ids))
    assert ids(selection.records) == sorted(ids(returned), key=lambda c: int(c.split("-c")[1]))
    assert selection.terminal_response_id == returned[-1].output.response_id


@pytest.mark.requirement("E7", "E10")
@given(forests(unique_texts=False), st.data())
@settings(deadline=None)
def test_a_selection_by_content_is_right_or_refused(forest: Forest, data: st.DataObject) -> None:
    """Generations that say the same are never told apart by a guess."""
    returned = data.draw(st.lists(st.sampled_from(forest.calls), min_size=1, unique_by=id))
    named = returned_history(forest.calls, forest.result(*returned))
    assert set(ids(named.records)) == set(ids(returned))
    try:
        selection = returned_history(forest.calls, forest.result(*returned, with_ids=False))
    except EvidenceError:
        texts = [forest.outputs[call.call_id][0]["content"] for call in forest.calls]
        assert len(set(texts)) < len(texts)
    else:
        assert set(ids(selection.records)) == set(ids(returned))


@pytest.mark.requirement("E3", "E5", "E11")
def test_response_output_spans_calls_before_and_after_a_compaction() -> None:
    forest = Forest()
    before = forest.call(output=[chat_call("call_0")])
    after = forest.call(output=[{"role": "assistant", "content": "done"}])
    forest.call(output=[{"role": "assistant", "content": "rejected"}])
    tool = {"role": "tool", "tool_call_id": "call_0", "content": "42"}
    output = [*forest.outputs[before.call_id], tool, *forest.outputs[after.call_id]]
    selection = returned_history(forest.calls, {"response": {"output": output}})
    assert ids(selection.records) == ids([before, after])
    assert selection.terminal_response_id == after.output.response_id


@pytest.mark.requirement("E3", "E5")
def test_responses_items_are_grouped_into_whole_generations(responses_forest: Forest) -> None:
    first, _, right = responses_forest.calls
    selection = returned_history(
        responses_forest.calls, {"response": {"id": "made-up", "output": whole_output()}}
    )
    assert ids(selection.records) == ids([first, right])
    assert selection.terminal_response_id == right.output.response_id


@pytest.mark.requirement("E3")
def test_adjacent_generations_are_cut_apart_by_content(responses_forest: Forest) -> None:
    """A user message between two answers is often not part of the returned output."""
    first, wrong, right = responses_forest.calls
    output = [*whole_output(), message_item("wrong", "msg_b")]
    selection = returned_history(responses_forest.calls, {"response": {"output": output}})
    assert ids(selection.records) == ids([first, wrong, right])


@pytest.mark.requirement("E7")
def test_a_run_that_can_be_cut_in_several_ways_is_ambiguous() -> None:
    forest = Forest()
    a, b = message_item("a", "x"), message_item("b", "y")
    forest.call(output=[a], api="responses")
    forest.call(output=[b], api="responses")
    forest.call(output=[a, b], api="responses")
    bare = [{k: v for k, v in item.items() if k != "id"} for item in (a, b)]
    with pytest.raises(EvidenceError, match="in several ways"):
        returned_history(forest.calls, {"response": {"output": bare}})


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("place", ["transitions", "response"])
def test_transition_snapshots_select_what_any_snapshot_shows(place: str) -> None:
    forest = Forest()
    first = forest.call(output=[chat_call("call_0")])
    second = forest.call(first, output=[chat_call("call_1", '{"n": 2}')])
    third = forest.call(output=[{"role": "assistant", "content": "done"}])
    forest.call(output=[{"role": "assistant", "content": "rejected"}])
    user = {"role": "user", "content": "task"}
    few_shot = {"role": "assistant", "content": "an example that no call generated"}
    tools = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "r"} for n in (0, 1)]
    turns = [forest.outputs[call.call_id][0] for call in (first, second, third)]
    snapshots = [
        [few_shot, user, turns[0], tools[0]],
        [few_shot, user, turns[0], tools[0], turns[1], tools[1]],
        [few_shot, user, {"role": "user", "content": "summary"}, turns[2]],
    ]
    result = (
        {"transitions": snapshots}
        if place == "transitions"
        else {"response": {"output": snapshots}}
    )
    selection = returned_history(forest.calls, result)
    assert ids(selection.records) == ids([first, second, third])
    assert selection.terminal_response_id == third.output.response_id


@pytest.mark.requirement("E7")
def test_a_transition_whose_action_no_call_generated_is_an_error() -> None:
    forest = Forest()
    forest.call()
    with pytest.raises(EvidenceError, match="no captured call generated this"):
        returned_history(
            forest.calls, {"transitions": [[{"role": "assistant", "content": "other"}]]}
        )


def trajectory(*references: Any) -> dict[str, Any]:
    return {"ng_trajectory": {"turns": [{"model_calls": [ref]} for ref in references]}}


@pytest.mark.requirement("E3", "E6")
def test_trajectory_references_select_on_their_own() -> None:
    forest = Forest()
    first, rejected, last = forest.call(), forest.call(), forest.call()
    by_response = {"response_id": first.output.response_id}
    by_call = {"model_call_id": last.call_id, "response_id": last.output.response_id}
    selection = returned_history(forest.calls, trajectory(by_response, by_call))
    assert ids(selection.records) == ids([first, last])
    assert rejected.call_id not in ids(selection.records)
    assert selection.terminal_response_id == last.output.response_id


@pytest.mark.requirement("E6", "E7")
def test_references_and_output_must_agree() -> None:
    forest = Forest()
    first, second = forest.call(), forest.call()
    references = trajectory(first.output.response_id, second.output.response_id)
    agreeing = returned_history(forest.calls, forest.result(first, second) | references)
    assert ids(agreeing.records) == ids([first, second])
    with pytest.raises(EvidenceError, match=f"disagree about call\\(s\\) {second.call_id}"):
        returned_history(forest.calls, forest.result(first) | references)


@pytest.mark.requirement("E7")
@pytest.mark.parametrize(
    ("references", "message"),
    [
        ([{"response_id": "nowhere"}], "names no captured call"),
        ([{}], "names neither"),
        ([7], "must be a reference"),
        (["att_0-resp0", "att_0-resp0"], "more than once"),
        ([{"response_id": "att_0-resp0", "model_call_id": "att_0-c1"}], "two different calls"),
    ],
)
def test_bad_references_are_errors(references: list[Any], message: str) -> None:
    forest = Forest()
    forest.call()
    forest.call()
    with pytest.raises(EvidenceError, match=message):
        returned_history(forest.calls, trajectory(*references))


@pytest.mark.requirement("E3")
def test_the_last_response_may_stand_beside_the_complete_list() -> None:
    forest = Forest()
    first, last = forest.call(), forest.call()
    result = forest.result(first, last)
    result["response"] = {"id": last.output.response_id, "output": forest.outputs[last.call_id]}
    assert ids(returned_history(forest.calls, result).records) == ids([first, last])


# Identity and content


@pytest.mark.requirement("E4")
def test_synthetic_ids_are_no_identity(responses_forest: Forest) -> None:
    output = whole_output()
    for number, item in enumerate(output):
        item["id"] = f"exporter_{number}"
        if "call_id" in item:
            item["call_id"] = f"exporter_call_{item['call_id']}"
    selection = returned_history(responses_forest.calls, {"response": {"output": output}})
    assert ids(selection.records) == [c.call_id for c in responses_forest.calls if c.order != 1]


@pytest.mark.requirement("E4", "E7")
def test_native_ids_of_another_call_contradict_the_content(responses_forest: Forest) -> None:
    output = whole_output()
    output[3]["id"] = "msg_b"
    with pytest.raises(EvidenceError, match="not that call's whole generation"):
        returned_history(responses_forest.calls, {"response": {"output": output}})


@pytest.mark.requirement("E4", "XF1")
def test_native_ids_tell_twins_apart() -> None:
    forest = Forest()
    first, twin = (forest.call(text="same") for _ in range(2))
    selection = returned_history(forest.calls, forest.result(twin))
    assert ids(selection.records) == [twin.call_id]
    with pytest.raises(EvidenceError, match=f"{first.call_id}, {twin.call_id}.*response ids"):
        returned_history(forest.calls, forest.result(twin, with_ids=False))


@pytest.mark.requirement("E4")
def test_tool_call_ids_that_several_calls_share_name_none() -> None:
    """Parsers that number tool calls from 0 in every response."""
    forest = Forest()
    first = forest.call(output=[chat_call("call_0", '{"n": 1}')])
    second = forest.call(first, output=[chat_call("call_0", '{"n": 2}')])
    selection = returned_history(forest.calls, forest.result(first, second, with_ids=False))
    assert ids(selection.records) == ids([first, second])


@pytest.mark.requirement("E7")
def test_twins_without_ids_are_accepted_only_all_together() -> None:
    forest = Forest()
    first = forest.call(text="again")
    second = forest.call(first, text="again")
    both = returned_history(forest.calls, forest.result(first, second, with_ids=False))
    assert ids(both.records) == ids([first, second])
    assert both.terminal_response_id == second.output.response_id


@pytest.mark.requirement("E7", "E18")
def test_independent_twins_do_not_name_the_scored_call() -> None:
    forest = Forest()
    first, second = forest.call(text="again"), forest.call(text="again")
    result = forest.result(first, second, with_ids=False)
    with pytest.raises(EvidenceError, match="say the same; return terminal_response_id"):
        returned_history(forest.calls, result)
    result["terminal_response_id"] = first.output.response_id
    assert returned_history(forest.calls, result).terminal_response_id == first.output.response_id


@pytest.mark.requirement("E5", "E10")
def test_reasoning_is_part_of_a_generation() -> None:
    forest = Forest()
    thought = forest.call(output=[{"role": "assistant", "content": "x", "reasoning": "because"}])
    forest.call(output=[{"role": "assistant", "content": "x", "reasoning": "otherwise"}])
    assert ids(returned_history(forest.calls, forest.result(thought, with_ids=False)).records) == [
        thought.call_id
    ]
    bare = {"choices": [{"message": {"role": "assistant", "content": "x"}}]}
    with pytest.raises(EvidenceError, match="without its reasoning and without a native id"):
        returned_history(forest.calls, {"responses": [bare]})
    named = bare | {"id": thought.output.response_id}
    assert ids(returned_history(forest.calls, {"responses": [named]}).records) == [thought.call_id]
    changed = {"role": "assistant", "content": "x", "reasoning": "made up"}
    other = named | {"choices": [{"message": changed}]}
    with pytest.raises(EvidenceError, match="other reasoning"):
        returned_history(forest.calls, {"responses": [other]})


@pytest.mark.requirement("E8", "E10")
@pytest.mark.parametrize("change", ["drop", "swap", "add"])
def test_a_partly_returned_or_reordered_generation_is_no_match(change: str) -> None:
    forest = Forest()
    items = [call_item("look", '{"n": 1}', "a"), call_item("look", '{"n": 2}', "b")]
    forest.call(output=items, api="responses")
    returned = {
        "drop": items[:1],
        "swap": items[::-1],
        "add": [*items, call_item("look", "{}", "c")],
    }[change]
    with pytest.raises(EvidenceError, match=r"whole generation|no captured call"):
        returned_history(forest.calls, {"response": {"output": returned}})


@pytest.mark.requirement("E7")
def test_returning_a_call_twice_is_an_error() -> None:
    forest = Forest()
    call = forest.call()
    with pytest.raises(EvidenceError, match="more than once"):
        returned_history(forest.calls, forest.result(call, call))


@pytest.mark.requirement("E7", "E9")
@pytest.mark.parametrize(
    "result",
    [
        {},
        {"responses": []},
        {"response": {"output": []}},
        {"output": "final text", "reward": 1.0},
        {"response": {"output": [{"role": "user", "content": "hi"}]}},
    ],
)
def test_without_evidence_nothing_is_selected(result: dict[str, Any]) -> None:
    forest = Forest()
    forest.call()
    with pytest.raises(EvidenceError, match="no accepted generation"):
        returned_history(forest.calls, result)


@pytest.mark.parametrize(
    "result",
    [
        {"responses": "text"},
        {"responses": [3]},
        {"responses": [{}]},
        {"responses": [{"choices": []}]},
        {"responses": [{"choices": [{"message": {"role": "user", "content": "x"}}]}]},
        {"response": {"output": [3]}},
        {"response": {"output": [{"type": "reasoning", "content": [{"text": 3}]}]}},
        {"transitions": [3]},
    ],
)
@pytest.mark.requirement("E7")
def test_unreadable_evidence_names_its_place(result: dict[str, Any]) -> None:
    forest = Forest()
    forest.call()
    with pytest.raises(EvidenceError, match=r"^(responses|response|transitions)"):
        returned_history(forest.calls, result)


# The scored call


@pytest.mark.requirement("E31")
def test_the_scored_call_need_not_be_the_last() -> None:
    forest = Forest()
    first, second = forest.call(), forest.call()
    result = forest.result(first, second) | {"terminal_response_id": first.output.response_id}
    assert returned_history(forest.calls, result).terminal_response_id == first.output.response_id


@pytest.mark.requirement("E31", "E7")
def test_the_scored_call_must_be_selected() -> None:
    forest = Forest()
    first, second = forest.call(), forest.call()
    result = forest.result(first) | {"terminal_response_id": second.output.response_id}
    with pytest.raises(EvidenceError, match="not in the returned history"):
        returned_history(forest.calls, result)
    result["terminal_response_id"] = "unknown"
    with pytest.raises(EvidenceError, match="no captured call served unknown"):
        returned_history(forest.calls, result)
