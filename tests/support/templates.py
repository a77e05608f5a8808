"""Chat templates of several styles, over one small tokenizer.

Each style is a template of our own writing that shows one habit of templates in the wild; the
tokenizer is byte-level, so that every text has tokens, and knows the styles' control tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from vllm_forest_renderer.splice import TailProver

from tests.support.models import load_qwen3_tokenizer

CONTROL = (
    "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|eom|>", "<|im_start|>", "<|im_end|>",
    "<|end_of_text|>", "<|turn_end|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip

_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
)

LLAMA_HEADERS = (
    "<|begin|>{% for message in messages %}"
    "<|head|>{{ message.role }}<|/head|>\n\n{{ message.content or '' }}"
    "{% if message.tool_calls %}" + _CALLS + "<|eom|>{% else %}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
"""Headers; a turn that calls a tool is closed with another token."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without reasoning."""

RESERIALISING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ (message.content or '') | trim }}"
    "{% for call in message.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments | dictsort %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>{% endfor %}</function>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Prints tool arguments in another form, sorted, and trims content."""

FORGETFUL = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role != 'assistant' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% elif message.content or message.tool_calls %}<|im_start|>assistant\n"
    "{% if message.reasoning and loop.index0 > ns.last %}<think>{{ message.reasoning }}</think>"
    "{% endif %}{{ message.content or '' }}" + _CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
"""Drops earlier reasoning and empty turns, and opens the reasoning of the next one."""

OTHER_END = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content or '' }}"
    + _CALLS
    + "{{ '\n' }}<|turn_end|>\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Its end of turn is not the model's end-of-sequence token, and a newline comes before it."""

ROLE_TOKENS = (
    "{% for message in messages %}{% if message.role == 'tool' %}<|observation|>"
    "{% else %}<|{{ message.role if message.role != 'system' else 'user' }}|>{% endif %}"
    "{{ '\n' }}{{ message.content or '' }}" + _CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""No end of turn: the next role's token ends it."""

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Plain text without any control token; it prints no tool calls."""

DOUBLING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "Answer to: {{ messages[-1].content }} {{ messages[-2].content or '' }}\n"
    "<|im_start|>assistant\n{% endif %}"
)
"""Repeats what was said last, so that no cut can be shown."""


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and one per control text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    return tokenizer


@dataclass(frozen=True)
class Style:
    """One template with its tokenizer, as the server would use it."""

    render_text: Callable[[list[dict[str, Any]]], str]
    tokenizer: Tokenizer
    ends: tuple[str, ...]
    """Tokens on which the model stops."""
    added: tuple[str, ...] = CONTROL

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The template's rendering, generation prompt included."""
        return self.render_text([_decoded(message) for message in messages])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def prover(self) -> TailProver:
        """A prover of this style."""
        added = {text: self.tokenizer.token_to_id(text) for text in self.added}
        return TailProver(
            added_tokens=added,
            end_ids=[added[text] for text in self.ends],
            decode=self.decode,
        )


def _decoded(message: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM hands a message to a template: tool arguments decoded, null content empty."""
    copied = dict(message)
    if copied.get("content") is None:
        copied["content"] = ""
    if copied.get("tool_calls"):
        copied["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.loads(call["function"]["arguments"])
                    if isinstance(call["function"]["arguments"], str)
                    else call["function"]["arguments"],
                },
            }
            for call in copied["tool_calls"]
        ]
    return copied


_TOKENIZER = byte_tokenizer()
_ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)


def style(template: str, *ends: str) -> Style:
    """A style over the byte tokenizer."""
    compiled = _ENVIRONMENT.from_string(template)
    return Style(
        lambda messages: compiled.render(messages=messages, add_generation_prompt=True),
        _TOKENIZER,
        ends,
    )


def qwen3_style() -> Style:
    """Qwen3's own template and tokenizer."""
    tokenizer = load_qwen3_tokenizer()

    def render(messages: list[dict[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    return Style(
        render,
        tokenizer.backend_tokenizer,
        ("<|im_end|>", "<|endoftext|>"),
        tuple(tokenizer.get_added_vocab()),
    )


STYLES: dict[str, Style] = {
    "llama_headers": style(LLAMA_HEADERS, "<|eot|>", "<|eom|>"),
    "chatml": style(CHATML, "<|im_end|>"),
    "reserialising": style(RESERIALISING, "<|im_end|>"),
    "forgetful": style(FORGETFUL, "<|im_end|>"),
    "other_end": style(OTHER_END, "<|end_of_text|>"),
    "role_tokens": style(ROLE_TOKENS, "<|user|>", "<|observation|>", "<|end_of_text|>"),
    "plain": style(PLAIN, "<|end_of_text|>"),
    "doubling": style(DOUBLING, "<|im_end|>"),
    "qwen3": qwen3_style(),
}
