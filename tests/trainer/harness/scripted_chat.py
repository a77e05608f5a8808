"""A Chat Completions endpoint that answers from a list, behind the real `openai` client."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from megatron_forest_trainer.harness.simple_agent import simple_agent_with_compaction

LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}


class Shelf:
    """An environment: `look` says what was asked for and how many looks there were."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._looks = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self._task["question"]}]

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [LOOK]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        self._looks += 1
        return f"{name} {arguments.get('at')} {self._looks}"

    async def reward(self, answer: str | None) -> float:
        return 1.0 if answer == self._task["answer"] else 0.0


def says_more_than_no(response: Any) -> bool:
    """A `select_response` hook."""
    return response.choices[0].message.content != "no"


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    """An assistant message without tool calls."""
    return {"role": "assistant", "content": text, "reasoning": reasoning}


def look(at: str, reasoning: str | None = None) -> dict[str, Any]:
    """An assistant message that looks at `at`, which is put into the arguments as it stands."""
    call = {
        "id": f"call-{at}",
        "type": "function",
        "function": {"name": "look", "arguments": at},
    }
    return {"role": "assistant", "content": None, "reasoning": reasoning, "tool_calls": [call]}


@dataclass
class Chat:
    """The endpoint: `script` holds assistant messages, or exceptions that break the connection."""

    script: Sequence[dict[str, Any] | Exception]
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the generation requests, in order."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the measurements, in order."""
    closed: bool = False
    """The client was closed when the episode was over."""

    def episode(self, task: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        """Run the agent against the endpoint."""
        return asyncio.run(self._episode(task or {"question": "what?", "answer": "yes"}, options))

    async def _episode(self, task: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        async with openai.AsyncOpenAI(
            base_url="http://server/v1/forest/att_1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=httpx.MockTransport(self._answer)),
        ) as client:
            try:
                return await simple_agent_with_compaction(
                    client,
                    task,
                    model="tiny",
                    sampling={"temperature": 1.0, "seed": options.pop("seed", 5)},
                    options={"environment": f"{__name__}:Shelf", **options},
                )
            finally:
                self.closed = client.is_closed()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/v1/forest/att_1/measure":
            self.measured.append(body)
            size = sum(len(message["content"] or "") for message in body["messages"])
            return httpx.Response(200, json={"count": size})
        assert request.url.path == "/v1/forest/att_1/chat/completions"
        number = len(self.requests)
        self.requests.append(body)
        message = self.script[number]
        if isinstance(message, Exception):
            raise message
        completion = {
            "id": f"response-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": "tiny",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        return httpx.Response(200, json=completion)
