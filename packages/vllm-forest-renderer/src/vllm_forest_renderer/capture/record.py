"""From a finished generation to a delta and its record.

Guarantees: pure; the delta is the new prompt tokens followed by the generated ones, the record's
lengths and digests are computed from exactly these tokens, and a continuation inherits exactly
its parent's `cum_len`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.items import extend, output_evidence
from forest_schema.media import media_digest
from forest_schema.records import CallRecord, ReplaySummary, SamplingRecord, TensorRef, WeightSpan
from forest_schema.routes import ROUTES, RouteInfo
from forest_schema.shards import LOGPROBS, TOKENS, Delta
from forest_schema.version import features_of
from numpy.typing import NDArray

from vllm_forest_renderer.capture.generation import completion_status
from vllm_forest_renderer.context import Call
from vllm_forest_renderer.media.items import media_tensors


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets, as far as the record depends on it."""

    response_id: str
    output: Sequence[Mapping[str, Any]]
    """The assistant message of a Chat choice, or the items of a Responses response."""
    finish_reason: str | None


def build_delta(call: Call, routes: NDArray[Any] | None = None) -> dict[str, Any]:
    """Tensors of a finished call: `tokens` int32 `[delta_len]`, `logprobs` float32
    `[generated_len]`, `media.*` and `routes` where they are captured.
    """
    assert call.generation is not None
    generation = call.generation
    delta = {
        TOKENS: np.array([*call.tail_tokens, *generation.tokens], dtype="<i4"),
        LOGPROBS: np.array(generation.logprobs, dtype="<f4"),
        **media_tensors(call.media),
    }
    return delta if routes is None else delta | {ROUTES: routes}


def replay_summary(call: Call, answer: Answer) -> ReplaySummary:
    """What a later request is compared with: the request's items and the generated turn."""
    history = extend(call.history, answer.output, api=call.api)
    count = len(history.items)
    inherited = (
        call.predecessor.parent.replay.source_item_count if call.predecessor is not None else 0
    )
    return ReplaySummary(
        source_item_count=count,
        source_digest=history.digests[count],
        equivalence_digest=history.equivalence_digests[count],
        render_option_digest=call.render_option_digest or "",
        reasoning=history.reasoning(inherited, count),
    )


def build_record(
    call: Call,
    *,
    delta: Delta,
    ref: TensorRef,
    replay: ReplaySummary,
    answer: Answer,
    sampling: SamplingRecord,
    weight_spans: tuple[WeightSpan, ...],
    committed_at: float,
    routes: RouteInfo | None = None,
) -> CallRecord:
    """The record of a finished call whose delta is stored at `ref`."""
    assert call.generation is not None
    assert call.call_id is not None
    parent = call.predecessor.parent if call.predecessor is not None else None
    tokens = delta[TOKENS]
    media = tuple(item.described for item in call.media)
    inherited = parent.chain_digest if parent is not None else EMPTY_CHAIN
    prev_len = parent.cum_len if parent is not None else 0
    return CallRecord(
        required_features=features_of(delta),
        attempt_id=call.attempt_id,
        call_id=call.call_id,
        capture_key=call.attempt_id,
        order=call.order,
        api=call.api,
        model=call.model,
        parent_call_id=parent.call_id if parent is not None else None,
        root_reason=call.root_reason if parent is None else None,
        used_null_empty_equivalence=call.predecessor is not None
        and call.predecessor.used_null_empty_equivalence,
        prev_len=prev_len,
        delta_len=len(tokens),
        cum_len=prev_len + len(tokens),
        generated_len=len(call.generation.tokens),
        chain_digest=chain_digest(inherited, tokens),
        delta=ref,
        media=media,
        media_digest=media_digest(media) if media else None,
        status=completion_status(answer.finish_reason),
        finish_reason=answer.finish_reason,
        stop_reason=call.generation.stop_reason,
        replay=replay,
        output=output_evidence(answer.response_id, answer.output, api=call.api),
        sampling=sampling,
        weight_spans=weight_spans,
        routes=routes,
        cached_prompt_tokens=call.generation.cached_prompt_tokens,
        started_at=call.started_at,
        committed_at=committed_at,
    )
