"""One attempt as a test sees it: calls through the stock client, and what each left behind."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
from forest_schema import CallRecord
from forest_schema.shards import LOGPROBS, TOKENS

from tests.support.engine import EngineServer, worker_prompts

END = "<|im_end|>"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            },
        },
    }
]


class Episode:
    """An open attempt, its client and its engine."""

    def __init__(self, server: EngineServer, tokenizer: Any, prompts_file: Path) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.attempt = server.open_attempt()
        self.client = openai.OpenAI(
            base_url=server.base_url(self.attempt), api_key="unused", max_retries=0
        )
        self.prompts_file = prompts_file
        self.served: list[int] = []
        """Prompt ids that the engine process received for the last call."""

    def ids(self, text: str) -> list[int]:
        """Canonical token ids."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def spell(self, text: str) -> list[int]:
        """A non-canonical tokenization: one token per character (ASCII)."""
        return [token for character in text for token in self.ids(character)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        script: Sequence[int] | None = None,
        *,
        force: bool = True,
        **options: Any,
    ) -> tuple[dict[str, Any], CallRecord]:
        """One call: the assistant message that came back, and its record."""
        extra: dict[str, Any] = dict(options.pop("extra_body", {}))
        if script is not None and force:
            extra["vllm_xargs"] = {"force": list(script)}
            options.setdefault("max_tokens", len(script))
        seen = len(worker_prompts(self.prompts_file))
        answer = self.client.chat.completions.create(
            model="tiny",
            messages=list(messages),  # type: ignore[arg-type]
            extra_body=extra,
            **{"max_tokens": 4, **options},
        )
        # A preempted request enters the engine's batch again.
        self.served = worker_prompts(self.prompts_file, seen)[0]
        message = json.loads(answer.choices[0].message.to_json())
        return message, self.record(answer.id)

    def record(self, response_id: str) -> CallRecord:
        """The committed call with this response id."""
        (found,) = [
            call
            for call in self.server.receipt(self.attempt).calls
            if call.output.response_id == response_id
        ]
        return found

    def delta(self, call: CallRecord) -> tuple[list[int], list[float]]:
        """Stored tokens and log-probabilities of one call."""
        sink = self.server.app.state.forest.control.sink
        stored = self.server.run(sink.get(call.delta))
        return stored[TOKENS].tolist(), stored[LOGPROBS].tolist()

    def history(self, call: CallRecord) -> list[int]:
        """Every token up to the end of `call`, from the stored deltas of its chain."""
        calls = {record.call_id: record for record in self.server.receipt(self.attempt).calls}
        chain = [call]
        while chain[-1].parent_call_id is not None:
            chain.append(calls[chain[-1].parent_call_id])
        return [token for member in reversed(chain) for token in self.delta(member)[0]]

    def template(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
        """What the template renders, generation prompt included."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **keywords
        )
        return text

    def tail(self, parent: CallRecord) -> list[int]:
        """What the engine was given behind the parent's history, which must come first."""
        history = self.history(parent)
        assert self.served[: len(history)] == history
        return self.served[len(history) :]

    def tail_text(self, parent: CallRecord) -> str:
        """Text of `tail`."""
        text: str = self.tokenizer.decode(self.tail(parent))
        return text


def think(episode: Episode, reasoning: str, answer: list[int]) -> list[int]:
    """A scripted turn with exposed reasoning."""
    return [*episode.ids(f"<think>\n{reasoning}\n</think>\n\n"), *answer, *episode.ids(END)]
