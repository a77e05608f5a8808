from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema import CallRecord, CompletionStatus, FailureRecord, Reason, SamplingRecord
from forest_schema.digests import delta_digest
from forest_schema.shards import LOGPROBS, TOKENS, ShardError
from forest_schema.version import SchemaError
from hypothesis import given, settings
from megatron_forest_trainer.core.errors import EvidenceError, IntegrityError, SelectionError
from megatron_forest_trainer.core.selection import all_captured, select_responses
from megatron_forest_trainer.core.types import Finalized
from megatron_forest_trainer.finalize import finalize_rollout, finalize_selection

from tests.support.forests import Forest, MemoryStore, selected_forests


def finalize(forest: Forest, *returned: CallRecord, **options: Any) -> Finalized:
    return finalize_rollout(forest.receipt(), forest.result(*returned), forest.reader(), **options)


def replace(forest: Forest, call: CallRecord, **changes: Any) -> CallRecord:
    """Change a captured record in place, as damage or another server would."""
    changed = msgspec.structs.replace(call, **changes)
    forest.calls[forest.calls.index(call)] = changed
    return changed


def change_delta(forest: Forest, call: CallRecord, name: str, array: Any) -> CallRecord:
    """Store other tensors and a record that agrees with them about the delta's digest."""
    delta = forest.deltas[call.call_id] | {name: array}
    forest.deltas[call.call_id] = delta
    ref = msgspec.structs.replace(call.delta, digest=delta_digest(delta))
    return replace(forest, call, delta=ref)


# Verified rollouts


@pytest.mark.requirement("F1", "F5", "F12", "F17", "E35")
@given(selected_forests())
@settings(deadline=None)
def test_a_closed_selection_becomes_verified_rows(case: tuple[Forest, list[CallRecord]]) -> None:
    forest, selection = case
    final = finalize(forest, *selection)
    assert final.verified
    assert final.detail == ""
    assert set(final.selected) == {call.call_id for call in selection}
    assert sum(row.owned_tokens for row in final.rows) == final.generated_tokens
    assert final == finalize(forest, *selection)


@pytest.mark.requirement("G16", "G17", "G18", "G19", "G14", "G22")
def test_generation_statistics_count_every_token_once() -> None:
    forest = Forest()
    shared = forest.call(prompt=10, generated=7)
    left = forest.call(shared, prompt=1, generated=3, finish_reason="length")
    right = forest.call(shared, prompt=2, generated=5)
    rewritten = forest.call(prompt=30, generated=2)
    final = finalize(forest, shared, left, right, rewritten)
    assert final.generated_tokens == 7 + 3 + 5 + 2
    assert final.longest_generation == 7
    assert final.longest_row == 32
    assert final.unique_tokens == 17 + 4 + 7 + 32
    assert final.row_tokens == 21 + 24 + 32
    assert final.truncated


@pytest.mark.requirement("E34", "L6")
def test_an_adapter_without_a_gateway_finalises_by_action_ids() -> None:
    """An independent episode: action ids and a score, a receipt, no result dictionary."""
    forest = Forest()
    first = forest.call()
    forest.call(first)
    last = forest.call(first)
    actions = [first.output.response_id, last.output.response_id]
    selection = select_responses(forest.calls, actions, actions[-1])
    final = finalize_selection(forest.receipt(), selection, forest.reader())
    assert final.selected == (first.call_id, last.call_id)
    assert final.terminal_response_id == actions[-1]


@pytest.mark.requirement("E24", "E28")
def test_a_custom_policy_sets_the_priority_of_paths() -> None:
    forest = Forest()
    shared = forest.call()
    left, right = forest.call(shared), forest.call(shared)

    def right_first(
        records: list[CallRecord], result: dict[str, Any]
    ) -> tuple[list[CallRecord], str | None]:
        assert records == [shared, left, right]
        assert result["reward"] == 1.0
        return [right, left, shared], right.output.response_id

    final = finalize(forest, policy=right_first)
    assert [row.path[-1].call_id for row in final.rows] == [right.call_id, left.call_id]
    assert [span.owned for span in final.rows[0].spans] == [True, True]
    assert [span.owned for span in final.rows[1].spans] == [False, True]


# Masks


def mask_of(final: Finalized) -> Reason | None:
    assert final.rows == ()
    assert (final.generated_tokens, final.longest_row, final.unique_tokens) == (0, 0, 0)
    assert final.detail
    return final.reason


