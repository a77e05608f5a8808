"""A normalised history and its chained digests.

Guarantees: immutable; `digests[k]` depends on the first k items alone, so that a prefix of any
length is compared by one digest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from forest_schema.digests import EMPTY_CHAIN


class SourceItem(msgspec.Struct, frozen=True):
    """One normalised item of a history."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    fingerprint: str
    """Content without reasoning; null and empty assistant content are told apart."""
    equivalence_fingerprint: str
    """The same with null and empty assistant content beside tool calls made equal."""
    reasoning_fingerprint: str | None = None
    """Exposed reasoning of an assistant turn; None where there is none."""
    native_ids: tuple[str, ...] = ()
    """Ids that the server gave (tool calls, Responses items), in order."""
    media: tuple[str, ...] = ()
    """Identities of its images, in order."""


@dataclass(frozen=True)
class SourceHistory:
    """A normalised history with its chained digests."""

    items: tuple[SourceItem, ...]
    digests: tuple[str, ...] = field(repr=False)
    """`digests[k]` covers the first k items; `[0]` is `EMPTY_CHAIN`."""
    equivalence_digests: tuple[str, ...] = field(repr=False)
    call_numbers: Mapping[str, int] = field(repr=False, default_factory=dict)
    """Tool-call id -> number of the newest call with this id; calls are numbered from 1."""
    call_count: int = 0

    def media(self, stop: int | None = None) -> tuple[str, ...]:
        """Identities of the images in items `[0, stop)`, in order."""
        return tuple(identity for item in self.items[:stop] for identity in item.media)

    def reasoning(self, start: int, stop: int) -> tuple[tuple[int, str], ...]:
        """(item index, fingerprint) of the reasoning in items `[start, stop)`."""
        return tuple(
            (index, item.reasoning_fingerprint)
            for index, item in enumerate(self.items[start:stop], start)
            if item.reasoning_fingerprint is not None
        )


EMPTY_HISTORY = SourceHistory((), (EMPTY_CHAIN,), (EMPTY_CHAIN,))
