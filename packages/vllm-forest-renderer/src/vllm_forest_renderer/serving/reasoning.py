"""Reasoning state of a spliced prompt.

Guarantees: whether a prompt leaves the model inside its reasoning is judged on what was newly
rendered. A spliced prompt keeps closed think blocks of earlier turns; a parser that looks at the
whole of it would take them for the end of the reasoning that is about to be generated.
"""

from collections.abc import Sequence
from typing import Any

from vllm_forest_renderer.context import CURRENT


def judging_on_tail(parser_class: Any) -> Any:
    """A subclass of one of vLLM's parsers that sees the tail of a spliced prompt as the prompt."""

    class Judging(parser_class):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            # Parsers are made in the task of their request; a stream goes on in another one.
            self._forest_call = CURRENT.get()
            if self._forest_call is not None:
                self._forest_call.parser = self

        def _newly_rendered(self, token_ids: Sequence[int]) -> Sequence[int]:
            call = getattr(self, "_forest_call", None)
            if call is None or call.predecessor is None or token_ids != call.prompt_tokens:
                return token_ids
            return call.tail_tokens

        def is_reasoning_end(self, input_ids: Sequence[int]) -> Any:
            return super().is_reasoning_end(self._newly_rendered(input_ids))

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> Any:
            return super().set_prompt_token_ids(self._newly_rendered(prompt_token_ids))

        def parse_delta(self, *args: Any, **keywords: Any) -> Any:
            if keywords.get("prompt_token_ids") is not None:
                keywords["prompt_token_ids"] = self._newly_rendered(keywords["prompt_token_ids"])
            return super().parse_delta(*args, **keywords)

    Judging.__name__ = Judging.__qualname__ = f"Forest{parser_class.__name__}"
    return Judging
