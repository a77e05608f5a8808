"""Effective sampling parameters, and whether the trainer can rebuild the distribution.

Guarantees: what is recorded is what the engine samples with, after server defaults; temperature,
top_p, top_k, seed, stops and lengths are reproducible, everything else that changes the
distribution is named.
"""

from collections.abc import Collection
from typing import Any

from forest_schema.records import SamplingRecord

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (0, None),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}
"""Parameters that change the distribution -> values that do not."""

SENT_AS = {"structured_outputs": "structured_outputs (response_format, a required or named tool)"}
"""Parameters that clients send under other names -> how a message names them."""


def unreproducible_parameters(params: Any, custom_processors: Collection[str] = ()) -> list[str]:
    """Names of what keeps the trainer from rebuilding the sampled distribution.

    `params` are vLLM's `SamplingParams`; `custom_processors` names what the server itself does to
    every distribution.
    """
    found = [
        name
        for name, neutral in _NEUTRAL.items()
        if getattr(params, name, neutral[0]) not in neutral
    ]
    return [*found, *sorted(custom_processors)]


def sampling_record(params: Any, *, logprobs_mode: str, reproducible: bool) -> SamplingRecord:
    """The record of vLLM's effective `SamplingParams`."""
    return SamplingRecord(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(int(params.top_k), 0),
        min_p=float(params.min_p),
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop=tuple(params.stop or ()),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias={str(token): float(bias) for token, bias in (params.logit_bias or {}).items()},
        structured_output=getattr(params, "structured_outputs", None) is not None,
        logprobs_mode=logprobs_mode,
        reproducible=reproducible,
    )
