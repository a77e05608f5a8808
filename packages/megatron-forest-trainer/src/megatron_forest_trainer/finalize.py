"""From a receipt and a harness's result to verified rows, or to a mask with its reason.

Guarantees: all or nothing per logical rollout; a masked rollout has no rows and one `Reason`; rows
are returned only after every selected delta was read, its digest and the token chain verified, its
log-probabilities checked and its images authenticated; data that contradicts itself raises and
never becomes a mask; the receipt is left as it is, so that unselected records stay available for
cleanup.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from forest_schema import CallRecord, FailureRecord, Reason, Receipt, SamplingRecord
from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.media import MediaError
from forest_schema.version import DIGEST_VERSION, SchemaError, check_version
from numpy.typing import NDArray

from megatron_forest_trainer.core.errors import EvidenceError, IntegrityError, SelectionError
from megatron_forest_trainer.core.forest import (
    build_rows,
    check_ownership,
    is_linear,
    missing_parents,
)
from megatron_forest_trainer.core.media import check_call_media
from megatron_forest_trainer.core.routes import call_routes
from megatron_forest_trainer.core.rows import delta_arrays
from megatron_forest_trainer.core.selection import (
    Selection,
    SelectionPolicy,
    check_selection,
    is_trainable,
    returned_history,
    stopped_for_length,
)
from megatron_forest_trainer.core.types import DeltaReader, Finalized

OnEvidenceError = Literal["raise", "mask"]

LOGPROB_TOLERANCE = 1e-4
"""A log-probability may be this far above 0: rounding of a float32 log-softmax."""


class _Masked(Exception):
    """The rollout is masked."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def finalize_rollout(
    receipt: Receipt,
    result: Mapping[str, Any],
    reader: DeltaReader,
    policy: SelectionPolicy = returned_history,
    *,
    forest_training: bool = True,
    require_routes: bool = False,
    on_evidence_error: OnEvidenceError = "raise",
) -> Finalized:
    """Verify one rollout: select by `policy`, then `finalize_selection`.

    A rollout whose capture is incomplete is masked without looking at `result`, and with
    `require_routes` one that has a call without routed experts. Raises
    `EvidenceError` (or masks, by `on_evidence_error`) where the result does not fit the capture,
    `SelectionError` for a policy that breaks its contract, and `IntegrityError`, `ShardError`
    or `SchemaError` for data that cannot be trusted.
    """
    check_scope(receipt)
    try:
        _check_capture(receipt)
        chosen = policy(list(receipt.calls), dict(result))
        if not isinstance(chosen, tuple | list) or len(chosen) != 2:
            raise SelectionError(
                f"a selection policy must return (records, terminal_response_id), got {chosen!r}"
            )
        selection = check_selection(receipt.calls, *chosen)
    except _Masked as masked:
        return _mask(receipt, masked.reason, str(masked))
    except EvidenceError as error:
        if on_evidence_error == "raise":
            raise
        return _mask(receipt, error.reason, str(error))
    return finalize_selection(
        receipt,
        selection,
        reader,
        forest_training=forest_training,
        require_routes=require_routes,
        on_evidence_error=on_evidence_error,
    )


def finalize_selection(
    receipt: Receipt,
    selection: Selection,
    reader: DeltaReader,
    *,
    forest_training: bool = True,
    require_routes: bool = False,
    on_evidence_error: OnEvidenceError = "raise",
) -> Finalized:
    """Verify a rollout whose selection is known.

    The entry for adapters that have no gateway: a receipt, the selected calls and the scored one
    (`core.selection.select_responses` makes a selection from response ids). Raises as
    `finalize_rollout`.
    """
    check_scope(receipt)
    try:
        _check_capture(receipt)
        selection = check_selection(receipt.calls, *selection)
        _check_completion(
            receipt,
            selection,
            forest_training=forest_training,
            require_routes=require_routes,
        )
        rows = build_rows(
            selection.records, group_id=receipt.group_id, rollout_id=receipt.rollout_id
        )
        _verify_tensors(selection.records, reader)
    except _Masked as masked:
        return _mask(receipt, masked.reason, str(masked), selection)
    except EvidenceError as error:
        if on_evidence_error == "raise":
            raise
        return _mask(receipt, error.reason, str(error), selection)
    generated = {record.call_id: record.generated_len for record in selection.records}
    check_ownership(rows, generated)
    return Finalized(
        group_id=receipt.group_id,
        rollout_id=receipt.rollout_id,
        attempt_id=receipt.attempt_id,
        rows=rows,
        selected=tuple(generated),
        terminal_response_id=selection.terminal_response_id,
        truncated=any(stopped_for_length(record) for record in selection.records),
        generated_tokens=sum(generated.values()),
        longest_generation=max(generated.values()),
        unique_tokens=sum(record.delta_len for record in selection.records),
    )


def check_scope(receipt: Receipt) -> None:
    """Every record is of this attempt and of a version that is read here.

    Raises `SchemaError` or `IntegrityError`.
    """
    check_version(receipt.schema, receipt.required_features, what="receipt")
    seen: set[str] = set()
    for record in receipt.calls:
        check_version(record.schema, record.required_features, what=f"call {record.call_id}")
        if record.digest_version != DIGEST_VERSION:
            raise SchemaError(
                f"call {record.call_id}: digest version {record.digest_version} is not "
                f"{DIGEST_VERSION}"
            )
        owner = (record.attempt_id, record.capture_key, record.delta.store)
        if owner != (receipt.attempt_id, receipt.attempt_id, receipt.store):
            raise IntegrityError(
                Reason.FOREIGN_SHARD,
                f"call {record.call_id} is of attempt {record.attempt_id}, captured by "
                f"{record.capture_key} in store {record.delta.store}; the receipt is of attempt "
                f"{receipt.attempt_id} in store {receipt.store}",
            )
        if record.call_id in seen:
            raise IntegrityError(
                Reason.DIGEST_MISMATCH, f"the receipt lists call {record.call_id} twice"
            )
        seen.add(record.call_id)


