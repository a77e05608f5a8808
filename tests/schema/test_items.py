"""Normalisation of Chat messages and Responses items."""

import json
from decimal import Decimal
from typing import Any

import pytest
from forest_schema.items import (
    ItemError,
    SourceHistory,
    extend,
    generated_turn,
    normalize_arguments,
    normalize_chat,
    normalize_responses,
)
from hypothesis import given, settings
from hypothesis import strategies as st

USER = {"role": "user", "content": "hi"}


def call(arguments: Any, *, native_id: str = "c1", name: str = "f") -> dict[str, Any]:
    return {
        "id": native_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def assistant(*calls: dict[str, Any], content: Any = None, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **extra}


def last(*messages: dict[str, Any]) -> str:
    return normalize_chat(messages).digests[-1]


@pytest.mark.requirement("A31", "X9")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a":1,"b":2}', '{"b": 2,\n"a": 1}'),
        ('{"a":1}', {"a": 1}),
        ('{"a":"é"}', '{"a":"\\u00e9"}'),
        ('{"a":1.50}', '{"a":15e-1}'),
        (None, "{}"),
        ('{"a":[1,{"b":null}]}', '{ "a" : [ 1 , { "b" : null } ] }'),
    ],
)
def test_equal_arguments(left: Any, right: Any) -> None:
    assert last(assistant(call(left))) == last(assistant(call(right)))


@pytest.mark.requirement("A31", "X9")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":1}', '{"a":true}'),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":null}', "{}"),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"a":1', '{"a": 1'),
        ("", "{}"),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":NaN}', '{"a":null}'),
    ],
)
def test_different_arguments(left: Any, right: Any) -> None:
    assert last(assistant(call(left))) != last(assistant(call(right)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.decimals(allow_nan=False,
                                                                       allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def spelled(value: Any, draw: Any) -> str:
    """One of the JSON texts of a value."""
    if isinstance(value, Decimal):
        text = format(value, draw(st.sampled_from(["e", "f"])))
        return text if "e" in text or "." in text else text + ".0"
    if isinstance(value, dict):
        names = draw(st.permutations(list(value)))
        inside = (f"{spelled(n, draw)}:{spelled(value[n], draw)}" for n in names)
        return "{" + draw(st.sampled_from([",", " ,\n"])).join(inside) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(spelled(item, draw) for item in value) + "]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


def plain(value: Any) -> Any:
    """A value that Python compares as JSON values are compared: type and number both count."""
    if isinstance(value, dict):
        return ("object", {name: plain(item) for name, item in value.items()})
    if isinstance(value, list):
        return ("array", [plain(item) for item in value])
    return (type(value).__name__, value.normalize() if isinstance(value, Decimal) else value)


@pytest.mark.requirement("A31")
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_arguments_are_equal_exactly_when_their_values_are(data: st.DataObject) -> None:
    left, right = data.draw(st.tuples(JSON, JSON) | JSON.map(lambda value: (value, value)))
    same = normalize_arguments(spelled(left, data.draw)) == normalize_arguments(
        spelled(right, data.draw)
    )
    zero = Decimal(0)
    if zero in (left, right):
        return  # The sign of a zero may count.
    assert same == (plain(left) == plain(right))


@pytest.mark.requirement("X10", "A11")
def test_null_and_empty_content_differ_but_are_equivalent_beside_tool_calls() -> None:
    null = normalize_chat([USER, assistant(call("{}"), content=None)])
    empty = normalize_chat([USER, assistant(call("{}"), content="")])
    assert null.digests[-1] != empty.digests[-1]
    assert null.equivalence_digests[-1] == empty.equivalence_digests[-1]
    without = [normalize_chat([USER, {"role": "assistant", "content": c}]) for c in (None, "")]
    assert without[0].equivalence_digests[-1] != without[1].equivalence_digests[-1]


@pytest.mark.requirement("A31", "X3")
def test_reasoning_is_kept_beside_the_item() -> None:
    bare = normalize_chat([USER, {"role": "assistant", "content": "x"}])
    for field in ("reasoning", "reasoning_content"):
        shown = normalize_chat([USER, {"role": "assistant", "content": "x", field: "why"}])
        assert shown.digests == bare.digests
        ((index, mark),) = shown.reasoning(0, 2)
        assert index == 1
        other = normalize_chat([USER, {"role": "assistant", "content": "x", field: "why "}])
        assert other.reasoning(0, 2) != ((index, mark),)
    assert bare.reasoning(0, 2) == ()


@pytest.mark.requirement("A31")
def test_tool_call_ids_pair_calls_with_outputs_and_do_not_count_themselves() -> None:
    def talk(first: str, second: str, answered: str) -> str:
        return last(
            USER,
            assistant(call("{}", native_id=first), call("{}", native_id=second)),
            {"role": "tool", "tool_call_id": answered, "content": "r"},
        )

    assert talk("a", "b", "a") == talk("x", "y", "x")
    assert talk("a", "b", "a") != talk("a", "b", "b")
    assert talk("a", "b", "other") != talk("a", "b", "b")


@pytest.mark.requirement("A31", "X17")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (USER, {"role": "system", "content": "hi"}),
        (USER, {"role": "developer", "content": "hi"}),
        (USER, {**USER, "name": "ann"}),
        (USER, {"role": "user", "content": "hi "}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "user", "content": "aa"},
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://b"}}]},
        ),
        (assistant(call("{}", name="f")), assistant(call("{}", name="g"))),
        (assistant(call("{}"), call('{"a":1}')), assistant(call('{"a":1}'), call("{}"))),
    ],
)
def test_what_says_something_else_is_another_item(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert last(left) != last(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (USER, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
        (USER, {**USER, "name": None}),
        (
            {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
        ),
        (
            {"role": "user", "content": [{"type": "image_url",
             "image_url": {"url": "data:image/png;base64,aGk="}}]},
            {"role": "user", "content": [{"type": "image_url",
             "image_url": {"url": "DATA:image/jpeg;base64,aGk="}}]},
        ),
    ],
)  # fmt: skip
def test_what_says_the_same_is_the_same_item(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert last(left) == last(right)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "critic", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "video_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,hi"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        (assistant({"id": "a", "type": "custom"}), "messages[0].tool_calls[0]"),
        (assistant(call("{}", native_id=None)), "messages[0].tool_calls[0].id"),  # type: ignore[arg-type]
    ],
)
def test_unknown_kinds_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ItemError) as refused:
        normalize_chat([message])
    assert refused.value.param == param


