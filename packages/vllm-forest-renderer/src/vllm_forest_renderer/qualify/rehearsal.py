"""An attempt without engine, ledger and store: the renderer's half of capturing, in memory.

Guarantees: every request goes through the capture hook that serves requests, with the same call
state, and leaves the record that the server would commit; nothing is written anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from forest_schema.digests import delta_digest
from forest_schema.items import normalize_chat
from forest_schema.records import CallRecord, SamplingRecord, TensorRef

from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.generation import Generation
from vllm_forest_renderer.capture.record import Answer, build_delta, build_record, replay_summary
from vllm_forest_renderer.context import CURRENT, Call
from vllm_forest_renderer.media.cache import Tensors
from vllm_forest_renderer.media.items import identified
from vllm_forest_renderer.media.retained import Captured
from vllm_forest_renderer.resolution.source_history import SourceHistoryResolver

MODEL = "rehearsal"


class Rehearsal:
    """One conversation on a renderer without engine."""

    def __init__(self, renderer: Any, chat_template: str | None) -> None:
        self._renderer = renderer
        self._params = compat.chat_params(chat_template, None)
        self._histories: dict[str, list[int]] = {}
        self._stored: dict[str, Tensors] = {}
        self.records: list[CallRecord] = []
        self.deltas: list[dict[str, Any]] = []
        """Tensors that each call would store."""

    async def request(self, messages: Sequence[Mapping[str, Any]]) -> Call:
        """Render a request as the server does. Raises `ForestError`, and what vLLM raises."""
        call = Call(
            attempt_id="att",
            api="chat",
            model=MODEL,
            history=normalize_chat(messages),
            calls=tuple(self.records),
            resolver=SourceHistoryResolver(),
            history_tokens=self._history,
            stored_media=self._media,
            admit=_never,
            around_generation=_never,
        )
        before = CURRENT.set(call)
        try:
            await self._renderer.render_chat_async([list(messages)], self._params)
        finally:
            CURRENT.reset(before)
        return call

    def answer(self, call: Call, words: str, generated: Sequence[int]) -> dict[str, Any]:
        """Finish a call as if the model had generated `generated`; the message that came back."""
        message = {"role": "assistant", "content": words}
        call.call_id = f"call_{len(self.records)}"
        call.generation = Generation(
            tokens=list(generated), logprobs=[0.0] * len(generated), finish_reason="stop"
        )
        call.media = identified(call.media)
        answer = Answer(f"answer-{call.call_id}", [message], "stop")
        delta = build_delta(call)
        ref = TensorRef(
            store="", partition="", shard="", key=call.call_id, digest=delta_digest(delta)
        )
        record = build_record(
            call,
            delta=delta,
            ref=ref,
            replay=replay_summary(call, answer),
            answer=answer,
            sampling=SamplingRecord(temperature=1.0),
            weight_spans=(),
            committed_at=0.0,
        )
        self._histories[call.call_id] = [*(call.prompt_tokens or ()), *generated]
        self._stored.update({item.described.blob: item.arrays for item in call.media})
        self.records.append(record)
        self.deltas.append(delta)
        return message

    async def _history(self, record: CallRecord, calls: tuple[CallRecord, ...]) -> list[int]:
        return self._histories[record.call_id]

    async def _media(self, captured: Sequence[Captured]) -> list[Tensors]:
        return [self._stored[old.occurrence.blob] for old in captured]


def _never(*_: Any) -> NoReturn:
    raise AssertionError("a rehearsal does not generate")