def _mask(
    receipt: Receipt, reason: Reason, detail: str, selection: Selection | None = None
) -> Finalized:
    records = selection.records if selection is not None else ()
    return Finalized(
        group_id=receipt.group_id,
        rollout_id=receipt.rollout_id,
        attempt_id=receipt.attempt_id,
        reason=reason,
        detail=detail,
        selected=tuple(record.call_id for record in records),
        terminal_response_id=selection.terminal_response_id if selection is not None else None,
    )


def _check_capture(receipt: Receipt) -> None:
    """The capture itself is complete, whatever was selected."""
    if not receipt.closed:
        raise _Masked(Reason.CAPTURE_PENDING, "the attempt is still open; close it first")
    if receipt.pending:
        calls = ", ".join(receipt.pending)
        raise _Masked(Reason.CAPTURE_PENDING, f"no acknowledged write of call(s) {calls}")
    committed = {record.call_id for record in receipt.calls}
    for failure in receipt.failures:
        if not is_harmless(failure, committed):
            raise _Masked(
                Reason.CAPTURE_INCOMPLETE,
                f"call {failure.call_id} failed: {failure.reason} {failure.detail}".rstrip(),
            )
    if not receipt.calls:
        raise _Masked(Reason.CAPTURE_INCOMPLETE, "no call was captured")


def is_harmless(failure: FailureRecord, committed: set[str]) -> bool:
    """A cancellation after the call's capture was committed; harmless unless selected."""
    return failure.reason == Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES and (
        failure.had_committed_capture or failure.call_id in committed
    )


def _check_completion(
    receipt: Receipt, selection: Selection, *, forest_training: bool, require_routes: bool
) -> None:
    """The selection is closed and made of calls that ended well."""
    missing = missing_parents(selection.records)
    if missing:
        raise _Masked(
            Reason.SELECTION_NOT_CLOSED,
            f"the selection lacks the parent call(s) {', '.join(missing)}; return the whole "
            "accepted history",
        )
    failed = {failure.call_id for failure in receipt.failures}
    for record in selection.records:
        if record.call_id in failed:
            raise _Masked(
                Reason.FAILED_SELECTED_CALL, f"call {record.call_id} was cancelled, yet selected"
            )
        if not is_trainable(record):
            raise _Masked(
                Reason.FAILED_SELECTED_CALL,
                f"call {record.call_id} is {record.status} ({record.finish_reason})",
            )
        problem = _unreproducible(record.sampling)
        if problem is not None:
            raise _Masked(
                Reason.UNREPRODUCIBLE_CALL, f"call {record.call_id} was sampled with {problem}"
            )
        if require_routes and record.routes is None:
            raise _Masked(
                Reason.MISSING_ROUTES,
                f"call {record.call_id} was captured without routed experts; "
                "policy.router_replay.on_missing_routes: live would leave its tokens to the "
                "trained router",
            )
    if not forest_training and not is_linear(selection.records):
        raise _Masked(
            Reason.FOREST_TRAINING_OFF,
            "the selection is not one linear chain; set token_capture.forest_training: true",
        )


def _unreproducible(sampling: SamplingRecord) -> str | None:
    """What the trainer cannot rebuild of the distribution that was sampled from."""
    if sampling.logprobs_mode != "processed_logprobs":
        return f"logprobs_mode {sampling.logprobs_mode}"
    for name, neutral in (
        ("min_p", 0.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("logit_bias", {}),
        ("structured_output", False),
    ):
        if getattr(sampling, name) != neutral:
            return name
    return None if sampling.reproducible else "a custom logits processor"


def _verify_tensors(records: Sequence[CallRecord], reader: DeltaReader) -> None:
    """Every delta is what its record and its parent's chain say, and its numbers are sound."""
    chains = {record.call_id: record.chain_digest for record in records}
    placeholders = {image.placeholder_token_id for record in records for image in record.media}
    logprobs: list[NDArray[np.float32]] = []
    for record in records:
        delta = reader.read(record.delta)
        tokens, generated = delta_arrays(record, delta)
        parent = EMPTY_CHAIN if record.parent_call_id is None else chains[record.parent_call_id]
        if chain_digest(parent, tokens) != record.chain_digest:
            raise IntegrityError(
                Reason.DIGEST_MISMATCH,
                f"call {record.call_id}: the token chain is not the one that was committed",
            )
        try:
            check_call_media(record, tokens, delta, placeholders)
        except MediaError as error:
            raise _Masked(
                Reason.MEDIA_AUTHENTICATION_FAILED, f"call {record.call_id}: {error}"
            ) from error
        call_routes(record, delta)
        logprobs.append(generated)
    everything = np.concatenate(logprobs)
    # A comparison with NaN is false, so one pass finds NaN, +inf and positive values; -inf is
    # looked at below.
    if (everything <= LOGPROB_TOLERANCE).all() and np.isfinite(everything).all():
        return
    for record, generated in zip(records, logprobs, strict=True):
        _check_logprobs(record, generated)


def _check_logprobs(record: CallRecord, logprobs: NDArray[np.float32]) -> None:
    filtered = record.sampling.top_p < 1 or record.sampling.top_k > 0
    valid = logprobs <= LOGPROB_TOLERANCE
    if not filtered:
        valid &= np.isfinite(logprobs)
    if not valid.all():
        position = int(np.argmin(valid))
        raise _Masked(
            Reason.INVALID_LOGPROB,
            f"call {record.call_id}: log-probability {logprobs[position]} of generated token "
            f"{position}",
        )
