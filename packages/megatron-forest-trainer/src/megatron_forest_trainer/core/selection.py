"""Which captured calls of a rollout train.

Guarantees: a selection is a nonempty tuple of distinct, unchanged records of one attempt with the
response id of its scored call; the built-in policies give it in capture order. Membership comes
from what the harness returned or from an explicit policy, never from the shape of the capture graph
and never from which call came last.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from forest_schema import CallRecord, CompletionStatus

from megatron_forest_trainer.core.errors import EvidenceError, SelectionError
from megatron_forest_trainer.core.evidence import Evidence, read_evidence
from megatron_forest_trainer.core.matching import Matcher


class Selection(NamedTuple):
    """The calls that train, and the scored one among them."""

    records: tuple[CallRecord, ...]
    """Their order sets the priority of roots and paths."""
    terminal_response_id: str | None
    """Served response id of the scored call; None is refused for training."""


class SelectionPolicy(Protocol):
    """Chooses the calls of a rollout that train.

    `records` are the committed calls of this attempt in capture order, `result` is the harness's
    ordinary result. Returns the selected records (nonempty, unique, unchanged; their order sets
    the priority of paths) and the response id of the scored call among them.
    """

    def __call__(
        self, records: list[CallRecord], result: dict[str, Any], /
    ) -> tuple[Sequence[CallRecord], str | None]:
        """The selected records and the scored response's id."""
        ...


def returned_history(records: Sequence[CallRecord], result: Mapping[str, Any]) -> Selection:
    """The calls whose generations the result returns or references.

    Every form of evidence that is present must name the same calls (see `core.evidence`). Raises
    `EvidenceError` for missing, contradictory, repeated or ambiguous evidence.
    """
    evidence = read_evidence(result)
    matcher = Matcher(records)
    chosen = _accepted(evidence, matcher)
    terminal = _stated_terminal(evidence, matcher)
    if terminal is None:
        terminal = chosen[-1]
        if terminal.call_id not in matcher.identified:
            _refuse_unordered_twins(terminal, chosen)
    if terminal.call_id not in {record.call_id for record in chosen}:
        raise EvidenceError(
            f"the scored response {terminal.output.response_id} is not in the returned history"
        )
    return Selection(in_capture_order(chosen), terminal.output.response_id)


def all_captured(records: Sequence[CallRecord], result: Mapping[str, Any]) -> Selection:
    """Every recorded call, abandoned retries and independent branches included.

    Left out are unscored leaves that failed, whose status is unknown, or that are incomplete for
    another cause than length. Raises `EvidenceError` where a call lacks its completion metadata
    or where the result does not say which call was scored.
    """
    evidence = read_evidence(result)
    matcher = Matcher(records)
    terminal = _stated_terminal(evidence, matcher) or _shown_terminal(evidence, matcher)
    parents = {record.parent_call_id for record in records}
    chosen = []
    for record in records:
        is_leaf = record.call_id not in parents
        if is_leaf and record.call_id != terminal.call_id and not is_trainable(record):
            continue
        chosen.append(record)
    return Selection(in_capture_order(chosen), terminal.output.response_id)


def select_responses(
    records: Sequence[CallRecord], response_ids: Sequence[str], scored: str
) -> Selection:
    """The calls that served `response_ids`, in that order, for adapters that know them.

    Raises `EvidenceError` for an id that no call served.
    """
    by_id = {record.output.response_id: record for record in records}
    missing = sorted({*response_ids, scored} - by_id.keys())
    if missing:
        raise EvidenceError(f"no captured call served response {', '.join(missing)}")
    return Selection(tuple(by_id[response_id] for response_id in response_ids), scored)


def check_selection(
    records: Sequence[CallRecord], chosen: Sequence[CallRecord], terminal_response_id: str | None
) -> Selection:
    """The selection that a policy returned, if it keeps the contract.

    Raises `SelectionError` for an empty selection, repeated, changed or foreign records and for a
    terminal outside of it, and `EvidenceError` for a missing terminal.
    """
    by_id = {record.call_id: record for record in records}
    if not chosen:
        raise SelectionError("the selection policy selected no call")
    seen: set[str] = set()
    for record in chosen:
        if not isinstance(record, CallRecord):
            raise SelectionError(f"the policy returned a {type(record).__name__}, not a record")
        if record.call_id in seen:
            raise SelectionError(f"call {record.call_id} was selected twice")
        seen.add(record.call_id)
        if record.call_id not in by_id:
            raise SelectionError(f"call {record.call_id} is not of this attempt's capture")
        if record is not by_id[record.call_id] and record != by_id[record.call_id]:
            raise SelectionError(f"call {record.call_id} was changed by the selection policy")
    if terminal_response_id is None:
        raise EvidenceError("the selection names no scored response")
    if terminal_response_id not in {record.output.response_id for record in chosen}:
        raise SelectionError(f"the scored response {terminal_response_id} was not selected")
    return Selection(tuple(chosen), terminal_response_id)