@pytest.mark.requirement("A27", "C8")
@pytest.mark.parametrize("key", ["content", "summary"])
@pytest.mark.parametrize("parts", ["why", ["why"], {"text": "why"}, 5])
def test_reasoning_that_is_no_list_of_parts_is_refused(key: str, parts: Any) -> None:
    with pytest.raises(ItemError) as refused:
        normalize_responses([{"type": "reasoning", key: parts}])
    assert (refused.value.reason, refused.value.param) == ("malformed_request", f"input[0].{key}")


@pytest.mark.requirement("A27", "C8")
def test_responses_items_form_turns() -> None:
    reasoning = {
        "type": "reasoning", "id": "rs_1", "summary": [],
        "content": [{"type": "reasoning_text", "text": "why"}],
    }  # fmt: skip
    message = {
        "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "I look", "annotations": []}],
    }  # fmt: skip
    function = {
        "type": "function_call", "id": "fc_1", "call_id": "c9", "name": "f", "arguments": "{}",
        "status": "completed",
    }  # fmt: skip
    output = {"type": "function_call_output", "call_id": "c9", "output": "r"}
    history = normalize_responses([USER, reasoning, message, function, output], "Be brief.")
    assert [item.role for item in history.items] == ["system", "user", "assistant", "tool"]
    assert history.items[2].native_ids == ("rs_1", "msg_1", "fc_1", "c9")
    assert history.reasoning(0, 4)[0][0] == 2
    chat = normalize_chat(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            assistant(call("{}", native_id="z"), content="I look", reasoning="why"),
            {"role": "tool", "tool_call_id": "z", "content": "r"},
        ]
    )
    assert history.digests == chat.digests
    without = normalize_responses([USER, message, function, output], "Be brief.")
    assert without.digests == history.digests
    assert normalize_responses("hi").digests == normalize_chat([USER]).digests
    assert normalize_responses("hi", "").digests == normalize_chat([USER]).digests
    with pytest.raises(ItemError, match=r"input\[0\].type.*web_search_call"):
        normalize_responses([{"type": "web_search_call", "id": "x"}])


