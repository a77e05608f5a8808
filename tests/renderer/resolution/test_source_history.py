"""Which captured call a request continues."""

from typing import Any

import msgspec
import pytest
from forest_schema import (
    CallRecord,
    CompletionStatus,
    Reason,
    ReplaySummary,
    SamplingRecord,
    TensorRef,
)
from forest_schema.items import extend, normalize_chat, output_evidence
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_forest_renderer.resolution import (
    AmbiguousParent,
    Candidate,
    MissingParentEvidence,
    Root,
    verify_candidate,
)
from vllm_forest_renderer.resolution.source_history import SourceHistoryResolver

Message = dict[str, Any]
OPTIONS = "options-digest"


def captured(
    messages: list[Message],
    answer: Message,
    *,
    call_id: str,
    parent: CallRecord | None = None,
    status: CompletionStatus = CompletionStatus.COMPLETED,
    options: str = OPTIONS,
    model: str = "m",
    order: int = 0,
) -> CallRecord:
    """The record that the server would keep of one call."""
    history = extend(normalize_chat(messages), [answer], api="chat")
    count = len(history.items)
    start = parent.replay.source_item_count if parent else 0
    evidence = output_evidence(f"chatcmpl-{call_id}", [answer], api="chat")
    return CallRecord(
        attempt_id="att_" + "0" * 32,
        call_id=call_id,
        capture_key="k",
        order=order,
        api="chat",
        model=model,
        parent_call_id=parent.call_id if parent else None,
        prev_len=parent.cum_len if parent else 0,
        delta_len=1,
        cum_len=(parent.cum_len if parent else 0) + 1,
        generated_len=1,
        chain_digest="",
        delta=TensorRef(store="s", partition="p", shard="x", key=call_id, digest=""),
        status=status,
        finish_reason="stop",
        replay=ReplaySummary(
            source_item_count=count,
            source_digest=history.digests[count],
            equivalence_digest=history.equivalence_digests[count],
            render_option_digest=options,
            reasoning=history.reasoning(start, count),
        ),
        output=evidence,
        sampling=SamplingRecord(temperature=1.0),
        weight_spans=(),
        started_at=0.0,
        committed_at=0.0,
    )


def resolve(messages: list[Message], *calls: CallRecord, **options: Any) -> Candidate | Root:
    history = normalize_chat(messages)
    found = SourceHistoryResolver().resolve(
        history,
        render_option_digest=options.get("options", OPTIONS),
        model=options.get("model", "m"),
        calls=calls,
    )
    if isinstance(found, Candidate):
        verify_candidate(found, history, OPTIONS)
    return found


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: Any, **extra: Any) -> Message:
    return {"role": "assistant", "content": text, **extra}


def parent_of(found: Candidate | Root) -> str | None:
    return found.parent.call_id if isinstance(found, Candidate) else None


@pytest.mark.requirement("A3", "A4", "A5", "A8", "A10", "A26")
def test_longest_history_wins_whatever_its_age() -> None:
    first = captured([user("a")], answer("b"), call_id="1")
    second = captured(
        [user("a"), answer("b"), user("c")], answer("d"), call_id="2", parent=first, order=1
    )
    rejected = captured(
        [user("a"), answer("b"), user("c")], answer("x"), call_id="3", parent=first, order=2
    )
    calls = (first, second, rejected)
    talk = [user("a"), answer("b"), user("c"), answer("d"), user("e")]
    assert parent_of(resolve(talk, *calls)) == "2"
    assert parent_of(resolve([user("a"), answer("b"), user("other")], *calls)) == "1"
    assert resolve([user("a")], *calls) == Root(Reason.NO_MATCH)
    assert resolve([user("b"), answer("b"), user("c")], *calls) == Root(Reason.NO_MATCH)


@pytest.mark.requirement("A8", "X14")
def test_only_observations_may_follow() -> None:
    first = captured([user("a")], answer("b"), call_id="1")
    tool = {"role": "tool", "tool_call_id": "c", "content": "r"}
    assert parent_of(resolve([user("a"), answer("b"), tool, user("go")], first)) == "1"
    for middle in (answer("foreign"), {"role": "system", "content": "s"}):
        talk = [user("a"), answer("b"), middle, user("go")]
        assert resolve(talk, first) == Root(Reason.NO_MATCH)
    assert resolve([user("a"), answer("b")], first) == Root(Reason.NO_MATCH)


