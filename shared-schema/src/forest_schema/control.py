"""Bodies of the server's control routes.

Guarantees: the server and the trainer's client use the same typed messages; every body that
comes from the server carries the schema version. All routes are under `CONTROL_PREFIX`, need
the control token and answer errors as `ErrorBody`. The token comes as `Authorization: Bearer
<control token>`, or in `CONTROL_TOKEN_HEADER` where `Authorization` carries vLLM's API key.

| method and path below `CONTROL_PREFIX` | request body | answer |
| --- | --- | --- |
| GET `/handshake` | - | `Handshake` |
| POST `/attempts` | `OpenAttempt` | `AttemptOpened` |
| POST `/attempts/{attempt}/close` | `CloseAttempt` | `records.Receipt` |
| GET `/attempts/{attempt}/receipt` | - | `records.Receipt` |
| POST `/attempts/{attempt}/restore` | `RestoreAttempt` | `AttemptOpened` |
| DELETE `/attempts/{attempt}` | - | `CleanupReport` |
| DELETE `/partitions/{partition}` | - | `CleanupReport` |
| GET `/shards/{partition}/{shard}` | HTTP `Range` header | shard bytes (206 or 200) |
| POST `/pause`, `/resume` | - | `EngineState` |
| POST `/weights` | `WeightUpdate` | `EngineState` |
"""

from typing import Any

import msgspec

from forest_schema.version import (
    CAPTURE_SCHEMA,
    DIGEST_VERSION,
    NORMALIZATION_VERSION,
    REQUIRED_FEATURES,
)

ATTEMPT_PREFIX = "/v1/forest"
"""`{ATTEMPT_PREFIX}/{attempt}` is the base_url of an attempt's OpenAI client."""

CONTROL_PREFIX = "/v1/forest/control"

CONTROL_TOKEN_HEADER = "x-forest-control-token"
"""Header of the control token on a server that vLLM's `--api-key` guards."""


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer checks before the first rollout."""

    schema: int = CAPTURE_SCHEMA
    required_features: tuple[str, ...] = REQUIRED_FEATURES
    normalization_version: int = NORMALIZATION_VERSION
    digest_version: int = DIGEST_VERSION
    renderer_version: str
    vllm_version: str
    store: str
    model: str
    """Served model name."""
    model_digest: str
    """Digest of the model directory's config.json."""
    tokenizer_digest: str
    template_digest: str
    processor_digest: str | None = None
    """None for a text model."""
    max_model_len: int
    logprobs_mode: str
    weight_version: str
    features: tuple[str, ...]
    """Optional abilities: `chat`, `responses`, `measure`, `streaming`, `weights`, ..."""


class OpenAttempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of the logical rollout that an attempt captures."""

    rollout_id: str
    group_id: str
    partition: str
    """Run and step, e.g. `run1-step3`: letters, digits, dot, dash and underscore only."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class AttemptOpened(msgspec.Struct, frozen=True, kw_only=True):
    """A new attempt: knowing its id is the harness's only right."""

    schema: int = CAPTURE_SCHEMA
    attempt_id: str
    base_path: str
    """Path of the OpenAI base_url on the server that answered."""


class CloseAttempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Close admissions, wait for admitted calls, seal the deltas."""

    wait_s: float = 300.0
    """Longest wait for admitted calls that have no recorded failure."""


class RestoreAttempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move captured calls into a fresh attempt of the same rollout, group and partition."""

    calls: tuple[str, ...] | None = None
    """Ids of the committed calls that go on, each with its parent; None takes all of them. The
    others are deleted."""


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load weights into the running engine: pause, load, reset the prefix cache, resume."""

    path: str
    """Directory of a Hugging Face checkpoint that the engine's workers can read."""
    version: str
    """Name of these weights, recorded with every token that they generate."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of generation after a control call."""

    schema: int = CAPTURE_SCHEMA
    paused: bool
    weight_version: str


class MeasureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of an attempt's `/measure`: a length, never tokens."""

    schema: int = CAPTURE_SCHEMA
    count: int
    """Prompt tokens that generation would use for the same request in the same ledger state."""
    continuation: bool
    """The prompt would continue a captured call."""
    features: tuple[str, ...] = ("measure_v1", "exact_splice")
    """What this count takes into account, for a client that depends on it."""


class CleanupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a cleanup removed and what it had to keep."""

    schema: int = CAPTURE_SCHEMA
    removed_calls: int
    removed_shards: int
    kept_pending: tuple[str, ...] = ()
    """Calls whose writes may still arrive; they go with the partition."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every refusal; the same shape as an OpenAI error."""

    class Error(msgspec.Struct, frozen=True, kw_only=True):
        """The error itself."""

        message: str
        type: str
        """A `Reason` value."""
        param: str | None = None
        """Name of the field that is wrong."""
        code: int

    error: Error
