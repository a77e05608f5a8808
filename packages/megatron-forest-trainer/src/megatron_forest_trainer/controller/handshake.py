"""What must agree between the server and the trainer before the first rollout.

Guarantees: `check` is pure; it collects every disagreement and raises one error that names each
with both values and what to change.
"""

from dataclasses import dataclass

from forest_schema.control import Handshake
from forest_schema.model_files import ModelDigests
from forest_schema.routes import ROUTES
from forest_schema.version import DIGEST_VERSION, NORMALIZATION_VERSION

PROCESSED_LOGPROBS = "processed_logprobs"

_CURES = {
    ROUTES: "start it with --enable-return-routed-experts, if its model has experts, or set "
    "policy.router_replay.enabled: false",
}
"""Feature -> what makes a server have it."""


class HandshakeError(RuntimeError):
    """The server does not capture what this trainer would train on."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The trainer's side of the handshake."""

    digests: ModelDigests
    """Of the trainer's own Hugging Face directory."""
    max_row_tokens: int
    """`policy.max_total_sequence_length`."""
    features: frozenset[str]
    """Server features that the configuration needs, e.g. `chat`, `weights`."""


def check(handshake: Handshake, expected: Expectation) -> None:
    """Raise `HandshakeError` listing everything that disagrees."""
    problems = [
        *_versions(handshake),
        *_digests(handshake, expected.digests),
        *_limits(handshake, expected),
    ]
    if problems:
        raise HandshakeError(
            "the server and the trainer do not fit together:\n- " + "\n- ".join(problems)
        )


def _versions(handshake: Handshake) -> list[str]:
    pairs = (
        ("source normalisation", handshake.normalization_version, NORMALIZATION_VERSION),
        ("digest format", handshake.digest_version, DIGEST_VERSION),
    )
    return [
        f"{what}: the server has version {theirs}, the trainer {ours}; upgrade "
        "vllm-forest-renderer and megatron-forest-trainer together"
        for what, theirs, ours in pairs
        if theirs != ours
    ]


def _digests(handshake: Handshake, ours: ModelDigests) -> list[str]:
    pairs = (
        ("model configuration", handshake.model_digest, ours.model),
        ("tokenizer", handshake.tokenizer_digest, ours.tokenizer),
        ("chat template", handshake.template_digest, ours.template),
        ("media processor", handshake.processor_digest, ours.processor),
    )
    return [
        f"{what}: digest {theirs} on the server, {mine} in the trainer's model directory; start "
        "the server on the directory that policy.model_name names"
        for what, theirs, mine in pairs
        if theirs != mine
    ]


def _limits(handshake: Handshake, expected: Expectation) -> list[str]:
    problems = []
    if handshake.logprobs_mode != PROCESSED_LOGPROBS:
        problems.append(
            f"logprobs_mode is {handshake.logprobs_mode}; start the server with "
            f"--logprobs-mode {PROCESSED_LOGPROBS}"
        )
    if handshake.max_model_len > expected.max_row_tokens:
        problems.append(
            f"the server accepts contexts of {handshake.max_model_len} tokens, "
            f"policy.max_total_sequence_length is {expected.max_row_tokens}: raise it, or start "
            f"the server with --max-model-len {expected.max_row_tokens}"
        )
    missing = sorted(expected.features - set(handshake.features))
    if missing:
        cures = "".join(f"; {_CURES[feature]}" for feature in missing if feature in _CURES)
        problems.append(
            f"the server lacks the feature(s) {', '.join(missing)}; it has "
            f"{', '.join(sorted(handshake.features)) or 'none'}{cures}"
        )
    return problems