@pytest.mark.requirement("A9", "X11")
def test_options_and_model_must_be_equal() -> None:
    first = captured([user("a")], answer("b"), call_id="1")
    talk = [user("a"), answer("b"), user("c")]
    assert resolve(talk, first, options="other") == Root(Reason.RENDER_OPTIONS_DIFFER)
    assert resolve(talk, first, model="other") == Root(Reason.MODEL_DIFFERS)


@pytest.mark.requirement("A12", "X3")
@pytest.mark.parametrize(
    ("sent", "parent"), [("why", "2"), (None, "2"), ("because", None), ("", "2")]
)
def test_reasoning_of_earlier_turns_must_be_the_captured_one(
    sent: str | None, parent: str | None
) -> None:
    first = captured([user("a")], answer("b", reasoning="why"), call_id="1")
    second = captured(
        [user("a"), answer("b"), user("c")], answer("d"), call_id="2", parent=first, order=1
    )
    shown = {} if sent is None else {"reasoning": sent}
    talk = [user("a"), answer("b", **shown), user("c"), answer("d"), user("e")]
    assert parent_of(resolve(talk, first, second)) == parent


@pytest.mark.requirement("A12", "X3")
def test_reasoning_where_none_was_captured_is_another_history() -> None:
    first = captured([user("a")], answer("b"), call_id="1")
    talk = [user("a"), answer("b", reasoning="invented"), user("c")]
    assert resolve(talk, first) == Root(Reason.NO_MATCH)


@pytest.mark.requirement("A11", "X10")
@pytest.mark.parametrize(("sent", "used"), [(None, False), ("", True)])
def test_candidate_says_whether_null_had_to_equal_empty(sent: Any, used: bool) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    first = captured([user("a")], answer(None, tool_calls=calls), call_id="1")
    talk = [
        user("a"),
        answer(sent, tool_calls=calls),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    found = resolve(talk, first)
    assert isinstance(found, Candidate)
    assert found.used_null_empty_equivalence == used


@pytest.mark.requirement("A6", "A7", "XF1", "XF6")
def test_twins_need_an_echoed_id() -> None:
    first = captured([user("a")], answer("b"), call_id="1")
    twin = captured([user("a")], answer("b"), call_id="2", order=1)
    talk = [user("a"), answer("b"), user("c")]
    with pytest.raises(AmbiguousParent) as refused:
        resolve(talk, first, twin)
    assert refused.value.call_ids == ("1", "2")
    echoed = [user("a"), answer("b", id="chatcmpl-2"), user("c")]
    assert parent_of(resolve(echoed, first, twin)) == "2"
    unknown = [user("a"), answer("b", id="chatcmpl-9"), user("c")]
    with pytest.raises(AmbiguousParent):
        resolve(unknown, first, twin)


@pytest.mark.requirement("A6", "A7")
def test_ids_of_earlier_turns_tell_descendants_apart() -> None:
    firsts = [captured([user("a")], answer("b"), call_id=i, order=int(i)) for i in "12"]
    seconds = [
        captured(
            [user("a"), answer("b"), user("c")],
            answer("d"),
            call_id=f"{parent.call_id}x",
            parent=parent,
            order=2 + parent.order,
        )
        for parent in firsts
    ]
    talk = [user("a"), answer("b", id="chatcmpl-1"), user("c"), answer("d"), user("e")]
    assert parent_of(resolve(talk, *firsts, *seconds)) == "1x"


@pytest.mark.requirement("A6", "A7")
def test_ids_of_two_chains_in_one_history_point_nowhere() -> None:
    firsts = [captured([user("a")], answer("b"), call_id=i, order=int(i)) for i in "12"]
    seconds = [
        captured(
            [user("a"), answer("b"), user("c")],
            answer("d"),
            call_id=f"{parent.call_id}x",
            parent=parent,
            order=2 + parent.order,
        )
        for parent in firsts
    ]
    talk = [
        user("a"),
        answer("b", id="chatcmpl-1"),
        user("c"),
        answer("d", id="chatcmpl-2x"),
        user("e"),
    ]
    with pytest.raises(AmbiguousParent):
        resolve(talk, *firsts, *seconds)


@pytest.mark.requirement("A7")
def test_null_and_empty_twins_are_not_told_apart_by_spelling() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    null = captured([user("a")], answer(None, tool_calls=calls), call_id="1")
    empty = captured([user("a")], answer("", tool_calls=calls), call_id="2", order=1)
    tool = {"role": "tool", "tool_call_id": "c", "content": "r"}
    with pytest.raises(AmbiguousParent):
        resolve([user("a"), answer("", tool_calls=calls), tool], null, empty)


@pytest.mark.requirement("C17", "C24", "XF2", "A17")
def test_failed_calls_and_other_normalisations_are_no_parents() -> None:
    failed = captured([user("a")], answer("b"), call_id="1", status=CompletionStatus.FAILED)
    talk = [user("a"), answer("b"), user("c")]
    assert resolve(talk, failed) == Root(Reason.NO_MATCH)
    retry = captured([user("a")], answer("b"), call_id="2", order=1)
    assert parent_of(resolve(talk, failed, retry)) == "2"


@pytest.mark.requirement("A17")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"item_count": 1}, "covers 2 items"),
        ({"used_null_empty_equivalence": True}, "used_null_empty_equivalence"),
        ({"digest": "f" * 32}, "source digest"),
        ({"version": 0}, "normalisation 0"),
    ],
)
def test_proposal_without_proof_is_rejected(changes: dict[str, Any], message: str) -> None:
    record = captured([user("a")], answer("b"), call_id="1")
    if "digest" in changes:
        replay = msgspec.structs.replace(record.replay, equivalence_digest=changes["digest"])
        record = msgspec.structs.replace(record, replay=replay)
    if "version" in changes:
        replay = msgspec.structs.replace(record.replay, normalization_version=changes["version"])
        record = msgspec.structs.replace(record, replay=replay)
    candidate = Candidate(
        parent=record,
        item_count=changes.get("item_count", 2),
        used_null_empty_equivalence=changes.get("used_null_empty_equivalence", False),
    )
    history = normalize_chat([user("a"), answer("b"), user("c")])
    with pytest.raises(MissingParentEvidence, match=message):
        verify_candidate(candidate, history, OPTIONS)