@pytest.mark.requirement("E29")
def test_a_selection_without_a_needed_parent_is_masked_and_nothing_is_added() -> None:
    forest = Forest()
    parent = forest.call()
    child = forest.call(parent)
    forest.call()
    final = finalize(forest, child)
    assert mask_of(final) is Reason.SELECTION_NOT_CLOSED
    assert parent.call_id in final.detail
    assert final.selected == (child.call_id,)


@pytest.mark.requirement("XF7", "I3", "I4")
def test_a_rollout_without_captures_is_masked_whatever_it_returned() -> None:
    final = finalize_rollout(Forest().receipt(), {}, Forest(calls=[]).reader())
    assert mask_of(final) is Reason.CAPTURE_INCOMPLETE


@pytest.mark.requirement("I3", "I6", "C15")
def test_a_pending_call_masks_even_the_complete_part() -> None:
    forest = Forest()
    call = forest.call()
    forest.pending.append("att_0-c1")
    assert mask_of(finalize(forest, call)) is Reason.CAPTURE_PENDING


@pytest.mark.requirement("I1")
def test_an_open_attempt_is_not_trained_on() -> None:
    forest = Forest(closed=False)
    call = forest.call()
    assert mask_of(finalize(forest, call)) is Reason.CAPTURE_PENDING


def failure(call_id: str, reason: Reason, **more: Any) -> FailureRecord:
    return FailureRecord(call_id=call_id, order=9, reason=reason, **more)


@pytest.mark.requirement("I10", "C24", "I4")
@pytest.mark.parametrize(
    "reason",
    [
        Reason.CLIENT_DISCONNECTED,
        Reason.ENGINE_ERROR,
        Reason.PROCESS_LOST,
        Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES,
    ],
)
def test_a_failed_call_masks(reason: Reason) -> None:
    forest = Forest()
    call = forest.call()
    forest.failures.append(failure("att_0-c1", reason, detail="why"))
    final = finalize(forest, call)
    assert mask_of(final) is Reason.CAPTURE_INCOMPLETE
    assert "att_0-c1" in final.detail


@pytest.mark.requirement("I9")
def test_a_cancellation_after_its_capture_was_committed_is_harmless_unless_selected() -> None:
    forest = Forest()
    call, cancelled = forest.call(), forest.call()
    forest.failures.append(
        failure(
            cancelled.call_id,
            Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES,
            had_committed_capture=True,
        )
    )
    final = finalize(forest, call)
    assert final.verified
    assert final.selected == (call.call_id,)
    assert mask_of(finalize(forest, call, cancelled)) is Reason.FAILED_SELECTED_CALL
    forest.pending.append("att_0-c7")
    assert mask_of(finalize(forest, call)) is Reason.CAPTURE_PENDING


@pytest.mark.requirement("I10")
def test_only_that_reason_is_harmless() -> None:
    forest = Forest()
    call, cancelled = forest.call(), forest.call()
    forest.failures.append(
        failure(cancelled.call_id, Reason.CLIENT_DISCONNECTED, had_committed_capture=True)
    )
    assert mask_of(finalize(forest, call)) is Reason.CAPTURE_INCOMPLETE


@pytest.mark.requirement("F15", "XF2", "C24", "E28")
@pytest.mark.parametrize(
    ("status", "finish"),
    [
        (CompletionStatus.FAILED, "abort"),
        (CompletionStatus.UNKNOWN, None),
        (CompletionStatus.INCOMPLETE, "content_filter"),
    ],
)
def test_a_selected_call_that_ended_badly_masks(
    status: CompletionStatus, finish: str | None
) -> None:
    forest = Forest()
    parent = forest.call(status=status, finish_reason=finish)
    child = forest.call(parent)
    assert mask_of(finalize(forest, parent, child)) is Reason.FAILED_SELECTED_CALL
    scored = {"terminal_response_id": parent.output.response_id}
    final = finalize_rollout(forest.receipt(), scored, forest.reader(), all_captured)
    assert mask_of(final) is Reason.FAILED_SELECTED_CALL


@pytest.mark.requirement("XF2", "F8")
def test_an_aborted_call_is_left_out_and_its_retry_trains() -> None:
    forest = Forest()
    forest.call(status=CompletionStatus.FAILED, finish_reason="abort", text="same")
    retry = forest.call(text="same")
    scored = {"terminal_response_id": retry.output.response_id}
    for policy, result in ((all_captured, scored), (None, forest.result(retry))):
        options = {"policy": policy} if policy else {}
        final = finalize_rollout(forest.receipt(), result, forest.reader(), **options)
        assert final.selected == (retry.call_id,)
        assert final.verified