TEXT = st.text(max_size=4)
CALLS = st.lists(
    st.builds(
        lambda name, native: call("{}", name=name, native_id=native),
        st.sampled_from("fg"),
        st.sampled_from("abc"),
    ),
    max_size=2,
)
MESSAGE = st.one_of(
    st.builds(lambda t: {"role": "user", "content": t}, TEXT),
    st.builds(lambda t, c: assistant(*c, content=t, reasoning=t), TEXT, CALLS),
    st.builds(
        lambda t, c: {"role": "tool", "tool_call_id": c, "content": t}, TEXT, st.sampled_from("abc")
    ),
)


def joined(history: SourceHistory) -> tuple[Any, ...]:
    return (history.items, history.digests, history.equivalence_digests, history.call_count)


@pytest.mark.requirement("C6", "C8")
@given(st.lists(MESSAGE, max_size=6), st.builds(lambda c: assistant(*c, content="x"), CALLS))
def test_extending_is_normalising_the_whole(
    messages: list[dict[str, Any]], answer: dict[str, Any]
) -> None:
    whole = normalize_chat([*messages, answer])
    assert joined(extend(normalize_chat(messages), [answer], api="chat")) == joined(whole)
    # Chained: every prefix has the digest of itself.
    for count in range(len(messages) + 1):
        prefix = normalize_chat(messages[:count])
        assert prefix.digests[-1] == whole.digests[count]
        assert prefix.equivalence_digests[-1] == whole.equivalence_digests[count]


@given(st.lists(MESSAGE, min_size=1, max_size=4), st.lists(MESSAGE, min_size=1, max_size=4))
def test_digests_are_equal_only_for_equal_items(
    left: list[dict[str, Any]], right: list[dict[str, Any]]
) -> None:
    one, two = normalize_chat(left), normalize_chat(right)
    same = [item.fingerprint for item in one.items] == [item.fingerprint for item in two.items]
    assert (one.digests[-1] == two.digests[-1]) == same


def test_generated_turn_does_not_depend_on_what_came_before() -> None:
    alone = generated_turn([assistant(call("{}", native_id="x"))], api="chat")
    again = generated_turn([assistant(call("{}", native_id="y"))], api="chat")
    assert alone.fingerprint == again.fingerprint
    with pytest.raises(ItemError):
        generated_turn([USER], api="chat")


def test_fingerprints_are_pinned() -> None:
    history = normalize_chat(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            assistant(call('{"b":[1,2.50,true,null,"é"]}'), content=None, reasoning="why"),
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
    )
    assert history.digests[-1] == PINNED
    assert history.reasoning(0, 4)[0][1] == PINNED_REASONING


PINNED = "81b67df61f705fe39d53133ac748e853"
PINNED_REASONING = "28cea893d8e145c7b29af0c303e9bb84"


@pytest.mark.requirement("A31", "X9")
def test_arguments_that_no_number_can_hold_compare_as_text():
    huge = '{"a": 1e99999999999999999999999}'
    assert normalize_arguments(huge) == ("text", huge)
    assert normalize_arguments(huge) != normalize_arguments('{"a": 1e9}')


@pytest.mark.requirement("A31")
def test_a_lone_surrogate_is_not_the_text_of_its_escape():
    def history(argument):
        function = {"name": "f", "arguments": {"a": argument}}
        call = {"id": "c", "type": "function", "function": function}
        return normalize_chat([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert history("\ud800").digests != history("\\ud800").digests
    assert history("\ud800").digests == history("\ud800").digests
