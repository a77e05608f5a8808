"""Reasoning state of a spliced prompt.

Guarantees: whether a prompt leaves the model inside its reasoning is judged on what was newly
rendered. A spliced prompt keeps closed think blocks of earlier turns; a parser that looks at the
whole of it would take them for the end of the reasoning that is about to be generated.
"""

from collections.abc import Sequence
from typing import Any

from vllm_forest_renderer.context import CURRENT


def judge_reasoning_on_tail(serving: Any) -> None:
    """Let the parsers of `serving` (a copy of vLLM's serving object) see the tail as prompt."""
    make_parser = serving._make_parser

    def make(*args: Any, **keywords: Any) -> Any:
        parser = make_parser(*args, **keywords)
        for method in ("is_reasoning_end", "set_prompt_token_ids"):
            setattr(parser, method, _on_tail(getattr(parser, method)))
        return parser

    serving._make_parser = make


def _on_tail(method: Any) -> Any:
    def judge(token_ids: Sequence[int]) -> Any:
        call = CURRENT.get()
        if call is not None and call.predecessor is not None and token_ids == call.prompt_tokens:
            return method(call.tail_tokens)
        return method(token_ids)

    return judge
