"""Everything that the engine says about one generation.

Guarantees: tokens, log-probabilities and routed experts are taken from the engine's own outputs, in
order, one log-probability per generated token; what is missing or is no log-probability raises
`CaptureFailed`, it is never filled in. Routed experts stay here: they are no part of an answer.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from forest_schema.reasons import Reason
from forest_schema.records import CompletionStatus, WeightSpan
from numpy.typing import NDArray

from vllm_forest_renderer.errors import ForestError

_HIGHEST_LOGPROB = 1e-3
"""Rounding may lift a probability of one slightly above it."""

_STATUS = {
    "stop": CompletionStatus.COMPLETED,
    "tool_calls": CompletionStatus.COMPLETED,
    "length": CompletionStatus.INCOMPLETE,
    "content_filter": CompletionStatus.INCOMPLETE,
    "repetition": CompletionStatus.INCOMPLETE,
    "abort": CompletionStatus.FAILED,
    "error": CompletionStatus.FAILED,
}


class CaptureFailed(ForestError):
    """The generation cannot be captured; `reason` has the effect `capture_failure`."""


def completion_status(finish_reason: str | None) -> CompletionStatus:
    """Status that a finish reason stands for; `unknown` for one that is not known."""
    return _STATUS.get(finish_reason or "", CompletionStatus.UNKNOWN)


@dataclass
class Generation:
    """Accumulates the outputs of one request with one completion, streamed or final."""

    prompt_tokens: list[int] | None = None
    tokens: list[int] = field(default_factory=list)
    """Generated token ids `[generated_len]`."""
    logprobs: list[float] = field(default_factory=list)
    """Processed log-probability of each generated token `[generated_len]`, natural log."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_prompt_tokens: int | None = None
    reported_spans: list[tuple[str, int, int]] | None = None
    """(version, start, end) as the engine reports them; None where it does not."""
    routes: NDArray[Any] | None = None
    """Routed experts `[rows, layers, top_k]` as the engine reports them at the end."""
    finished: bool = False

    def add(self, output: Any) -> None:
        """Take in one `RequestOutput`. Raises `CaptureFailed`."""
        if output.prompt_token_ids is not None:
            self.prompt_tokens = output.prompt_token_ids
        if output.num_cached_tokens is not None:
            self.cached_prompt_tokens = output.num_cached_tokens
        (completion,) = output.outputs
        tokens = list(completion.token_ids or ())
        self.logprobs.extend(_sampled_logprobs(tokens, completion.logprobs))
        self.tokens.extend(tokens)
        if completion.routed_experts is not None:
            self.routes, completion.routed_experts = completion.routed_experts, None
        if completion.finish_reason is not None:
            self.finish_reason = str(completion.finish_reason)
            self.stop_reason = completion.stop_reason
            spans = getattr(completion, "weight_versions", None)
            if spans is not None:
                self.reported_spans = [(span.version, span.start, span.end) for span in spans]
        self.finished = self.finished or bool(output.finished)

    def check(self, served_prompt: list[int]) -> None:
        """Refuse a generation that is not complete and exact. Raises `CaptureFailed`."""
        if not self.finished or self.finish_reason is None:
            raise CaptureFailed(
                Reason.REQUEST_FINISHED_WITHOUT_STAGED_COORDINATES,
                "the engine ended the request without a finished output",
            )
        if self.prompt_tokens is not served_prompt and self.prompt_tokens != served_prompt:
            raise CaptureFailed(
                Reason.ENGINE_OUTPUT_WITHOUT_TOKENS,
                "the engine's prompt ids are not the ids that it was given",
            )
        failed = completion_status(self.finish_reason) is CompletionStatus.FAILED
        if not self.tokens and not failed:
            raise CaptureFailed(
                Reason.ENGINE_OUTPUT_WITHOUT_TOKENS,
                f"the engine finished with {self.finish_reason!r} and gave no token ids",
            )

    def weight_spans(self, whole_version: str | None) -> tuple[WeightSpan, ...]:
        """Weight versions over `[0, generated_len)`.

        `whole_version` made all tokens where the engine does not label them. Raises
        `CaptureFailed` for spans that are missing or do not cover the generation exactly.
        """
        length = len(self.tokens)
        if not length:
            return ()
        if whole_version is not None:
            return (WeightSpan(version=whole_version, start=0, end=length),)
        position = 0
        spans = []
        for version, start, end in self.reported_spans or ():
            if start == end:
                continue
            if start != position or end < start:
                break
            spans.append(WeightSpan(version=version, start=start, end=end))
            position = end
        if position != length:
            raise CaptureFailed(
                Reason.ENGINE_OUTPUT_WITHOUT_TOKENS,
                f"the engine's weight versions cover {position} of {length} generated tokens",
            )
        return tuple(spans)


def _sampled_logprobs(tokens: list[int], logprobs: Any) -> list[float]:
    if not tokens:
        return []
    if logprobs is None or len(logprobs) != len(tokens):
        raise CaptureFailed(
            Reason.ENGINE_OUTPUT_WITHOUT_TOKENS,
            f"{0 if logprobs is None else len(logprobs)} log-probabilities for {len(tokens)} "
            "generated tokens",
        )
    if hasattr(logprobs, "start_indices") and len(logprobs.token_ids) == len(tokens):
        # One entry per position: the sampled token's, without building a dictionary for each.
        values = list(logprobs.logprobs)
        found = list(logprobs.token_ids)
    else:
        values, found = [], []
        for token, entries in zip(tokens, logprobs, strict=True):
            entry = entries.get(token) if entries else None
            if entry is None:
                break
            values.append(entry.logprob)
            found.append(token)
    if found != tokens:
        raise CaptureFailed(
            Reason.ENGINE_OUTPUT_WITHOUT_TOKENS,
            "the engine gave no log-probability for a token that it sampled",
        )
    if any(math.isnan(value) or value > _HIGHEST_LOGPROB for value in values):
        raise CaptureFailed(
            Reason.INVALID_LOGPROB, "the engine gave a value that is no log-probability"
        )
    return values
