"""From row plans to arrays.

Guarantees: a row is the exact concatenation of its path's deltas; the loss mask is true at owned
generated tokens only; captured log-probabilities lie on their tokens and are 0 elsewhere. Sizes
that contradict the records raise `IntegrityError`; nothing is cut or filled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from forest_schema import CallRecord, MediaOccurrence, Reason, RouteInfo
from forest_schema.media import MediaError
from forest_schema.shards import LOGPROBS, TOKENS
from numpy.typing import NDArray

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.media import row_media
from megatron_forest_trainer.core.routes import call_routes, join_routes
from megatron_forest_trainer.core.types import DeltaReader, PathCall, Row, RowPlan


def assemble(plan: RowPlan, reader: DeltaReader) -> Row:
    """The arrays of `plan`, read through `reader`."""
    logprobs_T = np.zeros(plan.length, dtype=np.float32)
    loss_mask_T = np.zeros(plan.length, dtype=np.bool_)
    deltas: list[NDArray[np.int32]] = []
    routes: list[tuple[RouteInfo, NDArray[Any]] | None] = []
    images: list[tuple[Sequence[MediaOccurrence], Mapping[str, NDArray[Any]]]] = []
    for call, span in zip(plan.path, plan.spans, strict=True):
        delta = reader.read(call.delta)
        tokens, logprobs = delta_arrays(call, delta)
        images.append((call.media, delta))
        routes.append(call_routes(call, delta))
        deltas.append(tokens)
        logprobs_T[span.start : span.end] = logprobs
        if span.owned:
            loss_mask_T[span.start : span.end] = True
    tokens_T = np.concatenate(deltas, dtype=np.int32)
    if len(tokens_T) != plan.length:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"row {plan.row_id}: {len(tokens_T)} tokens where the plan says {plan.length}",
        )
    try:
        media = row_media(images)
    except MediaError as error:
        raise IntegrityError(Reason.DIGEST_MISMATCH, f"row {plan.row_id}: {error}") from error
    return Row(
        plan=plan,
        tokens_T=tokens_T,
        loss_mask_T=loss_mask_T,
        logprobs_T=logprobs_T,
        media=media,
        routes_TLK=join_routes(plan.length, routes, row_id=plan.row_id),
    )


def delta_arrays(
    call: CallRecord | PathCall, delta: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens `[delta_len]` and log-probabilities `[generated_len]` of a call's delta."""
    tokens, logprobs = delta.get(TOKENS), delta.get(LOGPROBS)
    if tokens is None or logprobs is None:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"call {call.call_id}: the delta holds {sorted(delta)}, not {TOKENS} and {LOGPROBS}",
        )
    if tokens.shape != (call.delta_len,) or logprobs.shape != (call.generated_len,):
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"call {call.call_id}: {tokens.shape[0]} tokens and {logprobs.shape[0]} "
            f"log-probabilities where the record says {call.delta_len} and {call.generated_len}",
        )
    return tokens, logprobs
