"""A spliced prompt's closed think blocks are not the end of the reasoning to come."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.parser import ParserManager
from vllm_forest_renderer.context import CURRENT
from vllm_forest_renderer.serving.reasoning import judging_on_tail


@pytest.mark.requirement("X19")
def test_reasoning_is_judged_on_the_tail(tokenizer: Any) -> None:
    # A parser that looks for the last think token of the whole prompt.
    parser_class = ParserManager.get_parser(reasoning_parser_name="deepseek_r1")
    opened = tokenizer.encode("\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    history = tokenizer.encode("<think>\nold\n</think>\n\nanswer<|im_end|>")
    prompt = history + opened
    assert parser_class(tokenizer).is_reasoning_end(prompt)

    call: Any = SimpleNamespace(
        predecessor=object(), prompt_tokens=prompt, tail_tokens=opened, parser=None
    )
    token = CURRENT.set(call)
    try:
        judged = judging_on_tail(parser_class)(tokenizer)
    finally:
        CURRENT.reset(token)
    assert call.parser is judged
    assert not judged.is_reasoning_end(prompt)
    # A stream's first delta belongs to the reasoning, not to the answer.
    request: Any = SimpleNamespace(tool_choice="none", tools=None, include_reasoning=True)
    delta = {"delta_text": "new", "delta_token_ids": tokenizer.encode("new"), "finished": False}
    message = judged.parse_delta(**delta, request=request, prompt_token_ids=prompt)
    assert (message.reasoning, message.content) == ("new", None)
    stock = parser_class(tokenizer)
    assert stock.parse_delta(**delta, request=request, prompt_token_ids=prompt).content == "new"
    # Anything but the prompt is judged as it is, and so is a root's prompt.
    assert judged.is_reasoning_end(history)
    call.predecessor = None
    assert judged.is_reasoning_end(prompt)
