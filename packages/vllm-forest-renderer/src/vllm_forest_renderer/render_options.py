"""Digest of the options that a prompt is rendered with.

Guarantees: two requests have one digest exactly when the renderer receives the same template,
template keywords, tools, processor keywords, model and adapter; request fields that never reach
it do not count. The order of keys inside a tool counts, because templates print it.
"""

from typing import Any

import msgspec
from forest_schema.digests import options_digest

_ENCODER = msgspec.json.Encoder(enc_hook=repr)


def render_option_digest(
    chat_params: Any, *, model: str, add_special_tokens: bool, takes_api_fields: bool
) -> str:
    """Digest of vLLM's `ChatParams` after server defaults, and of the model or adapter name.

    `takes_api_fields`: the renderer reads `tool_choice` and `response_format` too.
    """
    keywords = chat_params.chat_template_kwargs or {}
    options: list[Any] = [
        ["model", model],
        ["template", chat_params.chat_template],
        ["content_format", str(chat_params.chat_template_content_format)],
        ["add_special_tokens", add_special_tokens],
        ["media_io_kwargs", chat_params.media_io_kwargs or None],
        ["mm_processor_kwargs", chat_params.mm_processor_kwargs or None],
        ["keywords", [[name, keywords[name]] for name in sorted(keywords)]],
    ]
    if takes_api_fields:
        options.append(["tool_choice", _plain(getattr(chat_params, "tool_choice", None))])
        options.append(["response_format", _plain(getattr(chat_params, "response_format", None))])
    return options_digest(_ENCODER.encode(options))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
