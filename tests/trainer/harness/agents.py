"""Environments and hooks that the agent's options name in tests."""

from typing import Any


class Counter:
    """A tool `add` that returns a running number; the reward is 1 for the right final number."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.start = task["start"]
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"start {self.start}"}]

    @property
    def tools(self) -> list[dict[str, Any]]:
        function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
        return [{"type": "function", "function": function}]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        self.calls.append((name, arguments))
        return f"result {len(self.calls)}"

    def reward(self, answer: str | None) -> float:
        return float(answer == "done")


def no_bad_words(response: Any) -> bool:
    return "bad" not in (response.choices[0].message.content or "")


NOT_CALLABLE = 3
