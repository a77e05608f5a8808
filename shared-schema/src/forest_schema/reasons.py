"""The fixed vocabulary of rejections, roots, failures and masks.

Guarantees: one string per reason, shared by code, ledger, metrics and docs; `EFFECTS` says what
each reason does, and every reason has exactly one effect.
"""

from enum import StrEnum


class Effect(StrEnum):
    """What a reason does to the request, the call, the rollout, the group or the run."""

    REFUSE_REQUEST = "refuse_request"
    """The request is answered with an error and nothing is written."""
    ROOT = "root"
    """The call is captured without a parent, and the record says why."""
    CAPTURE_FAILURE = "capture_failure"
    """The ledger records a failed call; the rollout is masked unless the exception of I9 holds."""
    MASK_ROLLOUT = "mask_rollout"
    """The rollout carries no loss and no vote in the baseline; its siblings train."""
    MASK_VERIFIED = "mask_verified"
    """The rollout carries no loss; `grpo.masked_reward_policy` decides about its vote."""
    FILTER_ROLLOUT = "filter_rollout"
    """The rollout carries no loss and keeps its vote once."""
    DROP_GROUP = "drop_group"
    """The whole prompt group leaves the step."""
    STOP_RUN = "stop_run"
    """The run stops: the data cannot be trusted or the configuration is wrong."""


class Reason(StrEnum):
    """Every reason of the product. The value is what ledgers, metrics and docs show."""

    # Request refused, nothing written.
    MALFORMED_REQUEST = "malformed_request"
    UNSUPPORTED_REQUEST = "unsupported_request"
    UNSUPPORTED_ITEM = "unsupported_item"
    UNREPRODUCIBLE_SAMPLING = "unreproducible_sampling"
    AMBIGUOUS_PARENT = "ambiguous_parent"
    MISSING_PARENT_EVIDENCE = "missing_parent_evidence"
    MEDIA_MISMATCH = "media_mismatch"
    ATTEMPT_UNKNOWN = "attempt_unknown"
    ATTEMPT_CLOSED = "attempt_closed"
    CONTROL_TOKEN_REQUIRED = "control_token_required"
    STORE_UNAVAILABLE = "store_unavailable"

    # The call becomes a root.
    NO_MATCH = "no_match"
    RENDER_OPTIONS_DIFFER = "render_options_differ"
    BOUNDARY_NOT_PROVABLE = "boundary_not_provable"
    RENDERER_NOT_QUALIFIED = "renderer_not_qualified"
    MODEL_DIFFERS = "model_differs"

    # Capture failures.
    REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES = "request_finished_without_staged_coordinates"
    CLIENT_DISCONNECTED = "client_disconnected"
    ENGINE_ERROR = "engine_error"
    ENGINE_OUTPUT_WITHOUT_TOKENS = "engine_output_without_tokens"
    INVALID_LOGPROB = "invalid_logprob"
    INVALID_ROUTES = "invalid_routes"
    STAGING_FAILED = "staging_failed"
    PROCESS_LOST = "process_lost"

    # The rollout is masked.
    CAPTURE_INCOMPLETE = "capture_incomplete"
    CAPTURE_PENDING = "capture_pending"
    FAILED_SELECTED_CALL = "failed_selected_call"
    SELECTION_NOT_CLOSED = "selection_not_closed"
    MEDIA_AUTHENTICATION_FAILED = "media_authentication_failed"
    UNREPRODUCIBLE_CALL = "unreproducible_call"
    MISSING_ROUTES = "missing_routes"
    FOREST_TRAINING_OFF = "forest_training_off"
    EVIDENCE_ERROR = "evidence_error"

    # Masked after verification.
    LOGPROB_ERROR_ABOVE_THRESHOLD = "logprob_error_above_threshold"

    # Filtered, keeps its vote.
    OVERLONG = "overlong"
    ENVIRONMENT_MASK = "environment_mask"

    # Group dropped.
    ROLLOUT_TIMEOUT = "rollout_timeout"
    TRANSPORT_FAILURE = "transport_failure"
    HARNESS_ERROR = "harness_error"
    BELOW_MIN_VALID_FRACTION = "below_min_valid_fraction"
    NO_VALID_LAYOUT = "no_valid_layout"

    # The run stops.
    DIGEST_MISMATCH = "digest_mismatch"
    UNREADABLE_SHARD = "unreadable_shard"
    FOREIGN_SHARD = "foreign_shard"
    SCHEMA_NOT_KNOWN = "schema_not_known"
    DROP_BUDGET_EXCEEDED = "drop_budget_exceeded"
    NO_RETAINED_TOKENS = "no_retained_tokens"
    CONFIGURATION = "configuration"