@pytest.mark.requirement("C22")
@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1.0}},
        {"structured_output": True},
        {"reproducible": False},
        {"logprobs_mode": "raw_logprobs"},
    ],
)
def test_sampling_that_cannot_be_rebuilt_masks(sampling: dict[str, Any]) -> None:
    forest = Forest()
    call = forest.call(sampling=SamplingRecord(temperature=1.0, **sampling))
    assert mask_of(finalize(forest, call)) is Reason.UNREPRODUCIBLE_CALL


@pytest.mark.requirement("C22", "X16", "F13")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.01, -float("inf")])
def test_an_impossible_log_probability_masks_the_whole_rollout(value: float) -> None:
    forest = Forest()
    good = forest.call()
    bad = forest.call(generated=2, logprobs=[-1.0, value])
    final = finalize(forest, good, bad)
    assert mask_of(final) is Reason.INVALID_LOGPROB
    assert bad.call_id in final.detail
    assert "token 1" in final.detail


@pytest.mark.requirement("XL12")
@pytest.mark.parametrize("filtered", [{"top_p": 0.9}, {"top_k": 5}])
def test_minus_infinity_is_legal_under_a_filtered_distribution(filtered: dict[str, Any]) -> None:
    forest = Forest()
    sampling = SamplingRecord(temperature=1.0, **filtered)
    call = forest.call(generated=2, logprobs=[-1.0, -np.inf], sampling=sampling)
    assert finalize(forest, call).verified
    nan = forest.call(generated=2, logprobs=[-1.0, np.nan], sampling=sampling)
    assert mask_of(finalize(forest, call, nan)) is Reason.INVALID_LOGPROB


def test_rounding_just_above_zero_is_no_error() -> None:
    forest = Forest()
    call = forest.call(generated=2, logprobs=[0.0, 1e-6])
    assert finalize(forest, call).verified


@pytest.mark.requirement("E7", "E25")
def test_evidence_errors_raise_or_mask() -> None:
    forest = Forest()
    forest.call()
    receipt, reader = forest.receipt(), forest.reader()
    with pytest.raises(EvidenceError):
        finalize_rollout(receipt, {}, reader)
    final = finalize_rollout(receipt, {}, reader, on_evidence_error="mask")
    assert mask_of(final) is Reason.EVIDENCE_ERROR

    def without_terminal(records: Any, result: Any) -> Any:
        return records, None

    final = finalize_rollout(receipt, {}, reader, without_terminal, on_evidence_error="mask")
    assert mask_of(final) is Reason.EVIDENCE_ERROR
    forest.calls[0] = msgspec.structs.replace(forest.calls[0], finish_reason=None)
    final = finalize(forest, forest.calls[0], on_evidence_error="mask")
    assert mask_of(final) is Reason.EVIDENCE_ERROR


@pytest.mark.requirement("E20", "E27", "K1")
def test_without_forest_training_only_one_linear_chain_trains() -> None:
    forest = Forest()
    first = forest.call()
    second = forest.call(first)
    branch = forest.call(first)
    linear = finalize(forest, first, second, forest_training=False)
    assert len(linear.rows) == 1
    forked = finalize(forest, first, second, branch, forest_training=False)
    assert mask_of(forked) is Reason.FOREST_TRAINING_OFF
    root = forest.call()
    assert mask_of(finalize(forest, first, root, forest_training=False)) is (
        Reason.FOREST_TRAINING_OFF
    )


# Data that cannot be trusted raises


@pytest.mark.requirement("F14")
@pytest.mark.parametrize(
    "changes",
    [
        {"attempt_id": "att_9"},
        {"capture_key": "att_9"},
    ],
)
def test_records_of_another_attempt_are_refused_before_anything_else(
    changes: dict[str, Any],
) -> None:
    forest = Forest()
    call = forest.call()
    replace(forest, forest.call(), **changes)
    with pytest.raises(IntegrityError, match="att_9") as caught:
        finalize(forest, call)
    assert caught.value.reason is Reason.FOREIGN_SHARD


