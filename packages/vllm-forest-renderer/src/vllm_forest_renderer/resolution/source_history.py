"""The built-in resolver: the longest captured history that the request repeats.

Guarantees: every committed call is considered, however old; the longest compatible prefix wins;
exposed reasoning that comes back must be the captured reasoning (it may be
left out); only user and tool items may follow; equal matches are settled by echoed native ids or
refused, never chosen silently.
"""

from collections.abc import Iterable, Sequence

from forest_schema.items import SourceHistory
from forest_schema.reasons import Reason
from forest_schema.records import CallRecord, CompletionStatus
from forest_schema.version import NORMALIZATION_VERSION

from vllm_forest_renderer.resolution.protocol import AmbiguousParent, Candidate, Root

SUFFIX_ROLES = frozenset({"user", "tool"})
"""Roles of items that may follow a captured turn."""

_PARENT_STATUS = frozenset({CompletionStatus.COMPLETED, CompletionStatus.INCOMPLETE})


class SourceHistoryResolver:
    """Matches the request's items against the replay summaries of the attempt's calls."""

    def resolve(
        self,
        history: SourceHistory,
        *,
        render_option_digest: str,
        model: str,
        calls: Sequence[CallRecord],
    ) -> Candidate | Root:
        """See `PrefixResolver.resolve`."""
        # Captured histories end with an assistant turn, and only user and tool items may follow
        # one: the longest compatible prefix can end at the last assistant item only.
        count = len(history.items)
        while count and history.items[count - 1].role in SUFFIX_ROLES:
            count -= 1
        if count == len(history.items) or not count:
            return Root(Reason.NO_MATCH)
        by_id = {call.call_id: call for call in calls}
        wanted = history.equivalence_digests[count]
        matches = [
            call
            for call in calls
            if call.replay.equivalence_digest == wanted
            and call.replay.source_item_count == count
            and call.replay.normalization_version == NORMALIZATION_VERSION
            and call.status in _PARENT_STATUS
            and _reasoning_agrees(history, count, call, by_id)
        ]
        if not matches:
            return Root(Reason.NO_MATCH)
        same_model = [call for call in matches if call.model == model]
        if not same_model:
            return Root(Reason.MODEL_DIFFERS)
        admitted = [
            call for call in same_model if call.replay.render_option_digest == render_option_digest
        ]
        if not admitted:
            return Root(Reason.RENDER_OPTIONS_DIFFER)
        parent = _only_one(admitted, history, count, by_id)
        return Candidate(
            parent=parent,
            item_count=count,
            used_null_empty_equivalence=history.digests[count] != parent.replay.source_digest,
        )


def _chain(call: CallRecord, by_id: dict[str, CallRecord]) -> Iterable[CallRecord]:
    """The call and its ancestors."""
    current: CallRecord | None = call
    while current is not None:
        yield current
        parent_id = current.parent_call_id
        current = by_id.get(parent_id) if parent_id is not None else None


def _reasoning_agrees(
    history: SourceHistory, count: int, call: CallRecord, by_id: dict[str, CallRecord]
) -> bool:
    """Whether each reasoning text in the request's prefix is the captured one at its place."""
    shown = history.reasoning(0, count)
    if not shown:
        return True
    captured = {
        index: mark for member in _chain(call, by_id) for index, mark in member.replay.reasoning
    }
    return all(captured.get(index) == mark for index, mark in shown)


def _only_one(
    matches: list[CallRecord], history: SourceHistory, count: int, by_id: dict[str, CallRecord]
) -> CallRecord:
    """The match that the echoed native ids point to. Raises `AmbiguousParent`."""
    if len(matches) == 1:
        return matches[0]
    echoed = {native for item in history.items[:count] for native in item.native_ids}
    given = {
        native
        for call in by_id.values()
        for native in (call.output.response_id, *call.output.item_ids)
    }
    named = echoed & given
    pointed = []
    for call in matches:
        own = {
            native
            for member in _chain(call, by_id)
            for native in (member.output.response_id, *member.output.item_ids)
        }
        if named and named <= own:
            pointed.append(call)
    if len(pointed) == 1:
        return pointed[0]
    raise AmbiguousParent([call.call_id for call in pointed or matches])
