"""Requests that cannot be captured exactly, refused before anything is written.

Guarantees: pure; only what the client sent counts, a field left out or null is never refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forest_schema.reasons import Reason

from vllm_forest_renderer.errors import ForestError

_ONLY_IMAGES = "parts are not captured, only text and images"
_MEDIA_PARTS = {
    "video_url": "parts are not captured: which frames a video gives is settled while it is "
    "decoded, and a retained video could not be proven the same; send its frames as images",
    "image_embeds": "parts are not captured: send the image itself",
    "image_pil": "parts are not captured: send the image itself",
    "input_audio": _ONLY_IMAGES,
    "audio_url": _ONLY_IMAGES,
    "audio_embeds": _ONLY_IMAGES,
    "prompt_embeds": _ONLY_IMAGES,
}
"""Content parts that are refused, and why."""


def _is_true(value: Any) -> bool:
    return bool(value)


def _is_false(value: Any) -> bool:
    return value is False


def _is_given(value: Any) -> bool:
    return value is not None


_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda n: n not in (None, 1), "one generation per request: leave n out or send 1"),
    ("best_of", lambda n: n not in (None, 1), "one generation per request: leave best_of out"),
    ("use_beam_search", _is_true, "beam search has no sampled distribution: leave it out"),
    ("echo", _is_true, "an answer that repeats its prompt cannot be matched: leave echo out"),
    (
        "continue_final_message",
        _is_true,
        "assistant prefill is not captured: end the messages with a user or tool message",
    ),
    (
        "add_generation_prompt",
        _is_false,
        "a prompt without a generation prompt is not captured: leave it out",
    ),
    (
        "truncate_prompt_tokens",
        _is_given,
        "truncation would change captured tokens: shorten the messages instead",
    ),
    (
        "truncation",
        lambda value: value not in (None, "disabled"),
        "truncation would change captured tokens: shorten the messages instead",
    ),
    (
        "kv_transfer_params",
        _is_given,
        "prompts of another server bypass the renderer: leave kv_transfer_params out",
    ),
    (
        "ec_transfer_params",
        _is_given,
        "prompts of another server bypass the renderer: leave ec_transfer_params out",
    ),
    (
        "previous_response_id",
        _is_given,
        "conversation state is the client's: send the whole history as input",
    ),
    ("conversation", _is_given, "conversation state is the client's: send the whole history"),
    ("store", _is_true, "answers are not stored for retrieval: leave store out"),
    (
        "previous_input_messages",
        _is_given,
        "conversation state is the client's: send the whole history as input",
    ),
    ("prompt", _is_given, "prompt templates of a provider are not captured: send the input itself"),
    ("background", _is_true, "a request is answered while it is open: leave background out"),
)


def check_fields(body: Mapping[str, Any]) -> None:
    """Refuse what changes or bypasses the captured prompt. Raises `ForestError`."""
    if not isinstance(body.get("stream"), bool | None):
        raise ForestError(Reason.MALFORMED_REQUEST, "stream: must be true or false", param="stream")
    for name, refused, advice in _UNSUPPORTED:
        if name in body and refused(body[name]):
            raise ForestError(Reason.UNSUPPORTED_REQUEST, f"{name}: {advice}", param=name)


def check_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """The messages of a Chat request. Raises `ForestError`."""
    if not isinstance(messages, list) or not messages:
        raise ForestError(
            Reason.MALFORMED_REQUEST, "messages: must be a list with a message", param="messages"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ForestError(
                Reason.MALFORMED_REQUEST,
                f"messages[{index}]: must be an object",
                param=f"messages[{index}]",
            )
        check_parts(message.get("content"), f"messages[{index}].content")
    if messages[-1].get("role") == "assistant":
        raise ForestError(
            Reason.UNSUPPORTED_REQUEST,
            "messages: assistant prefill is not captured; end with a user or tool message",
            param=f"messages[{len(messages) - 1}]",
        )
    return messages


def check_parts(content: Any, param: str) -> None:
    """Refuse parts that are neither text nor images. Raises `ForestError`."""
    if isinstance(content, list):
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _MEDIA_PARTS:
                raise ForestError(
                    Reason.UNSUPPORTED_ITEM,
                    f"{param}[{index}]: {kind} {_MEDIA_PARTS[kind]}",
                    param=f"{param}[{index}]",
                )


def without_uuids(content: Any) -> Any:
    """A copy of message content whose media parts carry no `uuid`.

    vLLM takes a uuid for the content: it would serve the pixels that it remembers under it,
    whatever is sent.
    """
    if not isinstance(content, list):
        return content
    return [
        {key: value for key, value in part.items() if key != "uuid"}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def check_input(value: Any) -> Sequence[Mapping[str, Any]] | str:
    """The input of a Responses request. Raises `ForestError`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            "input: must be a string or a list with an item",
            param="input",
        )
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise ForestError(
                Reason.MALFORMED_REQUEST, f"input[{index}]: must be an object", param="input"
            )
        check_parts(item.get("content"), f"input[{index}].content")
        check_parts(item.get("output"), f"input[{index}].output")
    last = value[-1]
    if last.get("role") == "assistant" or last.get("type") in ("reasoning", "function_call"):
        raise ForestError(
            Reason.UNSUPPORTED_REQUEST,
            "input: assistant prefill is not captured; end with a user message or an output",
            param=f"input[{len(value) - 1}]",
        )
    return value


def check_tools(tools: Any) -> None:
    """Refuse tools that the server would run between two generations. Raises `ForestError`."""
    for index, tool in enumerate(tools or () if isinstance(tools, list | None) else ()):
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise ForestError(
                Reason.UNSUPPORTED_REQUEST,
                f"tools[{index}]: tools of type {tool.get('type')!r} run on the server between "
                "generations and are not captured; use function tools",
                param=f"tools[{index}].type",
            )
