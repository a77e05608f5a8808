"""Records and receipts: lengths are consistent, versions are checked, nothing holds a token."""

import msgspec
import pytest
from forest_schema import (
    EFFECTS,
    CallRecord,
    CompletionStatus,
    Effect,
    OutputEvidence,
    Reason,
    Receipt,
    ReplaySummary,
    SamplingRecord,
    SchemaError,
    TensorRef,
    WeightSpan,
    decode_call,
    decode_receipt,
)


def make_record(**changes):
    fields = {
        "attempt_id": "att_1",
        "call_id": "c1",
        "capture_key": "att_1",
        "order": 0,
        "api": "chat",
        "model": "m",
        "prev_len": 0,
        "delta_len": 5,
        "cum_len": 5,
        "generated_len": 2,
        "chain_digest": "0" * 32,
        "delta": TensorRef(store="s", partition="p", shard="x", key="c1", digest="0" * 32),
        "status": CompletionStatus.COMPLETED,
        "finish_reason": "stop",
        "replay": ReplaySummary(
            source_item_count=2,
            source_digest="1" * 32,
            equivalence_digest="1" * 32,
            render_option_digest="2" * 32,
        ),
        "output": OutputEvidence(response_id="r1", fingerprint="3" * 32),
        "sampling": SamplingRecord(temperature=1.0),
        "weight_spans": (WeightSpan(version="w0", start=0, end=2),),
        "started_at": 1.0,
        "committed_at": 2.0,
    }
    return CallRecord(**{**fields, **changes})


@pytest.mark.requirement("C1")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cum_len": 6}, "cum_len 6 is not prev_len 0 \\+ delta_len 5"),
        ({"generated_len": 6}, "generated_len 6 exceeds"),
        ({"prev_len": 3, "cum_len": 8}, "a root cannot inherit"),
        ({"delta_len": -1, "cum_len": -1}, "negative length"),
    ],
)
def test_inconsistent_lengths_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_record(**changes)


@pytest.mark.requirement("C1")
def test_lengths_of_a_continuation():
    record = make_record(parent_call_id="c0", prev_len=10, cum_len=15)
    assert (record.prompt_delta_len, record.prompt_len) == (3, 13)


@pytest.mark.requirement("C4", "C6", "C11", "C23", "C24")
def test_record_round_trip():
    record = make_record()
    assert decode_call(msgspec.json.encode(record)) == record


@pytest.mark.requirement("C20")
def test_other_versions_are_refused_and_optional_fields_ignored():
    receipt = Receipt(
        store="s",
        partition="p",
        attempt_id="att_1",
        rollout_id="r",
        group_id="g",
        closed=True,
        calls=(make_record(),),
    )
    body = msgspec.to_builtins(receipt)
    assert decode_receipt(msgspec.json.encode({**body, "added_later": 1})) == receipt
    for version in (2, 4):
        with pytest.raises(SchemaError, match=f"version {version}"):
            decode_receipt(msgspec.json.encode({**body, "schema": version}))
    with pytest.raises(SchemaError, match="holograms"):
        decode_receipt(msgspec.json.encode({**body, "required_features": ["holograms"]}))
    with pytest.raises(SchemaError, match="no readable schema version"):
        decode_receipt(b"{}")


def test_every_reason_has_one_effect():
    assert set(EFFECTS) == set(Reason)
    assert EFFECTS[Reason.SELECTION_NOT_CLOSED] is Effect.MASK_ROLLOUT
    assert EFFECTS[Reason.OVERLONG] is Effect.FILTER_ROLLOUT
