"""What the server writes down about a call, and what a receipt hands to the trainer.

Guarantees: records are token-free (identities, lengths, digests and metadata; the tensors are
addressed by `TensorRef`), immutable, and carry everything that the trainer needs to prove a row.
Lengths obey `cum_len == prev_len + delta_len` and `generated_len <= delta_len`, checked on
construction.
"""

from enum import StrEnum
from typing import Any

import msgspec

from forest_schema.media import MediaOccurrence
from forest_schema.routes import RouteInfo
from forest_schema.version import (
    CAPTURE_SCHEMA,
    DIGEST_VERSION,
    NORMALIZATION_VERSION,
    REQUIRED_FEATURES,
    check_message_version,
)


class CaptureState(StrEnum):
    """Where a call stands in the ledger."""

    INTENT = "intent"
    """Written before inference; no acknowledgement of a stored delta yet (pending)."""
    COMMITTED = "committed"
    """The delta is durable and the record complete."""
    FAILED = "failed"
    """A failure was recorded; it acknowledges no write."""


class CompletionStatus(StrEnum):
    """How the generation ended, as the model's API says it."""

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    UNKNOWN = "unknown"


class TensorRef(msgspec.Struct, frozen=True, kw_only=True):
    """Address of one call's delta: never a path."""

    store: str
    """Id of the delta store (one per serving host)."""
    partition: str
    """Folder of the run and step that the shard belongs to."""
    shard: str
    """Id of the safetensors shard inside the partition."""
    key: str
    """Prefix of the delta's tensor names inside the shard: `{key}/tokens`, `{key}/logprobs`."""
    digest: str
    """`digests.delta_digest` over all tensors of the delta."""


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a later request is compared with, in constant size per call."""

    normalization_version: int = NORMALIZATION_VERSION
    source_item_count: int
    """Normalised source items of the request and of the generated turn together."""
    source_digest: str
    """Chained digest over those items, null and empty assistant content told apart."""
    equivalence_digest: str
    """The same with null, absent and empty assistant content beside tool calls made equal."""
    render_option_digest: str
    reasoning: tuple[tuple[int, str], ...] = ()
    """(index of the source item, fingerprint) of each reasoning text that this call added:
    exposed reasoning that comes back must be the same, and may be left out."""


class OutputEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """How a generation can be recognised in what a harness returns."""

    response_id: str
    item_ids: tuple[str, ...] = ()
    """Native ids of the output items (tool-call ids, Responses item ids), in output order."""
    fingerprint: str
    """Equivalence fingerprint of `items.generated_turn`: the turn by itself, reasoning left out,
    null and empty content equal. `items.output_evidence` makes the whole struct."""
    reasoning_fingerprint: str | None = None
    """Fingerprint of the exposed reasoning; None where the generation exposed none."""


class SamplingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Effective sampling parameters, after server defaults."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    structured_output: bool = False
    logprobs_mode: str = "processed_logprobs"
    reproducible: bool = True
    """False where the trainer cannot rebuild the sampled distribution; it then masks the call."""


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Generated tokens `[start, end)` of a call that one weight version produced."""

    version: str
    start: int
    end: int


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One captured model call: a root, or a delta on top of `parent_call_id`.

    All lengths count tokens. The delta's tokens are `prompt_delta_len` new prompt tokens
    followed by `generated_len` generated ones.
    """

    schema: int = CAPTURE_SCHEMA
    required_features: tuple[str, ...] = REQUIRED_FEATURES
    digest_version: int = DIGEST_VERSION
    attempt_id: str
    call_id: str
    capture_key: str
    """Storage owner of this capture: the attempt id under which the delta was staged."""
    source_capture_key: str | None = None
    """For a call restored into a new attempt: the attempt that staged it first."""
    order: int
    """Capture order inside the attempt, from 0: when the intent was written."""
    api: str
    """`chat` or `responses`."""
    model: str

    parent_call_id: str | None = None
    root_reason: str | None = None
    """A `Reason` value for a root, None for a continuation."""
    used_null_empty_equivalence: bool = False
    prev_len: int
    """Tokens inherited from the parent: the parent's `cum_len`; 0 for a root."""
    delta_len: int
    cum_len: int
    generated_len: int
    chain_digest: str
    """`digests.chain_digest` over the whole history up to `cum_len`."""
    delta: TensorRef
    media: tuple[MediaOccurrence, ...] = ()
    """Occurrences that this call's prompt added, in prompt order, between `prev_len` and
    `prompt_len`."""
    media_digest: str | None = None
    """`media.media_digest` over `media`; None without media."""

    status: CompletionStatus
    finish_reason: str | None
    stop_reason: str | int | None = None
    replay: ReplaySummary
    output: OutputEvidence
    sampling: SamplingRecord
    weight_spans: tuple[WeightSpan, ...]
    routes: RouteInfo | None = None
    """What the delta's routed experts cover; None where the call has none."""
    cached_prompt_tokens: int | None = None
    """Prompt tokens that the engine took from its prefix cache; None where it does not say."""
    started_at: float
    """Unix seconds when the intent was written."""
    committed_at: float

    @property
    def prompt_delta_len(self) -> int:
        """New prompt tokens of this call."""
        return self.delta_len - self.generated_len

    @property
    def prompt_len(self) -> int:
        """Tokens of the whole prompt that the engine received."""
        return self.prev_len + self.prompt_delta_len

    def __post_init__(self) -> None:
        if min(self.prev_len, self.delta_len, self.generated_len) < 0:
            raise ValueError(f"call {self.call_id}: a negative length")
        if self.cum_len != self.prev_len + self.delta_len:
            raise ValueError(
                f"call {self.call_id}: cum_len {self.cum_len} is not prev_len {self.prev_len} "
                f"+ delta_len {self.delta_len}"
            )
        if self.generated_len > self.delta_len:
            raise ValueError(
                f"call {self.call_id}: generated_len {self.generated_len} exceeds delta_len "
                f"{self.delta_len}"
            )
        if self.parent_call_id is None and self.prev_len:
            raise ValueError(f"call {self.call_id}: a root cannot inherit {self.prev_len} tokens")
        if self.routes is not None:
            self.routes.check(call_id=self.call_id, prev_len=self.prev_len, cum_len=self.cum_len)


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was admitted and failed. It acknowledges no write."""

    call_id: str
    order: int
    reason: str
    """A `Reason` value whose effect is `capture_failure`."""
    detail: str = ""
    had_committed_capture: bool = False
    """The call's delta had been committed when the failure was recorded."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an attempt left behind, selected or not; what cleanup and training start from."""

    schema: int = CAPTURE_SCHEMA
    required_features: tuple[str, ...] = REQUIRED_FEATURES
    store: str
    partition: str
    attempt_id: str
    rollout_id: str
    group_id: str
    closed: bool
    """Admissions are closed: no later call can join."""
    calls: tuple[CallRecord, ...]
    """Committed calls in capture order."""
    failures: tuple[FailureRecord, ...] = ()
    pending: tuple[str, ...] = ()
    """Admitted calls that are neither committed nor failed."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """What `open` was given, unchanged."""


_RECEIPT_DECODER = msgspec.json.Decoder(Receipt)
_CALL_DECODER = msgspec.json.Decoder(CallRecord)


def decode_receipt(data: bytes) -> Receipt:
    """A receipt from JSON. Raises `SchemaError` for another version, naming it."""
    check_message_version(data, what="receipt")
    return _RECEIPT_DECODER.decode(data)


def decode_call(data: bytes) -> CallRecord:
    """A call record from JSON. Raises `SchemaError` for another version, naming it."""
    check_message_version(data, what="call record")
    return _CALL_DECODER.decode(data)
