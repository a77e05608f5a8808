"""Reading only what a request adds gives what reading all of it gives."""

import copy
import json
from typing import Any

import pytest
from forest_schema.items import ItemError, normalize_chat
from hypothesis import given
from hypothesis import strategies as st
from vllm_forest_renderer.serving.known_histories import KnownHistories

VALUE = st.sampled_from([None, "", "a", "b", 1, 1.0, True, 0, False, [], {}])
CONTENT = st.one_of(
    st.sampled_from([None, "", "a", "b"]),
    st.lists(st.builds(lambda t: {"type": "text", "text": t}, st.sampled_from("ab")), max_size=2),
)
ARGUMENTS = st.one_of(st.sampled_from(['{"k": 1}', "{}", "not json"]),
                      st.builds(lambda v: {"k": v}, VALUE))  # fmt: skip
CALL = st.builds(
    lambda i, a: {"id": i, "type": "function", "function": {"name": "f", "arguments": a}},
    st.sampled_from("xy"),
    ARGUMENTS,
)
MESSAGE = st.one_of(
    st.builds(lambda c, v: {"role": "user", "content": c, "acme": v}, CONTENT, VALUE),
    st.builds(
        lambda c, calls: {"role": "assistant", "content": c, "tool_calls": calls},
        CONTENT,
        st.lists(CALL, max_size=2),
    ),
    st.builds(
        lambda c, i: {"role": "tool", "tool_call_id": i, "content": c},
        CONTENT,
        st.sampled_from("xy"),
    ),
)


def parsed(messages: list[Any]) -> list[Any]:
    """As another request brings them: equal values, other objects."""
    copied: list[Any] = json.loads(json.dumps(messages))
    return copied


@st.composite
def requests(draw: Any) -> list[tuple[str, list[Any]]]:
    """Requests of two attempts: histories that grow, repeat, shrink and change in one value."""
    made: list[tuple[str, list[Any]]] = []
    latest: dict[str, list[Any]] = {"one": [], "two": []}
    for _ in range(draw(st.integers(1, 6))):
        attempt = draw(st.sampled_from(["one", "two"]))
        messages = copy.deepcopy(latest[attempt])
        how = draw(st.sampled_from(["grow", "grow", "cut", "change"]))
        if how == "cut":
            messages = messages[: draw(st.integers(0, len(messages)))]
        elif how == "change" and messages:
            messages[draw(st.integers(0, len(messages) - 1))] = draw(MESSAGE)
        messages += draw(st.lists(MESSAGE, max_size=3))
        latest[attempt] = messages
        made.append((attempt, parsed(messages)))
    return made


@pytest.mark.requirement("A3", "C8", "X9")
@given(requests(), st.sampled_from([0, 3, 1000]))
def test_a_history_is_what_reading_it_all_gives(
    sent: list[tuple[str, list[Any]]], capacity: int
) -> None:
    known = KnownHistories(capacity=capacity)
    for attempt, messages in sent:
        assert known.normalize(attempt, messages) == normalize_chat(parsed(messages))
    assert known._held == sum(entry.characters for entry in known._known.values()) <= capacity


def test_the_refusal_of_an_added_message_names_its_place() -> None:
    known = KnownHistories()
    first = {"role": "user", "content": "a"}
    known.normalize("one", [first])
    for _ in range(2):
        with pytest.raises(ItemError) as refused:
            known.normalize("one", [first, {"role": "user", "content": 5}])
        assert refused.value.param == "messages[1].content"
    # Nothing of a refused request is kept.
    assert known.normalize("one", [first, first]) == normalize_chat([first, first])


def test_a_growing_history_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_forest_renderer.serving import known_histories

    known, messages = KnownHistories(), [{"role": "user", "content": "a"}]
    known.normalize("one", messages)
    monkeypatch.setattr(known_histories, "normalize_chat", None)
    for turn in range(3):
        messages = parsed([*messages, {"role": "user", "content": f"{turn}"}])
        known.normalize("one", messages)
