"""One captured request on its way through vLLM.

Guarantees: vLLM's code between the route and the engine hands nothing of ours along, so the call
travels in a context variable of the request's task. Outside the capture routes it is None and
every hook stands aside. It does not reach thread pools: hooks are coroutine methods only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from forest_schema.items import SourceHistory
from forest_schema.reasons import Reason
from forest_schema.records import CallRecord, SamplingRecord

from vllm_forest_renderer.capture.generation import Generation
from vllm_forest_renderer.media.cache import Tensors
from vllm_forest_renderer.media.items import MediaItem
from vllm_forest_renderer.media.retained import Captured
from vllm_forest_renderer.resolution import Candidate, PrefixResolver


@dataclass(frozen=True, slots=True)
class Predecessor:
    """The verified parent of a call."""

    parent: CallRecord
    used_null_empty_equivalence: bool


@dataclass(kw_only=True)
class Call:
    """State of one request; filled from left to right by route, renderer and engine proxy."""

    attempt_id: str
    api: str
    model: str
    history: SourceHistory
    calls: tuple[CallRecord, ...]
    """Committed calls of the attempt when the request arrived, in capture order."""
    resolver: PrefixResolver
    history_tokens: Callable[[CallRecord, tuple[CallRecord, ...]], Awaitable[list[int]]]
    """Whole token history of a committed call. Raises `ForestError` (`missing_parent_evidence`)."""
    stored_media: Callable[[Sequence[Captured]], Awaitable[list[Tensors]]]
    """Tensors of captured occurrences. Raises `ForestError` (`missing_parent_evidence`)."""
    admit: Callable[["Call", Any], Awaitable[None]]
    """Checks the effective sampling parameters and writes the intent. Raises `ForestError`."""
    around_generation: Callable[
        [], AbstractAsyncContextManager[Callable[[], Awaitable[str | None]]]
    ]
    """See `EngineControl.generation`."""

    # The renderer fills in:
    tok_params: Any = None
    render_option_digest: str | None = None
    candidate: Candidate | None = None
    predecessor: Predecessor | None = None
    root_reason: Reason | None = None
    prompt_tokens: list[int] | None = None
    """The served prompt, as handed to the engine."""
    tail_tokens: list[int] = field(default_factory=list)
    """The part of the prompt that is not the parent's history."""
    inherited_tokens: list[int] = field(default_factory=list)
    """The parent's history, where it is spliced in after the processing of media."""
    retained: Sequence[Captured] = ()
    """Occurrences in the parent's history, in prompt order."""
    media: Sequence[MediaItem] = ()
    """Items of the served prompt that are not the parent's, in prompt order."""

    # The engine proxy fills in:
    call_id: str | None = None
    order: int = -1
    started_at: float = 0.0
    partition: str = ""
    sampling: SamplingRecord | None = None
    weight_version: str | None = None
    """Version that made all tokens, for engines that do not label them."""
    generation: Generation | None = None
    completing: bool = False
    """The generation is finished; its capture goes on whatever becomes of the request."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the intent is durable."""
    parser: Any = None
    """vLLM's parser of the answer, where the server has one."""
    refusal: Exception | None = None
    """What the proxy raised; vLLM's streams swallow it."""


CURRENT: ContextVar[Call | None] = ContextVar("forest_call", default=None)