@pytest.mark.requirement("F14")
def test_tensors_of_another_store_or_shard_are_refused() -> None:
    forest = Forest()
    call = forest.call()
    ref = msgspec.structs.replace(call.delta, store="elsewhere")
    replace(forest, call, delta=ref)
    with pytest.raises(IntegrityError, match="elsewhere"):
        finalize(forest, forest.calls[0])
    forest.calls[0] = call
    foreign = Forest(partition="another", seed=1)
    foreign.call()
    with pytest.raises(ShardError) as caught:
        finalize_rollout(forest.receipt(), forest.result(call), foreign.reader())
    assert caught.value.reason is Reason.FOREIGN_SHARD


@pytest.mark.requirement("F14", "E23")
def test_a_policy_that_returns_foreign_records_stops_the_run() -> None:
    forest = Forest()
    forest.call()
    stranger = Forest(attempt_id="att_1").call()

    def foreign(records: Any, result: Any) -> Any:
        return [stranger], stranger.output.response_id

    with pytest.raises(SelectionError, match="not of this attempt"):
        finalize(forest, policy=foreign, on_evidence_error="mask")


@pytest.mark.requirement("C20", "F14")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema version 2"),
        ({"required_features": ("teleport",)}, "teleport"),
        ({"digest_version": 7}, "digest version 7"),
    ],
)
def test_another_capture_schema_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    forest = Forest()
    call = replace(forest, forest.call(), **changes)
    with pytest.raises(SchemaError, match=message):
        finalize(forest, call)


@pytest.mark.requirement("F16", "I14")
def test_a_broken_token_chain_stops_the_run() -> None:
    forest = Forest()
    first = forest.call()
    child = forest.call(first, prompt=3, generated=4)
    other = np.zeros(7, dtype="<i4")
    child = change_delta(forest, child, TOKENS, other)
    with pytest.raises(IntegrityError, match=f"call {child.call_id}: the token chain") as caught:
        finalize(forest, first, child)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


@pytest.mark.requirement("F16", "I14")
@pytest.mark.parametrize(
    ("name", "array"),
    [
        (TOKENS, np.zeros(6, dtype="<i4")),
        (LOGPROBS, np.zeros(3, dtype="<f4")),
    ],
)
def test_tensors_of_another_size_stop_the_run(name: str, array: Any) -> None:
    forest = Forest()
    call = change_delta(forest, forest.call(prompt=3, generated=4), name, array)
    with pytest.raises(IntegrityError, match="where the record says 7 and 4"):
        finalize(forest, call)


@pytest.mark.requirement("I14")
def test_a_damaged_byte_stops_the_run() -> None:
    forest = Forest()
    call = forest.call()
    data = bytearray(forest.shard())
    data[-1] ^= 1
    with pytest.raises(ShardError) as caught:
        finalize_rollout(forest.receipt(), forest.result(call), MemoryStore(bytes(data)))
    assert caught.value.reason is Reason.DIGEST_MISMATCH


@pytest.mark.requirement("F13", "I7")
def test_masking_leaves_the_receipt_as_it_is() -> None:
    forest = Forest()
    good = forest.call()
    bad = forest.call(generated=1, logprobs=[np.nan])
    unselected = forest.call()
    receipt = forest.receipt()
    final = finalize_rollout(receipt, forest.result(good, bad), forest.reader())
    assert mask_of(final) is Reason.INVALID_LOGPROB
    assert receipt == forest.receipt()
    assert unselected in receipt.calls


@pytest.mark.requirement("J6")
def test_a_finalised_rollout_survives_serialisation() -> None:
    forest = Forest()
    shared = forest.call()
    final = finalize(forest, shared, forest.call(shared), forest.call(shared))
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(final), type=Finalized) == final


@pytest.mark.requirement("I20", "C12")
def test_restored_calls_keep_their_first_owner() -> None:
    forest = Forest()
    call = replace(forest, forest.call(), source_capture_key="att_before")
    assert finalize(forest, call).verified


@pytest.mark.requirement("E21")
@pytest.mark.parametrize("returned", [None, [], ["a", "b", "c"]])
def test_a_policy_that_returns_no_pair_stops_the_run(returned: Any) -> None:
    forest = Forest()
    forest.call()
    with pytest.raises(SelectionError, match=r"must return \(records, terminal_response_id\)"):
        finalize(forest, policy=lambda records, result: returned)


def test_reading_is_not_needed_for_a_masked_selection() -> None:
    """A selection that is masked by its records alone reads no tensors."""

    class Unreadable:
        read: Callable[..., Any]

    forest = Forest()
    parent = forest.call()
    child = forest.call(parent)
    final = finalize_rollout(forest.receipt(), forest.result(child), Unreadable())
    assert final.reason is Reason.SELECTION_NOT_CLOSED
