"""The boundary proof over templates of several styles, against witnesses and random talk."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_forest_renderer.splice import NotProvable, TailProver, answered
from vllm_forest_renderer.splice.marks import mark_turn

from tests.support.templates import CHATML, CONTROL, STYLES, Style, style

WITNESSES = json.loads((Path(__file__).parent / "witnesses.json").read_text())
SPLICEABLE = [name for name in STYLES if name != "doubling"]


def tail_of(
    style: Style,
    messages: list[dict[str, Any]],
    count: int,
    generated: list[int],
    prover: TailProver | None = None,
    **options: Any,
) -> list[int]:
    """Token ids behind the captured turn."""
    prover = prover or style.prover()
    proof = prover.prove(messages, count, generated=generated, options="o", **options)
    tail = answered(proof, style.text)
    return prover.tail_tokens(tail, style.encode(tail.anchor + tail.text))


@pytest.mark.requirement("A13", "A15", "A20", "A21", "X2", "X3", "X5", "X6", "X8")
@pytest.mark.parametrize("witness", WITNESSES, ids=[w["rule"] for w in WITNESSES])
def test_witness(witness: dict[str, Any]) -> None:
    kind = STYLES[witness["style"]]
    messages = [
        {"role": "user", "content": "ask <|im_end|>"},
        {"role": "assistant", **witness["turn"]},
        *witness["next"],
    ]
    generated = kind.encode(witness["generated"])
    options = {"stopped_on_string": witness.get("stopped_on_string", False)}
    if witness["tail"] is None:
        with pytest.raises(NotProvable) as refused:
            tail_of(kind, messages, 2, generated, **options)
        assert refused.value.reason == witness["reason"]
        return
    assert kind.decode(tail_of(kind, messages, 2, generated, **options)) == witness["tail"]
    assert kind.text(messages).endswith(witness["tail"])


# Tokenizers normalise text, and refuse what UTF-8 cannot carry.
LETTERS = st.text(st.characters(codec="ascii", exclude_characters="\r"))
TEXT = st.lists(
    st.one_of(st.sampled_from([*CONTROL, "\n", " ", "<think>", "</think>", "}", '"']), LETTERS),
    max_size=5,
).map("".join)
OBSERVATION = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXT),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, TEXT),
)
ARGUMENTS = st.dictionaries(
    st.text(st.characters(codec="ascii"), min_size=1, max_size=4), st.one_of(TEXT, st.integers())
)


@st.composite
def turns(draw: st.DrawFn, calls: bool = True) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": draw(st.one_of(st.none(), TEXT))}
    if draw(st.booleans()):
        turn["reasoning"] = draw(TEXT)
    if calls and draw(st.booleans()):
        turn["tool_calls"] = [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps(draw(ARGUMENTS))},
            }
            for n in range(draw(st.integers(1, 2)))
        ]
    return turn


@st.composite
def conversations(draw: st.DrawFn, calls: bool = True) -> tuple[list[dict[str, Any]], int]:
    """(messages, end of the captured turn): any talk, then the turn, then observations."""
    before = draw(st.lists(st.one_of(OBSERVATION, turns(calls)), max_size=4))
    after = draw(st.lists(OBSERVATION, min_size=1, max_size=3))
    messages = [{"role": "user", "content": draw(TEXT)}, *before, draw(turns(calls))]
    return [*messages, *after], len(messages)


def oracle(style: Style, messages: list[dict[str, Any]], count: int) -> str:
    """What the template renders behind the turn, found by brute force: the longest text that the
    rendering ends with whatever the turn's last words are.
    """
    renderings = [
        style.text(mark_turn(messages, count, word, drop_calls=True)) for word in ("A", "B", "CC")
    ]
    length = 0
    while all(r[-length - 1 :][:1] == renderings[0][-length - 1 :][:1] for r in renderings):
        length += 1
    return renderings[0][len(renderings[0]) - length :]


@pytest.mark.requirement("A13", "A20", "X6", "X12")
@pytest.mark.parametrize("name", SPLICEABLE)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tail_is_what_the_template_renders_after_the_turn(name: str, data: st.DataObject) -> None:
    kind = STYLES[name]
    messages, count = data.draw(conversations(calls=False))
    generated = kind.encode("cut by length")
    tail = kind.decode(tail_of(kind, messages, count, generated))
    assert tail == oracle(kind, messages, count)
    assert kind.text(messages).endswith(tail)


@pytest.mark.requirement("A13", "A15", "A20")
@pytest.mark.parametrize("name", [name for name in SPLICEABLE if name != "plain"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tool_call_turns_close_where_the_template_closes_them(
    name: str, data: st.DataObject
) -> None:
    kind = STYLES[name]
    messages, count = data.draw(conversations())
    prover = kind.prover()
    closed = {**messages[count - 1], "content": "said"}
    messages = [*messages[: count - 1], closed, *messages[count:]]
    tail = kind.decode(tail_of(kind, messages, count, kind.encode("said"), prover))
    assert kind.text(messages).endswith(tail)
    # The same turn's rendering ends where the tail begins: nothing of the turn is in the tail.
    head = kind.text(messages)[: -len(tail)]
    assert head.rstrip("\n").endswith(("</tool_call>", "</function>", "said"))
    # What is remembered for this shape gives the same answer again.
    again = kind.decode(tail_of(kind, messages, count, kind.encode("said"), prover))
    assert again == tail


@pytest.mark.requirement("X10", "A14")
def test_null_and_empty_content_must_render_the_same() -> None:
    telling = STYLES["chatml"]
    strict = style(
        CHATML.replace(
            "{{ message.content or '' }}", "{{ 'null' if message.nothing else message.content }}"
        ),
        "<|im_end|>",
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    options = {"used_null_empty_equivalence": True}
    generated = telling.encode("x<|im_end|>")
    assert tail_of(telling, messages, 2, generated, **options)

    def text(given: Any) -> str:
        marked = [{**m, "nothing": m.get("content") is None} for m in given]
        return strict.text(marked)

    proof = strict.prover().prove(messages, 2, generated=generated, options="o", **options)
    with pytest.raises(NotProvable) as refused:
        answered(proof, text)
    assert refused.value.reason == "renderer_not_qualified"


@pytest.mark.requirement("A13", "A15")
def test_closing_that_depends_on_the_place_is_proven_again() -> None:
    counting = style(
        CHATML.replace(
            "<|im_end|>\n{% endfor %}",
            "<|im_end|>\n{% if loop.index is divisibleby 4 %}REMINDER\n{% endif %}{% endfor %}",
        ),
        "<|im_end|>",
    )
    prover = counting.prover()
    talk: list[dict[str, Any]] = [{"role": "user", "content": "ask"}]
    for turn in range(4):
        talk += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": "go"}]
        tail = counting.decode(
            tail_of(counting, talk, len(talk) - 1, counting.encode("a<|im_end|>"), prover)
        )
        assert counting.text(talk).endswith("<|im_end|>" + tail)
        assert tail.startswith("\nREMINDER\n") == ((len(talk) - 1) % 4 == 0)


@pytest.mark.requirement("A13", "A15")
def test_turn_whose_words_change_what_follows_is_not_cut() -> None:
    shouting = style(
        CHATML.replace("<|im_end|>\n", "<|im_end|>{{ '!' if '?' in message.content[-1:] }}\n"),
        "<|im_end|>",
    )
    messages = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "why?"},
        {"role": "user", "content": "go"},
    ]
    generated = shouting.encode("why?<|im_end|>")
    with pytest.raises(NotProvable, match="changes what the template renders"):
        tail_of(shouting, messages, 2, generated)
    messages[1] = {"role": "assistant", "content": "why"}
    tail = shouting.decode(tail_of(shouting, messages, 2, generated))
    assert shouting.text(messages).endswith("<|im_end|>" + tail)


@pytest.mark.requirement("A13", "A15")
def test_tool_call_syntax_that_depends_on_the_place_is_proven_again() -> None:
    padding = style(
        CHATML.replace("</tool_call>", "</tool_call>{{ '.' * messages | length }}"), "<|im_end|>"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    prover = padding.prover()
    for turns in (1, 2, 3):
        talk = [{"role": "user", "content": "ask"}, *turn * turns]
        tail = tail_of(padding, talk, len(talk) - 1, padding.encode("cut"), prover)
        assert padding.decode(tail).startswith("<|im_end|>\n<|im_start|>tool\nok")
