"""Captured conversations without an engine: tool calls with reasoning, of a wanted length."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forest_schema.digests import delta_digest
from forest_schema.items import SourceHistory, normalize_chat
from forest_schema.records import CallRecord, SamplingRecord, TensorRef
from vllm_forest_renderer.capture.generation import Generation
from vllm_forest_renderer.capture.prefixes import PrefixCache
from vllm_forest_renderer.capture.record import (
    Answer,
    build_delta,
    build_record,
    replay_summary,
)
from vllm_forest_renderer.context import Call, Predecessor
from vllm_forest_renderer.resolution.source_history import SourceHistoryResolver

MODEL = "tiny"
GENERATED = 60
"""Tokens of each captured generation."""
_TURN = 60
"""About the tokens of a turn and of an observation's frame."""

_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
)


async def _refuse(*_: Any) -> Any:
    raise AssertionError("a benchmark without an engine got as far as the engine")


def words(count: int, seed: int) -> str:
    """Words of one token each."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def tool_rounds(calls: int, length: int, new: int) -> list[dict[str, Any]]:
    """A question and `calls` rounds of reasoning, tool call and observation, the last of `new`
    tokens with its frame.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "Find out what happened."},
    ]
    for number in range(calls):
        call_id = f"chatcmpl-tool-{number}"
        function = {"name": "search", "arguments": f'{{"query": "page {number}", "limit": 3}}'}
        messages += [
            {
                "role": "assistant",
                "content": "I look it up.",
                "reasoning": words(8, number),
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": words(length, -number)},
        ]
    messages[-1]["content"] = words(new - 20, calls)
    return messages


@dataclass(frozen=True)
class Captured:
    """A conversation whose next request continues its last captured call."""

    messages: list[dict[str, Any]]
    """The next request's: the captured history and one observation."""
    records: tuple[CallRecord, ...]
    prefixes: PrefixCache
    tokens: list[int]
    """The captured history."""

    def call(self, history: SourceHistory) -> Call:
        """The next request, read as `history`, as the routes hand it to the renderer."""
        return Call(
            attempt_id="att",
            api="chat",
            model=MODEL,
            history=history,
            calls=self.records,
            resolver=SourceHistoryResolver(),
            history_tokens=self.prefixes.history,
            stored_media=_refuse,
            admit=_refuse,
            around_generation=_refuse,  # type: ignore[arg-type]
        )


def captured(
    tokenizer: Any, *, tokens: int, new: int, calls: int, options: str, tools: Sequence[Any]
) -> Captured:
    """About `tokens` tokens of history in `calls` calls, rendered under the options digest, and a
    request that continues them by `new` tokens.
    """
    length = max(1, (tokens - 130 - _TURN * calls) // (calls - 1))
    messages = tool_rounds(calls, length, new)
    shown = [
        {**message, "reasoning_content": message.get("reasoning")} for message in messages[:-1]
    ]
    text = tokenizer.apply_chat_template(shown, tokenize=False, tools=list(tools))
    ids = list(tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False))
    prefixes = PrefixCache(None, capacity_tokens=1 << 40)  # type: ignore[arg-type]
    records: list[CallRecord] = []
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for number, at in enumerate(turns):
        start, end = (len(ids) * step // calls for step in (number, number + 1))
        middle = max(start, end - GENERATED)
        call = Call(
            attempt_id="att",
            api="chat",
            model=MODEL,
            history=normalize_chat(messages[:at]),
            calls=(),
            resolver=SourceHistoryResolver(),
            history_tokens=_refuse,
            stored_media=_refuse,
            admit=_refuse,
            around_generation=_refuse,  # type: ignore[arg-type]
            render_option_digest=options,
            predecessor=Predecessor(records[-1], False) if records else None,
            tail_tokens=ids[start:middle],
            call_id=f"call_{number}",
            order=number,
            generation=Generation(tokens=ids[middle:end], logprobs=[-0.5] * (end - middle)),
        )
        answer = Answer(f"chatcmpl-{number}", [messages[at]], "tool_calls")
        delta = build_delta(call)
        records.append(
            build_record(
                call,
                delta=delta,
                ref=TensorRef(
                    store="s", partition="p", shard="x", key="k", digest=delta_digest(delta)
                ),
                replay=replay_summary(call, answer),
                answer=answer,
                sampling=SamplingRecord(temperature=1.0),
                weight_spans=(),
                committed_at=0.0,
            )
        )
    prefixes.put(records[-1].call_id, ids)
    return Captured(messages, tuple(records), prefixes, ids)
