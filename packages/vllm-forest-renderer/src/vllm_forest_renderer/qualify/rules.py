"""The rules that a tokenizer and a template are tried on, each with its witness.

Guarantees: pure data and pure judgement; a witness is a conversation that any user could have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    },
)

_ASK = {"role": "user", "content": "What is the capital of France?"}
_NEXT = {"role": "user", "content": "And of Germany?"}
_SYSTEM = {"role": "system", "content": "Be brief."}


def _call(number: int, key: str = "France") -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "lookup", "arguments": f'{{"key": "{key}"}}'},
    }


def _result(number: int, content: str = "Paris") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a template may do to a captured turn."""

    name: str
    asks: str
    """The question, in a sentence."""
    messages: tuple[Mapping[str, Any], ...]
    count: int
    """Messages up to the end of the captured turn."""
    complete: bool = True
    """The generation ended with an end-of-sequence token; False: it was cut."""
    tools: tuple[dict[str, Any], ...] = ()
    equivalence: bool = False
    """Null and empty content must render the same."""


def rules(end_text: str) -> Sequence[Rule]:
    """Every rule. `end_text` is the text of the model's end-of-turn token."""
    answer = {"role": "assistant", "content": "Paris"}
    calling = {"role": "assistant", "content": None, "tool_calls": [_call(1)]}
    two = {"role": "assistant", "content": "I look.", "tool_calls": [_call(1), _call(2, "Spain")]}
    thinking = {"role": "assistant", "content": "Paris", "reasoning": "France, so Paris."}
    return (
        Rule("answer", "an answer, then a user message", (_ASK, answer, _NEXT), 2),
        Rule(
            "system", "the same behind a system message", (_SYSTEM, _ASK, answer, _NEXT), 3
        ),
        Rule(
            "second_turn", "a second answer in a longer history",
            (_ASK, answer, _NEXT, {"role": "assistant", "content": "Berlin"}, _ASK), 4,
        ),
        Rule("cut_answer", "an answer cut by length", (_ASK, answer, _NEXT), 2, complete=False),
        Rule(
            "empty_answer", "an empty answer",
            (_ASK, {"role": "assistant", "content": ""}, _NEXT), 2,
        ),
        Rule(
            "control_text_in_answer", "an answer that quotes the end-of-turn token",
            (_ASK, {"role": "assistant", "content": f"It is {end_text} so"}, _NEXT), 2,
        ),
        Rule(
            "control_text_in_message", "a user message that quotes the end-of-turn token",
            (_ASK, answer, {"role": "user", "content": f"{end_text}\nfake{end_text}"}), 2,
        ),
        Rule("reasoning", "an answer with reasoning", (_ASK, thinking, _NEXT), 2),
        Rule(
            "cut_reasoning", "a generation cut inside its reasoning",
            (_ASK, {"role": "assistant", "content": None, "reasoning": "Fran"}, _NEXT), 2,
            complete=False,
        ),
        Rule("tool_call", "a tool call and its result", (_ASK, calling, _result(1)), 2,
             tools=_TOOLS),
        Rule(
            "tool_calls", "text and two tool calls, two results and a user message",
            (_ASK, two, _result(1), _result(2, "Madrid"), _NEXT), 2, tools=_TOOLS,
        ),
        Rule(
            "reasoned_tool_call", "a tool call with reasoning",
            (_ASK, {**calling, "reasoning": "I look it up."}, _result(1)), 2, tools=_TOOLS,
        ),
        Rule(
            "control_text_in_result", "a tool result that quotes the end-of-turn token",
            (_ASK, calling, _result(1, f"{end_text}\n{end_text}")), 2, tools=_TOOLS,
        ),
        Rule(
            "cut_tool_call", "a tool call that was cut before its end",
            (_ASK, calling, _result(1)), 2, complete=False, tools=_TOOLS,
        ),
        Rule(
            "null_equals_empty", "null and empty content beside a tool call",
            (_ASK, calling, _result(1)), 2, tools=_TOOLS, equivalence=True,
        ),
    )  # fmt: skip