def _effects() -> dict[Reason, Effect]:
    groups = {
        Effect.REFUSE_REQUEST: (
            Reason.MALFORMED_REQUEST,
            Reason.UNSUPPORTED_REQUEST,
            Reason.UNSUPPORTED_ITEM,
            Reason.UNREPRODUCIBLE_SAMPLING,
            Reason.AMBIGUOUS_PARENT,
            Reason.MISSING_PARENT_EVIDENCE,
            Reason.MEDIA_MISMATCH,
            Reason.ATTEMPT_UNKNOWN,
            Reason.ATTEMPT_CLOSED,
            Reason.CONTROL_TOKEN_REQUIRED,
            Reason.STORE_UNAVAILABLE,
        ),
        Effect.ROOT: (
            Reason.NO_MATCH,
            Reason.RENDER_OPTIONS_DIFFER,
            Reason.BOUNDARY_NOT_PROVABLE,
            Reason.RENDERER_NOT_QUALIFIED,
            Reason.MODEL_DIFFERS,
        ),
        Effect.CAPTURE_FAILURE: (
            Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES,
            Reason.CLIENT_DISCONNECTED,
            Reason.ENGINE_ERROR,
            Reason.ENGINE_OUTPUT_WITHOUT_TOKENS,
            Reason.INVALID_LOGPROB,
            Reason.INVALID_ROUTES,
            Reason.STAGING_FAILED,
            Reason.PROCESS_LOST,
        ),
        Effect.MASK_ROLLOUT: (
            Reason.CAPTURE_INCOMPLETE,
            Reason.CAPTURE_PENDING,
            Reason.FAILED_SELECTED_CALL,
            Reason.SELECTION_NOT_CLOSED,
            Reason.MEDIA_AUTHENTICATION_FAILED,
            Reason.UNREPRODUCIBLE_CALL,
            Reason.MISSING_ROUTES,
            Reason.FOREST_TRAINING_OFF,
            Reason.EVIDENCE_ERROR,
        ),
        Effect.MASK_VERIFIED: (Reason.LOGPROB_ERROR_ABOVE_THRESHOLD,),
        Effect.FILTER_ROLLOUT: (Reason.OVERLONG, Reason.ENVIRONMENT_MASK),
        Effect.DROP_GROUP: (
            Reason.ROLLOUT_TIMEOUT,
            Reason.TRANSPORT_FAILURE,
            Reason.HARNESS_ERROR,
            Reason.BELOW_MIN_VALID_FRACTION,
            Reason.NO_VALID_LAYOUT,
        ),
        Effect.STOP_RUN: (
            Reason.DIGEST_MISMATCH,
            Reason.UNREADABLE_SHARD,
            Reason.FOREIGN_SHARD,
            Reason.SCHEMA_NOT_KNOWN,
            Reason.DROP_BUDGET_EXCEEDED,
            Reason.NO_RETAINED_TOKENS,
            Reason.CONFIGURATION,
        ),
    }
    return {reason: effect for effect, reasons in groups.items() for reason in reasons}


EFFECTS = _effects()
"""Reason -> what it does."""
