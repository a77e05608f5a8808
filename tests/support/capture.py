"""A real ledger over a real store, and calls captured into it without an engine.

The calls carry random tokens and exactly the coordinates that the serving side computes.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forest_schema import (
    CallRecord,
    CompletionStatus,
    OutputEvidence,
    ReplaySummary,
    SamplingRecord,
    TensorRef,
)
from forest_schema.control import OpenAttempt
from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.shards import LOGPROBS, TOKENS, Delta
from vllm_forest_renderer.ledger import Intent, Ledger
from vllm_forest_renderer.store import SafetensorsSink

PARTITION = "run1-step0"


def make_delta(delta_len: int = 12, generated_len: int = 5, *, seed: int | None = None) -> Delta:
    """Random tokens and log-probabilities."""
    random = np.random.default_rng(seed)
    return {
        TOKENS: random.integers(0, 150_000, delta_len, dtype=np.int32),
        LOGPROBS: -random.random(generated_len, dtype=np.float32),
    }


def make_record(
    attempt_id: str,
    intent: Intent,
    ref: TensorRef,
    delta: Delta,
    parent: CallRecord | None = None,
    **changes: Any,
) -> CallRecord:
    """The record that continues `parent` by `delta`; `changes` replace fields."""
    prev_len = parent.cum_len if parent else 0
    fields: dict[str, Any] = {
        "attempt_id": attempt_id,
        "call_id": intent.call_id,
        "capture_key": attempt_id,
        "order": intent.order,
        "api": "chat",
        "model": "tiny",
        "parent_call_id": parent.call_id if parent else None,
        "root_reason": None if parent else "no_match",
        "prev_len": prev_len,
        "delta_len": len(delta[TOKENS]),
        "cum_len": prev_len + len(delta[TOKENS]),
        "generated_len": len(delta[LOGPROBS]),
        "chain_digest": chain_digest(parent.chain_digest if parent else EMPTY_CHAIN, delta[TOKENS]),
        "delta": ref,
        "status": CompletionStatus.COMPLETED,
        "finish_reason": "stop",
        "replay": ReplaySummary(
            source_item_count=2,
            source_digest="1" * 32,
            equivalence_digest="2" * 32,
            render_option_digest="3" * 32,
        ),
        "output": OutputEvidence(response_id=f"chatcmpl-{intent.order}", fingerprint="4" * 32),
        "sampling": SamplingRecord(temperature=1.0),
        "weight_spans": (),
        "started_at": intent.started_at,
        "committed_at": time.time(),
    }
    return CallRecord(**(fields | changes))


@dataclass
class Capture:
    """One process's view of a store directory and its ledger."""

    directory: Path
    sink: SafetensorsSink
    ledger: Ledger

    @classmethod
    async def open(cls, directory: Path) -> "Capture":
        """Open `directory`, as a server that starts."""
        sink = SafetensorsSink(directory / "store")
        return cls(directory, sink, await Ledger.open(directory / "ledger.sqlite", sink))

    async def shutdown(self) -> None:
        """As a server that stops."""
        await self.ledger.shutdown()
        await self.sink.shutdown()

    async def attempt(self, partition: str = PARTITION, **changes: Any) -> str:
        """A fresh attempt's id."""
        body = OpenAttempt(
            **({"rollout_id": "rollout", "group_id": "group", "partition": partition} | changes)
        )
        return (await self.ledger.open_attempt(body)).attempt_id

    async def admit(self, attempt_id: str) -> Intent:
        """A call that is admitted and not finished."""
        return await self.ledger.record_intent(attempt_id, api="chat", model="tiny")

    async def finish(
        self,
        attempt_id: str,
        intent: Intent,
        parent: CallRecord | None = None,
        *,
        delta: Delta | None = None,
        **changes: Any,
    ) -> CallRecord:
        """Stage and commit an admitted call."""
        delta = make_delta() if delta is None else delta
        ref = await self.sink.put(intent.partition, intent.call_id, delta)
        record = make_record(attempt_id, intent, ref, delta, parent, **changes)
        await self.ledger.commit(record)
        return record

    async def call(
        self, attempt_id: str, parent: CallRecord | None = None, **changes: Any
    ) -> CallRecord:
        """A whole call: admitted, staged, committed."""
        return await self.finish(attempt_id, await self.admit(attempt_id), parent, **changes)

    async def settled(self, partition: str = PARTITION) -> list[str]:
        """`files` after the deletions that run behind a close."""
        while self.ledger._background:
            await asyncio.wait(self.ledger._background)
            await asyncio.sleep(0)  # let the finished ones be forgotten
        return self.files(partition)

    def files(self, partition: str = PARTITION) -> list[str]:
        """Names in the partition's folder."""
        folder = self.directory / "store" / partition
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