def in_capture_order(records: Iterable[CallRecord]) -> tuple[CallRecord, ...]:
    """Records by capture order, ties by call id."""
    return tuple(sorted(records, key=lambda record: (record.order, record.call_id)))


def is_trainable(record: CallRecord) -> bool:
    """The generation ended by itself or at a length limit.

    Raises `EvidenceError` where a completed or incomplete call has no finish reason.
    """
    if record.status in (CompletionStatus.FAILED, CompletionStatus.UNKNOWN):
        return False
    if record.finish_reason is None:
        raise EvidenceError(f"call {record.call_id} is {record.status} without a finish reason")
    return record.status == CompletionStatus.COMPLETED or stopped_for_length(record)


def stopped_for_length(record: CallRecord) -> bool:
    """The generation was cut off at a length limit."""
    return record.finish_reason in ("length", "max_output_tokens")


def _accepted(evidence: Evidence, matcher: Matcher) -> list[CallRecord]:
    """Accepted calls in returned order; all forms that are present agree."""
    forms: dict[str, list[CallRecord]] = {}
    if evidence.responses is not None:
        forms["responses"] = matcher.turns(evidence.responses, "responses")
    if evidence.output is not None:
        turns = [turn for run in evidence.output for turn in matcher.split(run)]
        output = matcher.turns(turns, "response.output")
        # Beside the complete list of responses, `response` may be the last one only.
        if not (evidence.responses and output and output == forms["responses"][-len(output) :]):
            forms["response.output"] = output
    if evidence.transitions is not None:
        forms["transitions"] = matcher.transitions(evidence.transitions)
    if evidence.references is not None:
        forms["ng_trajectory"] = matcher.references(evidence.references)
    named = {form: {record.call_id for record in calls} for form, calls in forms.items()}
    for form, ids in named.items():
        first, reference = next(iter(named.items()))
        if ids != reference:
            raise EvidenceError(
                f"{first} and {form} disagree about call(s) {', '.join(sorted(ids ^ reference))}"
            )
    for calls in forms.values():
        if calls:
            return calls
    raise EvidenceError(
        "the result has no accepted generation: return `responses`, `response.output`, "
        "`transitions` or `ng_trajectory.turns[].model_calls`"
    )


def _stated_terminal(evidence: Evidence, matcher: Matcher) -> CallRecord | None:
    """The scored call where the result states its native response id."""
    if evidence.terminal_response_id is not None:
        record = matcher.by_response_id(evidence.terminal_response_id)
        if record is None:
            raise EvidenceError(
                f"terminal_response_id: no captured call served {evidence.terminal_response_id}"
            )
        return record
    return matcher.by_response_id(evidence.response_id)


def _shown_terminal(evidence: Evidence, matcher: Matcher) -> CallRecord:
    """The scored call by the content of the last generation that the result shows."""
    if evidence.output:
        last = matcher.split(evidence.output[-1])[-1]
    elif evidence.responses:
        last = evidence.responses[-1]
    elif evidence.transitions and evidence.transitions[-1]:
        last = matcher.split(evidence.transitions[-1][-1])[-1]
    elif evidence.references:
        return matcher.references(evidence.references)[-1]
    else:
        raise EvidenceError(
            "the result does not say which call was scored: return terminal_response_id or the "
            "scored response"
        )
    return matcher.turns([last], "response")[0]


def _refuse_unordered_twins(terminal: CallRecord, chosen: Sequence[CallRecord]) -> None:
    """Refuse a terminal that only its content names, where another call has the same content.

    Twins along one chain are told apart by the returned order.
    """
    by_id = {record.call_id: record for record in chosen}
    ancestors: set[str] = set()
    record: CallRecord | None = terminal
    while record is not None and record.call_id not in ancestors:
        ancestors.add(record.call_id)
        record = by_id.get(record.parent_call_id or "")
    for other in chosen:
        if (
            other.call_id not in ancestors
            and other.output.fingerprint == terminal.output.fingerprint
            and other.output.reasoning_fingerprint == terminal.output.reasoning_fingerprint
        ):
            raise EvidenceError(
                f"calls {terminal.call_id} and {other.call_id} say the same; return "
                "terminal_response_id to name the scored one"
            )
