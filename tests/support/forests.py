"""Captured forests made by hand: records, shards and receipts with correct digests.

A `Forest` plays the serving side without an engine. Tokens are random but fixed by the seed, so
that two calls never share tokens by accident; everything else is what the server would have
written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from forest_schema import (
    CallRecord,
    CompletionStatus,
    FailureRecord,
    Receipt,
    ReplaySummary,
    RouteInfo,
    SamplingRecord,
    TensorRef,
    WeightSpan,
)
from forest_schema.digests import EMPTY_CHAIN, chain_digest, delta_digest
from forest_schema.items import output_evidence
from forest_schema.routes import ROUTES, route_dtype
from forest_schema.shards import LOGPROBS, SHARD_SUFFIX, TOKENS, ShardReader, encode_shard
from forest_schema.version import features_of
from hypothesis import strategies as st
from numpy.typing import NDArray


class BytesSource:
    """A shard in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> memoryview:
        return self._data[offset : offset + length]


class MemoryStore:
    """A reader of one shard in memory, with the real shard format and digest check."""

    def __init__(self, data: bytes) -> None:
        self._shard = ShardReader(BytesSource(data), shard="shard0")

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        return self._shard.read(ref)


@dataclass
class Forest:
    """An attempt under construction."""

    attempt_id: str = "att_0"
    rollout_id: str = "r0"
    group_id: str = "g0"
    store: str = "store0"
    partition: str = "run-step0"
    seed: int = 0
    vocab: int = 50_000
    mixture: tuple[int, int, int] | None = None
    """(layers, experts per token, experts) of the model whose routes are captured."""
    calls: list[CallRecord] = field(default_factory=list)
    deltas: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)
    outputs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Chat message, or Responses items, that each call generated."""
    failures: list[FailureRecord] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    closed: bool = True

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def call(
        self,
        parent: CallRecord | None = None,
        *,
        prompt: int = 3,
        generated: int = 4,
        text: str | None = None,
        output: Sequence[Mapping[str, Any]] | None = None,
        api: str = "chat",
        status: CompletionStatus = CompletionStatus.COMPLETED,
        finish_reason: str | None = "stop",
        sampling: SamplingRecord | None = None,
        tokens: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        call_id: str | None = None,
        routed: bool = True,
    ) -> CallRecord:
        """Capture one call: `prompt` new prompt tokens and `generated` generated ones.

        `routed` captures its routes too, where the forest has a `mixture`.
        """
        order = len(self.calls)
        call_id = call_id or f"{self.attempt_id}-c{order}"
        if tokens is None:
            tokens = self._random.integers(0, self.vocab, prompt + generated).tolist()
        if logprobs is None:
            logprobs = (-self._random.exponential(1.0, generated)).tolist()
        delta = {
            TOKENS: np.asarray(tokens, dtype="<i4"),
            LOGPROBS: np.asarray(logprobs, dtype="<f4"),
        }
        if output is None:
            text = f"answer {order}" if text is None else text
            output = [{"role": "assistant", "content": text}]
        prev_len = 0 if parent is None else parent.cum_len
        routes = None
        if self.mixture is not None and routed:
            routes, delta[ROUTES] = self._routes(prev_len, prev_len + len(delta[TOKENS]))
        parent_chain = EMPTY_CHAIN if parent is None else parent.chain_digest
        record = CallRecord(
            required_features=features_of(delta),
            attempt_id=self.attempt_id,
            call_id=call_id,
            capture_key=self.attempt_id,
            order=order,
            api=api,
            model="tiny",
            parent_call_id=None if parent is None else parent.call_id,
            root_reason="no_match" if parent is None else None,
            prev_len=prev_len,
            delta_len=len(delta[TOKENS]),
            cum_len=prev_len + len(delta[TOKENS]),
            generated_len=len(delta[LOGPROBS]),
            chain_digest=chain_digest(parent_chain, delta[TOKENS]),
            delta=TensorRef(
                store=self.store,
                partition=self.partition,
                shard="shard0",
                key=call_id,
                digest=delta_digest(delta),
            ),
            status=status,
            finish_reason=finish_reason,
            replay=ReplaySummary(
                source_item_count=1,
                source_digest=EMPTY_CHAIN,
                equivalence_digest=EMPTY_CHAIN,
                render_option_digest=EMPTY_CHAIN,
            ),
            output=output_evidence(f"{self.attempt_id}-resp{order}", output, api=api),
            sampling=sampling or SamplingRecord(temperature=1.0),
            weight_spans=(WeightSpan(version="w0", start=0, end=len(delta[LOGPROBS])),),
            routes=routes,
            started_at=float(order),
            committed_at=order + 0.5,
        )
        self.calls.append(record)
        self.deltas[call_id] = delta
        self.outputs[call_id] = [dict(item) for item in output]
        return record

    def _routes(self, prev_len: int, cum_len: int) -> tuple[RouteInfo, NDArray[Any]]:
        assert self.mixture is not None
        layers, top_k, experts = self.mixture
        first = max(prev_len - 1, 0)
        rows = cum_len - 1 - first
        scores = self._random.random((rows, layers, experts))
        routes = np.argsort(scores)[..., :top_k].astype(route_dtype(experts))
        info = RouteInfo(first=first, rows=rows, layers=layers, top_k=top_k, experts=experts)
        return info, routes

    def response(self, record: CallRecord, *, with_id: bool = True) -> dict[str, Any]:
        """The response object that the client got for `record`."""
        response: dict[str, Any] = {"id": record.output.response_id} if with_id else {}
        if record.api == "chat":
            return response | {"choices": [{"message": self.outputs[record.call_id][0]}]}
        return response | {"output": self.outputs[record.call_id]}

    def result(self, *records: CallRecord, with_ids: bool = True) -> dict[str, Any]:
        """A harness's result that accepts `records` in this order."""
        return {"responses": [self.response(r, with_id=with_ids) for r in records], "reward": 1.0}

    def receipt(self) -> Receipt:
        """What closing the attempt returns."""
        return Receipt(
            store=self.store,
            partition=self.partition,
            attempt_id=self.attempt_id,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            closed=self.closed,
            calls=tuple(self.calls),
            failures=tuple(self.failures),
            pending=tuple(self.pending),
        )

    def shard(self) -> bytes:
        """The sealed shard's bytes."""
        return encode_shard(self.deltas, store=self.store, partition=self.partition)

    def reader(self) -> MemoryStore:
        """A reader of the sealed shard."""
        return MemoryStore(self.shard())

    def write(self, root: Path) -> Path:
        """Write the sealed shard below the store folder `root`; returns its file."""
        folder = root / self.partition
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"shard0{SHARD_SUFFIX}"
        path.write_bytes(self.shard())
        return path

    def context(self, record: CallRecord) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The slow truth about one call: all tokens up to its end, and its log-probabilities.

        Tokens are `[cum_len]`, log-probabilities `[generated_len]`.
        """
        by_id = {call.call_id: call for call in self.calls}
        parts = []
        current: CallRecord | None = record
        while current is not None:
            parts.append(self.deltas[current.call_id][TOKENS])
            current = by_id.get(current.parent_call_id or "")
        return np.concatenate(parts[::-1]), self.deltas[record.call_id][LOGPROBS]


@st.composite
def forests(draw: st.DrawFn, *, max_calls: int = 10, unique_texts: bool = True) -> Forest:
    """Random captured forests: chains, branches, several roots, empty deltas of prompt tokens."""
    forest = Forest(seed=draw(st.integers(0, 2**32 - 1)))
    for index in range(draw(st.integers(1, max_calls))):
        parents: list[CallRecord | None] = [None, *forest.calls]
        parent = draw(st.sampled_from(parents))
        forest.call(
            parent,
            prompt=draw(st.integers(1 if parent is None else 0, 4)),
            generated=draw(st.integers(1, 5)),
            text=f"answer {index}" if unique_texts else draw(st.sampled_from(["yes", "no"])),
            finish_reason=draw(st.sampled_from(["stop", "stop", "stop", "length"])),
        )
    return forest


@st.composite
def selected_forests(draw: st.DrawFn, *, max_calls: int = 10) -> tuple[Forest, list[CallRecord]]:
    """A random forest with a random nonempty closed selection in a random order."""
    forest = draw(forests(max_calls=max_calls))
    by_id = {call.call_id: call for call in forest.calls}
    chosen: dict[str, CallRecord] = {}
    for call in draw(st.lists(st.sampled_from(forest.calls), min_size=1, unique_by=id)):
        current: CallRecord | None = call
        while current is not None:
            chosen[current.call_id] = current
            current = by_id.get(current.parent_call_id or "")
    return forest, draw(st.permutations(list(chosen.values())))
