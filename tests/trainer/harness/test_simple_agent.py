"""The example agent against a scripted endpoint, through the stock `openai` client."""

from typing import Any

import httpx
import openai
import pytest
from megatron_forest_trainer.harness.compaction import HIDDEN
from megatron_forest_trainer.harness.environment import OptionsError
from megatron_forest_trainer.harness.simple_agent import check_options

from tests.trainer.harness.scripted_chat import Chat, answer, look

KEEP_ONE = {"keep_rounds": 1}


def results_sent(request: dict[str, Any]) -> list[str]:
    return [m["content"] for m in request["messages"] if m["role"] == "tool"]


@pytest.mark.requirement("E11", "I19")
def test_hidden_results_leave_the_request_and_stay_in_the_returned_history() -> None:
    chat = Chat([look('{"at": 1}'), look('{"at": 2}'), look('{"at": 3}'), answer("yes")])

    result = chat.episode(context_history=KEEP_ONE)

    assert [results_sent(request) for request in chat.requests] == [
        [],
        ["look 1 1"],
        [HIDDEN, "look 2 2"],
        [HIDDEN, HIDDEN, "look 3 3"],
    ]
    assert [r["id"] for r in result["responses"]] == [f"response-{i}" for i in range(4)]
    assert result["terminal_response_id"] == "response-3"
    assert (result["outcome"], result["reward"], result["model_calls"]) == ("answered", 1.0, 4)


@pytest.mark.requirement("A1")
def test_the_agent_sends_messages_and_nothing_of_the_capture() -> None:
    chat = Chat([look('{"at": 1}', "think"), answer("yes")])
    chat.episode()

    assert chat.requests[0].keys() == {"messages", "model", "seed", "temperature", "tools"}
    sent = chat.requests[1]["messages"][1]
    assert sent["reasoning"] == "think"
    assert sent["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}


def test_each_call_has_its_own_seed_that_a_second_run_repeats() -> None:
    def seeds(seed: int) -> list[int]:
        chat = Chat([look('{"at": 1}'), answer("no"), answer("yes")])
        chat.episode(
            seed=seed, select_response="tests.trainer.harness.scripted_chat:says_more_than_no",
            max_response_retries=1,
        )  # fmt: skip
        return [request["seed"] for request in chat.requests]

    assert len(set(seeds(5))) == 3
    assert seeds(5) == seeds(5)
    assert not set(seeds(5)) & set(seeds(6))


@pytest.mark.requirement("I15")
def test_a_rejected_response_enters_neither_the_history_nor_the_result() -> None:
    chat = Chat([look('{"at": 1}'), answer("no"), answer("yes")])

    result = chat.episode(
        select_response="tests.trainer.harness.scripted_chat:says_more_than_no",
        max_response_retries=1,
    )

    first, retry = ({**chat.requests[i], "seed": None} for i in (1, 2))
    assert first == retry
    assert [r["id"] for r in result["responses"]] == ["response-0", "response-2"]
    assert result["reward"] == 1.0


@pytest.mark.requirement("I15", "I19")
@pytest.mark.parametrize(
    ("limits", "outcome", "calls"),
    [
        ({"max_response_retries": 1}, "no_accepted_response", 2),
        ({"max_response_retries": 5, "max_model_calls": 3}, "max_model_calls", 3),
    ],
)
def test_rejection_ends_at_its_limits_with_a_name(
    limits: dict[str, int], outcome: str, calls: int
) -> None:
    chat = Chat([answer("no")] * 9)
    result = chat.episode(
        select_response="tests.trainer.harness.scripted_chat:says_more_than_no", **limits
    )
    assert (result["outcome"], len(chat.requests)) == (outcome, calls)
    assert result["responses"] == []
    assert result["terminal_response_id"] is None
    assert (result["answer"], result["reward"]) == (None, 0.0)


@pytest.mark.requirement("I19")
def test_the_number_of_model_calls_is_bounded() -> None:
    chat = Chat([look('{"at": 1}')] * 9)
    result = chat.episode(max_model_calls=3)
    assert (result["outcome"], len(chat.requests)) == ("max_model_calls", 3)
    assert len(result["responses"]) == 3


LONG = '{"at": "' + "x" * 60 + '"}'


@pytest.mark.requirement("I19")
def test_a_prompt_over_the_limit_is_compacted_and_measured_again() -> None:
    chat = Chat([look(LONG), look(LONG), answer("yes")])
    result = chat.episode(context_history={"max_prompt_tokens": 100})

    assert result["outcome"] == "answered"
    assert len(chat.measured) == 4
    assert [HIDDEN in results_sent(body) for body in chat.measured] == [False, False, False, True]
    for request in chat.requests:
        body = {key: value for key, value in request.items() if key != "seed"}
        measured = [{k: v for k, v in m.items() if k != "seed"} for m in chat.measured]
        assert body in measured


@pytest.mark.requirement("I19")
@pytest.mark.parametrize(
    ("history", "measurements", "calls"),
    [
        ({"max_prompt_tokens": 100, "on_exceed": "stop"}, 2, 1),
        ({"max_prompt_tokens": 60, "on_exceed": "compact"}, 4, 2),
    ],
)
def test_a_prompt_that_stays_too_long_ends_with_a_name(
    history: dict[str, Any], measurements: int, calls: int
) -> None:
    chat = Chat([look(LONG), look(LONG), answer("yes")])
    task = {"question": "q" * 50, "answer": "yes"}
    result = chat.episode(task, context_history=history)
    assert result["outcome"] == "context_exceeded"
    assert result["answer"] is None
    assert len(chat.measured) == measurements
    assert len(result["responses"]) == len(chat.requests) == calls


@pytest.mark.requirement("I16")
def test_a_broken_connection_closes_the_client_and_is_not_retried() -> None:
    chat = Chat([look('{"at": 1}'), httpx.ReadError("gone"), answer("yes")])
    with pytest.raises(openai.APIConnectionError):
        chat.episode(max_response_retries=3)
    assert len(chat.requests) == 2
    assert chat.closed


@pytest.mark.parametrize("arguments", ['{"at": ', "[1]"])
def test_the_model_reads_what_was_wrong_with_its_arguments(arguments: str) -> None:
    chat = Chat([look(arguments), answer("yes")])
    chat.episode()
    assert results_sent(chat.requests[1])[0].startswith("error: the arguments are not")


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "environment"),
        ({"environment": "nowhere"}, "harness.options.environment: 'nowhere'"),
        ({"environment": "no_such_module:x"}, "cannot load 'no_such_module:x'"),
        ({"environment": "json:__name__"}, "not callable"),
        ({"environment": "json:loads", "max_turns": 3}, "max_turns"),
    ],
)
def test_unusable_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        check_options(options)
