"""Prometheus metrics of capture, on the default registry that vLLM's `/metrics` serves.

Guarantees: names start with `forest_` (vLLM unregisters collectors whose name starts with
`vllm:`), labels take values of fixed vocabularies only, and nothing here holds content.
"""

from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128)


class CommitMetrics(NamedTuple):
    """Metrics of one group committer."""

    seconds: Histogram
    batch_size: Histogram
    queue_depth: Gauge


def _commit_metrics(what: str, description: str) -> CommitMetrics:
    return CommitMetrics(
        seconds=Histogram(
            f"forest_{what}_commit_seconds",
            f"Time of one durable commit of {description}",
            buckets=_SECONDS,
        ),
        batch_size=Histogram(
            f"forest_{what}_commit_batch",
            f"Operations in one durable commit of {description}",
            buckets=_BATCH,
        ),
        queue_depth=Gauge(
            f"forest_{what}_queue_depth",
            f"Operations that wait for a durable commit of {description}",
            multiprocess_mode="livesum",
        ),
    )


LEDGER = _commit_metrics("ledger", "the ledger")
STORE = _commit_metrics("store", "the delta store")

INTENTS = Counter("forest_call_intents", "Calls admitted", ["api"])
COMMITTED = Counter("forest_calls_committed", "Calls captured completely", ["api"])
FAILURES = Counter("forest_call_failures", "Recorded capture failures", ["reason"])
LATE_COMMITS = Counter(
    "forest_late_commits", "Captures that came after their attempt was sealed, and stay isolated"
)
STORE_BYTES = Counter("forest_store_bytes", "Bytes written into shards", ["kind"])

ROOTS = Counter("forest_root_calls", "Captured calls without a parent", ["reason"])
CONTINUATIONS = Counter("forest_continuation_calls", "Captured calls that continue another")
SPLICED_TOKENS = Counter("forest_spliced_tokens", "Prompt tokens taken over from a parent")
GENERATED_TOKENS = Counter("forest_generated_tokens", "Captured generated tokens")
REFUSALS = Counter("forest_refused_requests", "Requests refused with nothing written", ["reason"])
