"""The contract between the serving routes and a prefix resolver.

Guarantees: a resolver sees only normalised items, digests and committed records of one attempt;
what it proposes is checked (`verify_candidate`) before any captured token is reused, so that a
resolver cannot make the server splice a history that does not match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forest_schema.items import SourceHistory
from forest_schema.reasons import Reason
from forest_schema.records import CallRecord
from forest_schema.version import NORMALIZATION_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A proposed predecessor. It is admission only: the boundary is proven afterwards."""

    parent: CallRecord
    item_count: int
    """Leading items of the request that the parent's history covers."""
    used_null_empty_equivalence: bool
    """Matching needed null and empty assistant content beside tool calls to be one value."""


@dataclass(frozen=True, slots=True)
class Root:
    """The request continues no captured call."""

    reason: Reason
    """A reason whose effect is `root`."""


class AmbiguousParent(ValueError):
    """Several captured calls continue equally well and no echoed id tells them apart."""

    def __init__(self, call_ids: Sequence[str]) -> None:
        super().__init__(
            f"the request continues {len(call_ids)} captured calls equally well "
            f"({', '.join(call_ids)}); echo the `id` of the answer (or its tool-call ids) in the "
            "assistant message to say which"
        )
        self.call_ids = tuple(call_ids)


class MissingParentEvidence(ValueError):
    """A parent was proposed and what proves it is missing or contradicts it."""


@runtime_checkable
class PrefixResolver(Protocol):
    """Finds the captured call that a request continues. Registered by entry point:
    group `vllm_forest_renderer.prefix_resolvers`, a class or factory without arguments.
    """

    def resolve(
        self,
        history: SourceHistory,
        *,
        render_option_digest: str,
        model: str,
        calls: Sequence[CallRecord],
    ) -> Candidate | Root:
        """The predecessor of a request, or why it has none.

        `history` holds the request's items, `calls` every committed call of the attempt in
        capture order. Must be pure. Raises `AmbiguousParent`.
        """
        ...


def verify_candidate(
    candidate: Candidate, history: SourceHistory, render_option_digest: str
) -> None:
    """Check a resolver's proposal against the digests. Raises `MissingParentEvidence`.

    A record without the current normalisation's proof, or a claim that the digests do not bear
    out, is rejected rather than assumed to be exact.
    """
    parent, count = candidate.parent, candidate.item_count
    replay = parent.replay
    where = f"proposed parent {parent.call_id}"
    if replay.normalization_version != NORMALIZATION_VERSION:
        raise MissingParentEvidence(
            f"{where} was matched with normalisation {replay.normalization_version}, this server "
            f"uses {NORMALIZATION_VERSION}"
        )
    if not 0 < count < len(history.items) or count != replay.source_item_count:
        raise MissingParentEvidence(
            f"{where} covers {replay.source_item_count} items, the proposal says {count} of "
            f"{len(history.items)}"
        )
    if history.equivalence_digests[count] != replay.equivalence_digest:
        raise MissingParentEvidence(f"{where}: its source digest is not the request's")
    exact = history.digests[count] == replay.source_digest
    if exact == candidate.used_null_empty_equivalence:
        raise MissingParentEvidence(
            f"{where}: the proposal says used_null_empty_equivalence="
            f"{candidate.used_null_empty_equivalence}, the digests say {not exact}"
        )
    if replay.render_option_digest != render_option_digest:
        raise MissingParentEvidence(f"{where} was rendered with other options")
