"""Records, receipts, digests and the shard layout that the server and the trainer share.

Guarantees: this package imports neither torch nor vLLM nor Megatron, does no network I/O, and is
the only place where a format that crosses between the two sides is defined.
"""

from forest_schema.media import MediaOccurrence
from forest_schema.reasons import EFFECTS, Effect, Reason
from forest_schema.records import (
    CallRecord,
    CaptureState,
    CompletionStatus,
    FailureRecord,
    OutputEvidence,
    Receipt,
    ReplaySummary,
    SamplingRecord,
    TensorRef,
    WeightSpan,
    decode_call,
    decode_receipt,
)
from forest_schema.routes import RouteInfo
from forest_schema.version import CAPTURE_SCHEMA, SNAPSHOT_SCHEMA, SchemaError

__all__ = [
    "CAPTURE_SCHEMA",
    "EFFECTS",
    "SNAPSHOT_SCHEMA",
    "CallRecord",
    "CaptureState",
    "CompletionStatus",
    "Effect",
    "MediaOccurrence",
    "FailureRecord",
    "OutputEvidence",
    "Reason",
    "Receipt",
    "ReplaySummary",
    "RouteInfo",
    "SamplingRecord",
    "SchemaError",
    "TensorRef",
    "WeightSpan",
    "decode_call",
    "decode_receipt",
]
__version__ = "0.1.0"