# A slow oracle: captured histories are kept as message lists and compared as such.


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[CallRecord], dict[str, list[Message]], list[Message]]:
    """(records, histories by call, a request): calls continue, branch, retry and rewrite."""
    records: list[CallRecord] = []
    histories: dict[str, list[Message]] = {}
    for order in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from([None, *records])) if records else None
        messages = list(histories[base.call_id]) if base else []
        messages += [user(draw(st.sampled_from("ab")))]
        given_answer = answer(draw(st.sampled_from("xy")))
        record = captured(messages, given_answer, call_id=f"call{order}", parent=base, order=order)
        records.append(record)
        histories[record.call_id] = [*messages, given_answer]
    base = draw(st.sampled_from([None, *records]))
    request = list(histories[base.call_id]) if base else []
    if request and draw(st.booleans()):
        index = draw(st.integers(0, len(request) - 1))
        request[index] = {**request[index], "content": draw(st.sampled_from("abxyz"))}
    if request and draw(st.booleans()):
        # Echo the id of some call at the last turn.
        echoed = draw(st.sampled_from(records)).output.response_id
        request[-1] = {**request[-1], "id": echoed}
    return records, histories, [*request, user(draw(st.sampled_from("ab")))]


@pytest.mark.requirement("A3", "A5", "A6", "A7", "A10")
@settings(max_examples=300, deadline=None)
@given(attempts())
def test_agrees_with_comparing_whole_histories(
    drawn: tuple[list[CallRecord], dict[str, list[Message]], list[Message]],
) -> None:
    records, histories, request = drawn
    bare = [{key: value for key, value in m.items() if key != "id"} for m in request]
    fitting = [r for r in records if histories[r.call_id] == bare[:-1]]
    echoed = {m["id"] for m in request if "id" in m}
    by_id = {r.call_id: r for r in records}

    def ids_of_chain(record: CallRecord) -> set[str]:
        chain = {record.output.response_id}
        while record.parent_call_id is not None:
            record = by_id[record.parent_call_id]
            chain.add(record.output.response_id)
        return chain

    if len(fitting) > 1:
        pointed = [r for r in fitting if echoed and echoed <= ids_of_chain(r)]
        if len(pointed) != 1:
            with pytest.raises(AmbiguousParent):
                resolve(request, *records)
            return
        fitting = pointed
    expected = fitting[0].call_id if fitting else None
    assert parent_of(resolve(request, *records)) == expected
