"""A spliced prompt's closed think blocks are not the end of the reasoning to come."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.reasoning import ReasoningParserManager
from vllm_forest_renderer.context import CURRENT
from vllm_forest_renderer.serving.reasoning import judge_reasoning_on_tail


@pytest.mark.requirement("X19")
def test_reasoning_is_judged_on_the_tail(tokenizer: Any) -> None:
    # A parser that looks for the last think token of the whole prompt.
    parser_class = ReasoningParserManager.get_reasoning_parser("deepseek_r1")

    class Parser(parser_class):  # type: ignore[misc, valid-type]
        def set_prompt_token_ids(self, ids: Any) -> None:
            self.seen = ids

        def parse_delta(self, *, prompt_token_ids: Any) -> Any:
            return prompt_token_ids

    history = tokenizer.encode("<think>\nold\n</think>\n\nanswer<|im_end|>")
    opened = tokenizer.encode("\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\n")
    prompt = history + opened[:-2]
    serving = SimpleNamespace(make=lambda: Parser(tokenizer))
    stock = serving.make()
    assert stock.is_reasoning_end(prompt)
    judge_reasoning_on_tail(serving, "make")
    call: Any = SimpleNamespace(
        predecessor=object(), prompt_tokens=prompt, tail_tokens=opened[:-2], parser=None
    )
    token = CURRENT.set(call)
    try:
        judged = serving.make()
    finally:
        CURRENT.reset(token)
    assert call.parser is judged
    assert not judged.is_reasoning_end(prompt)
    judged.set_prompt_token_ids(prompt)
    assert judged.seen == opened[:-2]
    assert judged.parse_delta(prompt_token_ids=prompt) == opened[:-2]
    # Anything but the prompt is judged as it is, and so is a root's prompt.
    assert judged.is_reasoning_end(history)
    call.predecessor = None
    assert judged.is_reasoning_end(prompt)
