"""The Responses API, through the stock client."""

import json
from typing import Any

import openai
import pytest

from tests.support.engine import worker_prompts
from tests.support.episodes import END, Episode

TOOLS: Any = [
    {
        "type": "function",
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        "strict": False,
    }
]


def respond(
    episode: Episode, items: Any, script: list[int] | None = None, **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """(output items, record) of one call."""
    if script is not None:
        options |= {
            "max_output_tokens": len(script),
            "extra_body": {"vllm_xargs": {"force": script}},
        }
    seen = len(worker_prompts(episode.prompts_file))
    answer = episode.client.responses.create(
        model="tiny", input=items, **{"max_output_tokens": 4, **options}
    )
    episode.served = worker_prompts(episode.prompts_file, seen)[0]
    return json.loads(answer.to_json())["output"], episode.record(answer.id)


@pytest.mark.smoke
@pytest.mark.requirement("A27", "X20", "A20")
def test_reasoning_message_and_tool_turns_continue(episode: Episode) -> None:
    script = [
        *episode.ids("<think>\nneed it\n</think>\n\n"),
        *episode.spell("I look it up."),
        *episode.ids('<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'),
        *episode.ids(END),
    ]
    user = {"role": "user", "content": "Where?"}
    output, first = respond(episode, [user], script, tools=TOOLS)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": output[-1]["call_id"],
        "output": f"here {END}",
    }
    _, second = respond(episode, [user, *output, result], tools=TOOLS)
    assert second.parent_call_id == first.call_id
    assert episode.tail_text(first) == (
        f"\n<|im_start|>user\n<tool_response>\nhere {END}\n</tool_response>{END}\n"
        "<|im_start|>assistant\n"
    )
    # Without the reasoning items: the same continuation.
    kept = [item for item in output if item["type"] != "reasoning"]
    _, third = respond(episode, [user, *kept, result], tools=TOOLS)
    assert third.parent_call_id == first.call_id


@pytest.mark.requirement("A27")
def test_instructions_and_text_input(episode: Episode) -> None:
    script = episode.ids(f"<think>\n\n</think>\n\nParis{END}")
    output, first = respond(episode, "France?", script, instructions="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "France?"},
    ]
    assert episode.served == episode.ids(episode.template(messages))
    history = [{"role": "user", "content": "France?"}, *output, {"role": "user", "content": "Go"}]
    _, second = respond(episode, history, instructions="Be brief.")
    assert second.parent_call_id == first.call_id
    _, third = respond(episode, history, instructions="Be long.")
    assert (third.parent_call_id, third.root_reason) == (None, "no_match")


@pytest.mark.requirement("A28", "X15")
def test_buffered_events_add_up(episode: Episode) -> None:
    script = [
        *episode.ids("<think>\nneed it\n</think>\n\nI look."),
        *episode.ids('<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'),
        *episode.ids(END),
    ]
    with episode.client.responses.stream(
        model="tiny",
        input="Where?",
        tools=TOOLS,
        max_output_tokens=len(script),
        extra_body={"vllm_xargs": {"force": script}},
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(
        range(len(events))
    )
    record = episode.record(final.id)
    assert record.generated_len == len(script)
    usage = final.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (record.prompt_len, len(script))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    arguments = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta"
    )
    assert text.strip() == "I look."
    assert json.loads(arguments) == {"query": "x"}
    types = [event.type for event in events]
    assert types[0] == "response.created"
    assert types[-1] == "response.completed"


@pytest.mark.requirement("K7", "X20")
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
    ],
)
def test_provider_managed_state_is_refused(
    episode: Episode, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        episode.client.responses.create(model="tiny", input="hi", **options)
    error: Any = refused.value.response.json()["error"]
    assert (error["type"], error["param"]) == ("unsupported_request", param)
    assert refused.value.response.headers["x-should-retry"] == "false"
