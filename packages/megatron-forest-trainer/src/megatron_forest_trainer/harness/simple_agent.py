"""`simple_agent_with_compaction`: a tool-using agent that hides old tool results.

Guarantees: an ordinary client of the Chat Completions API. What it returns holds every accepted
response in order, however much of it later model calls no longer saw; a rejected response enters
neither the history nor the result. Expected ends have a name (`Outcome`) and are no errors; an
ambiguous transport error closes the client and is never retried here.
"""

import inspect
import json
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any, cast

import msgspec
import openai

from megatron_forest_trainer.harness.compaction import hide_old_results, tool_rounds
from megatron_forest_trainer.harness.environment import Environment, Message, OptionsError, load


class Outcome(StrEnum):
    """How an episode ended."""

    ANSWERED = "answered"
    """The model answered without calling a tool."""
    MAX_MODEL_CALLS = "max_model_calls"
    """`harness.max_model_calls` were made."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The next prompt would be longer than `context_history.max_prompt_tokens`."""
    NO_ACCEPTED_RESPONSE = "no_accepted_response"
    """`select_response` rejected the response and all of its retries."""


class ContextHistory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `context_history` section of the configuration."""

    keep_rounds: int | None = None
    max_prompt_tokens: int | None = None
    on_exceed: str = "compact"


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`harness.options`, with the harness limits and `context_history` beside them."""

    environment: str
    """`module:name` of a callable: task -> `Environment`."""
    select_response: str | None = None
    """`module:name` of a function: chat completion -> bool; false rejects it and resamples."""
    max_model_calls: int = 64
    """Model calls of the episode, rejected ones included."""
    max_response_retries: int = 0
    """Rejected responses in a row after which the episode ends."""
    context_history: ContextHistory = ContextHistory()


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that cannot work, before the first rollout. Raises `OptionsError`."""
    _read_options(options)


async def simple_agent_with_compaction(
    client: openai.AsyncOpenAI,
    task: dict[str, Any],
    *,
    model: str,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Run one episode; returns the ordinary result with `responses`, `outcome` and `reward`.

    `sampling` are fields of the chat request; each model call gets its own seed from
    `sampling["seed"]`, so that equal weights repeat an episode. Raises `OptionsError` and what
    the client raises.
    """
    settings, make_environment, select = _read_options(options)
    episode = _Episode(client, make_environment(task), settings, select, model, sampling)
    try:
        outcome, answer = await episode.run()
    except openai.APIConnectionError:
        # The server may have generated: only the owner of the attempt can tell.
        await client.close()
        raise
    return {
        "responses": episode.responses,
        "terminal_response_id": episode.responses[-1]["id"] if episode.responses else None,
        "reward": float(await _result(episode.environment.reward(answer))),
        "outcome": outcome.value,
        "answer": answer,
        "model_calls": episode.calls,
    }


simple_agent_with_compaction.check_options = check_options  # type: ignore[attr-defined]


class _Episode:
    """State of one episode."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        environment: Environment,
        options: AgentOptions,
        select: Callable[..., Any] | None,
        model: str,
        sampling: dict[str, Any],
    ) -> None:
        self.environment = environment
        self.responses: list[dict[str, Any]] = []
        self.calls = 0
        self._client = client
        self._options = options
        self._select = select
        self._request = {"model": model, **sampling}
        if environment.tools:
            self._request["tools"] = environment.tools
        self._seed = sampling.get("seed")
        self._history: list[Message] = list(environment.messages)
        self._keep_rounds = options.context_history.keep_rounds

    async def run(self) -> tuple[Outcome, str | None]:
        """The outcome and the answer, None without one."""
        while True:
            messages = await self._context()
            if messages is None:
                return Outcome.CONTEXT_EXCEEDED, None
            response = await self._generate(messages)
            if isinstance(response, Outcome):
                return response, None
            self.responses.append(response.model_dump(mode="json"))
            message = response.choices[0].message
            self._history.append(_as_input(message))
            if not message.tool_calls:
                return Outcome.ANSWERED, message.content
            for call in message.tool_calls:
                self._history.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": await self._use_tool(call.function),
                    }
                )

    async def _context(self) -> list[Message] | None:
        """The messages of the next call; None where they stay too long."""
        limit = self._options.context_history.max_prompt_tokens
        messages = hide_old_results(self._history, self._keep_rounds)
        while limit is not None and await self._measure(messages) > limit:
            rounds = len(tool_rounds(self._history))
            visible = rounds if self._keep_rounds is None else min(rounds, self._keep_rounds)
            if self._options.context_history.on_exceed == "stop" or not visible:
                return None
            self._keep_rounds = visible // 2
            messages = hide_old_results(self._history, self._keep_rounds)
        return messages

    async def _measure(self, messages: list[Message]) -> int:
        """Tokens of the prompt that `messages` would make, from the server's `/measure`."""
        body = {name: value for name, value in self._request.items() if name != "extra_body"}
        body |= self._request.get("extra_body", {})
        answer = await self._client.post(
            "/measure", body={**body, "messages": messages}, cast_to=object
        )
        return int(answer["count"])  # type: ignore[index]

    async def _generate(self, messages: list[Message]) -> Any:
        """An accepted chat completion, or the outcome that ends the episode."""
        for _ in range(1 + self._options.max_response_retries):
            if self.calls >= self._options.max_model_calls:
                return Outcome.MAX_MODEL_CALLS
            request = dict(self._request)
            if self._seed is not None:
                # A retry of the same request must not repeat the rejected sample.
                request["seed"] = random.Random(f"{self._seed}/{self.calls}").getrandbits(31)
            self.calls += 1
            response = await self._client.chat.completions.create(
                messages=cast(Any, messages), **request
            )
            if self._select is None or await _result(self._select(response)):
                return response
        return Outcome.NO_ACCEPTED_RESPONSE

    async def _use_tool(self, function: Any) -> str:
        try:
            arguments = json.loads(function.arguments)
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        return str(await _result(self.environment.call(function.name, arguments)))


def _as_input(message: Any) -> Message:
    """A generated message in the form in which it is sent back."""
    sent: Message = {"role": "assistant", "content": message.content}
    reasoning = getattr(message, "reasoning", None)
    if reasoning:
        sent["reasoning"] = reasoning
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return sent


def _read_options(
    options: dict[str, Any],
) -> tuple[AgentOptions, Callable[..., Environment], Callable[..., Any] | None]:
    try:
        settings = msgspec.convert(options, AgentOptions)
    except msgspec.ValidationError as error:
        raise OptionsError(f"harness.options: {error}") from error
    select = settings.select_response
    return (
        settings,
        load("environment", settings.environment),
        load("select_response", select) if select else None,
    )


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
