"""Reading only what a request adds gives what reading all of it gives."""

import asyncio
import copy
import json
from typing import Any

import pytest
from forest_schema.items import (
    ItemError,
    SourceHistory,
    extend,
    normalize_chat,
    normalize_responses,
    pieces,
)
from hypothesis import given
from hypothesis import strategies as st
from vllm_forest_renderer.serving import known_histories
from vllm_forest_renderer.serving.chat import ChatAdapter
from vllm_forest_renderer.serving.known_histories import KnownHistories
from vllm_forest_renderer.serving.responses import ResponsesAdapter

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

ITEM = st.one_of(
    st.builds(lambda c: {"role": "user", "content": c}, st.sampled_from("ab")),
    st.builds(
        lambda c, i: {"type": "function_call_output", "call_id": i, "output": c},
        st.sampled_from("ab"),
        st.sampled_from("xy"),
    ),
    st.builds(
        lambda i, a: {"type": "function_call", "call_id": i, "name": "f", "arguments": a},
        st.sampled_from("xy"),
        ARGUMENTS,
    ),
    st.builds(
        lambda t: {"type": "reasoning", "summary": [{"type": "summary_text", "text": t}]},
        st.sampled_from("ab"),
    ),
    st.builds(lambda c: {"role": "assistant", "content": c}, st.sampled_from(["", "a", "b"])),
)
INSTRUCTIONS = st.sampled_from([None, "", "be brief"])


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


def normalized(known: KnownHistories, *request: Any) -> SourceHistory:
    return asyncio.run(known.normalize(*request))


@pytest.mark.requirement("A3", "C8", "X9")
@given(requests(), st.sampled_from([0, 5000, 1 << 20]))
def test_a_history_is_what_reading_it_all_gives(
    sent: list[tuple[str, list[Any]]], capacity: int
) -> None:
    known = KnownHistories("chat", capacity=capacity)
    for attempt, messages in sent:
        assert normalized(known, attempt, messages) == normalize_chat(parsed(messages))
    assert known._held == sum(entry.size for entry in known._known.values()) <= capacity


@pytest.mark.requirement("A3", "C8", "X9")
@given(st.lists(ITEM, max_size=8), st.lists(ITEM, max_size=8), INSTRUCTIONS, INSTRUCTIONS)
def test_responses_items_and_instructions_too(
    before: list[Any], added: list[Any], first: str | None, second: str | None
) -> None:
    items = before
    known = KnownHistories("responses")
    assert normalized(known, "one", items, first) == normalize_responses(parsed(items), first)
    items = parsed([*items, *added])
    assert normalized(known, "one", items, second) == normalize_responses(parsed(items), second)


@pytest.mark.requirement("A3")
@given(st.one_of(st.lists(MESSAGE), st.lists(ITEM)), st.integers(1, 4))
def test_pieces_cut_no_turn(entries: list[Any], size: int) -> None:
    api = "chat" if all(isinstance(entry.get("role"), str) for entry in entries) else "responses"
    read = normalize_chat if api == "chat" else normalize_responses
    history = read([])
    for piece in pieces(entries, api=api, size=size):
        assert piece
        history = extend(history, piece, api=api)
    assert history == read(entries)


def test_the_event_loop_is_handed_back_while_a_long_history_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = KnownHistories("chat")
    messages = [{"role": "user", "content": str(number)} for number in range(5000)]
    read = counted(monkeypatch, "extend", lambda history, piece, **_: len(piece))
    sized = counted(monkeypatch, "_size", lambda value: isinstance(value, dict))

    async def steps() -> list[tuple[int, int]]:
        """Messages read and sized in each step."""
        taken = []
        reading = asyncio.create_task(known.normalize("one", messages))
        while not reading.done():
            read.clear()
            sized.clear()
            await asyncio.sleep(0)
            taken.append((sum(read), sum(sized)))
        return taken

    assert max(max(step) for step in asyncio.run(steps())) == 128
    messages = parsed([*messages, {"role": "user", "content": "more"}])
    compared = asyncio.run(steps())
    assert (len(compared), sum(count for count, _ in compared)) == (4, 1)


def counted(monkeypatch: pytest.MonkeyPatch, name: str, count: Any) -> list[int]:
    """What `count` says of every call of a function of the module."""
    real, calls = getattr(known_histories, name), []

    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls.append(int(count(*arguments, **keywords)))
        return real(*arguments, **keywords)

    monkeypatch.setattr(known_histories, name, counting)
    return calls


def test_everything_that_is_kept_counts() -> None:
    """Many attempts with one short message and long instructions, or with long keys."""
    for request in (
        ([{"role": "user", "content": "a"}], "brief " * 500),
        ([{"role": "user", "content": "a", "k" * 3000: None}], None),
    ):
        known = KnownHistories("responses", capacity=100_000)
        for number in range(200):
            normalized(known, str(number), *parsed(list(request)))
        assert 15 < len(known._known) < 34


def test_requests_of_one_attempt_may_be_read_at_once() -> None:
    known = KnownHistories("chat")

    async def both() -> list[SourceHistory]:
        talks = [[{"role": "user", "content": word}] * 300 for word in ("a", "b")]
        reading = [known.normalize("one", talk) for talk in talks]
        return list(await asyncio.gather(*reading))

    first, second = asyncio.run(both())
    assert first.items[0] != second.items[0]
    assert len(known._known) == 1
    assert known._held == known._known["one"].size


def test_the_refusal_of_an_added_message_names_its_place() -> None:
    known = KnownHistories("chat")
    first = {"role": "user", "content": "a"}
    normalized(known, "one", [first])
    for _ in range(2):
        with pytest.raises(ItemError) as refused:
            normalized(known, "one", [first, {"role": "user", "content": 5}])
        assert refused.value.param == "messages[1].content"
    # Nothing of a refused request is kept.
    assert normalized(known, "one", [first, first]) == normalize_chat([first, first])


def test_a_growing_history_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, messages = KnownHistories("chat"), [{"role": "user", "content": "a"}]
    normalized(known, "one", messages)
    monkeypatch.setattr(known, "_whole", None)
    for turn in range(3):
        messages = parsed([*messages, {"role": "user", "content": f"{turn}"}])
        normalized(known, "one", messages)


@pytest.mark.requirement("A3", "C8")
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_what_is_remembered_is_not_edited_by_vllm(api: str) -> None:
    """The request object, which vLLM's validators make and its renderers change, is another."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "uuid": "u"}
    body: dict[str, Any]
    if api == "chat":
        adapter: Any = ChatAdapter(None, default_model="tiny", incremental=True)
        body = {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
                {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "out"},
            ]
        }
        sent = body["messages"]
    else:
        adapter = ResponsesAdapter(None, default_model="tiny")
        body = {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"k": 1}'},
                {"type": "message", "role": "assistant",
                 "content": [{"type": "output_text", "text": "b"}]},
                {"type": "function_call_output", "call_id": "c", "output": "out"},
            ]
        }  # fmt: skip
        sent = body["input"]
    before = copy.deepcopy(sent)
    prepared = asyncio.run(adapter.prepare(body, "one"))
    shared = containers(prepared.request) & containers(adapter._known._known["one"].entries)
    assert not shared
    assert adapter._known._known["one"].entries == before


def containers(value: Any) -> set[int]:
    """Ids of all lists, dictionaries and objects with attributes in a value."""
    if isinstance(value, str | int | float | bool | None):
        return set()
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return {id(value)}.union(*map(containers, inner))
