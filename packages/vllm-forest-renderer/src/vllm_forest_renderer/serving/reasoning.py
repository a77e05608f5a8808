"""Reasoning state of a spliced prompt.

Guarantees: whether a prompt leaves the model inside its reasoning is judged on what was newly
rendered. A spliced prompt keeps closed think blocks of earlier turns; a parser that looks at the
whole of it would take them for the end of the reasoning that is about to be generated.
"""

from collections.abc import Sequence
from typing import Any

from vllm_forest_renderer.context import CURRENT, Call


def judge_reasoning_on_tail(serving: Any, factory: str) -> None:
    """Let the parsers of `serving` (a copy of vLLM's serving object) see the tail as prompt.

    `factory` names the method that makes a parser for a request.
    """
    make_parser = getattr(serving, factory)

    def make(*args: Any, **keywords: Any) -> Any:
        parser = make_parser(*args, **keywords)
        call = CURRENT.get()
        if call is not None and parser is not None:
            call.parser = parser
            for method in ("is_reasoning_end", "set_prompt_token_ids"):
                setattr(parser, method, _on_tail(getattr(parser, method), call))
            parser.parse_delta = _deltas_on_tail(parser.parse_delta, call)
        return parser

    setattr(serving, factory, make)


def _on_tail(method: Any, call: Call) -> Any:
    def judge(token_ids: Sequence[int]) -> Any:
        if call.predecessor is not None and token_ids == call.prompt_tokens:
            return method(call.tail_tokens)
        return method(token_ids)

    return judge


def _deltas_on_tail(parse_delta: Any, call: Call) -> Any:
    def parse(*args: Any, **keywords: Any) -> Any:
        if call.predecessor is not None and keywords.get("prompt_token_ids") is not None:
            keywords["prompt_token_ids"] = call.tail_tokens
        return parse_delta(*args, **keywords)

    return parse
