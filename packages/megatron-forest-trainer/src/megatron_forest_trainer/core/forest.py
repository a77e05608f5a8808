"""From a selection to rows.

Guarantees (asserted by the tests): one row per endpoint of the *selected* forest, made of its whole
path from the root; endpoints in selection order; every selected generation is owned by exactly one
row, the first that contains it; the same selection gives the same rows, ids and ownership.
"""

from collections.abc import Iterator, Mapping, Sequence

from forest_schema import CallRecord, Reason

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.types import GeneratedSpan, PathCall, RowPlan


def missing_parents(records: Sequence[CallRecord]) -> tuple[str, ...]:
    """Parents of selected calls that are not selected themselves, in selection order."""
    chosen = {record.call_id for record in records}
    missing = dict.fromkeys(
        record.parent_call_id
        for record in records
        if record.parent_call_id is not None and record.parent_call_id not in chosen
    )
    return tuple(missing)


def is_linear(records: Sequence[CallRecord]) -> bool:
    """The (closed) selection is one chain: a single root and no branch."""
    parents = [record.parent_call_id for record in records]
    return parents.count(None) == 1 and len(set(parents)) == len(parents)


def check_links(records: Sequence[CallRecord]) -> None:
    """Roots have a prompt and lengths continue from parent to child. Raises `IntegrityError`.

    `records` is closed: it holds the parent of each of its continuations.
    """
    by_id = {record.call_id: record for record in records}
    for record in records:
        if record.parent_call_id is None:
            if record.prompt_len == 0:
                raise IntegrityError(
                    Reason.DIGEST_MISMATCH, f"call {record.call_id} is a root without a prompt"
                )
            continue
        parent = by_id[record.parent_call_id]
        if record.prev_len != parent.cum_len:
            raise IntegrityError(
                Reason.DIGEST_MISMATCH,
                f"call {record.call_id} inherits {record.prev_len} tokens, but its parent "
                f"{parent.call_id} has {parent.cum_len}",
            )
        if record.order <= parent.order:
            raise IntegrityError(
                Reason.DIGEST_MISMATCH,
                f"call {record.call_id} was captured before its parent {parent.call_id}",
            )


def build_rows(
    records: Sequence[CallRecord], *, group_id: str, rollout_id: str
) -> tuple[RowPlan, ...]:
    """Rows of the closed selection `records`, in priority order.

    A call whose children were not selected is an endpoint. Raises `IntegrityError` where a
    parent is missing or lengths do not continue.
    """
    missing = missing_parents(records)
    if missing:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH, f"the selection lacks the parent(s) {', '.join(missing)}"
        )
    check_links(records)
    by_id = {record.call_id: record for record in records}
    calls = {record.call_id: PathCall.of(record) for record in records}
    parents = {record.parent_call_id for record in records}
    owned: set[str] = set()
    rows: list[RowPlan] = []
    for record in records:
        if record.call_id in parents:
            continue
        path = tuple(reversed(list(_ancestry(record, by_id))))
        spans = tuple(_span(call, owned=call.call_id not in owned) for call in path)
        owned.update(call.call_id for call in path)
        rows.append(
            RowPlan(
                row_id=f"{group_id}/{rollout_id}/s{len(rows)}",
                group_id=group_id,
                rollout_id=rollout_id,
                path=tuple(calls[call.call_id] for call in path),
                spans=spans,
                length=record.cum_len,
            )
        )
    return tuple(rows)


def check_ownership(rows: Sequence[RowPlan], generated_len: Mapping[str, int]) -> None:
    """Every selected generation is owned once and whole. Raises `IntegrityError`.

    `generated_len` maps the selected call ids of one rollout to their generated tokens.
    """
    owned: dict[str, int] = {}
    for row in rows:
        for span in row.spans:
            if not span.owned:
                continue
            if span.call_id in owned:
                raise IntegrityError(
                    Reason.DIGEST_MISMATCH, f"two rows own the generation of call {span.call_id}"
                )
            owned[span.call_id] = span.end - span.start
    if owned != generated_len:
        wrong = sorted(
            call_id
            for call_id in owned.keys() | generated_len.keys()
            if owned.get(call_id) != generated_len.get(call_id)
        )
        raise IntegrityError(
            Reason.DIGEST_MISMATCH, f"generations not owned exactly once: {', '.join(wrong)}"
        )


def _ancestry(record: CallRecord, by_id: Mapping[str, CallRecord]) -> Iterator[CallRecord]:
    """`record`, its parent, ... to the root. Ends because a parent has a smaller order."""
    current: CallRecord | None = record
    while current is not None:
        yield current
        parent_id = current.parent_call_id
        current = None if parent_id is None else by_id[parent_id]


def _span(call: CallRecord, *, owned: bool) -> GeneratedSpan:
    sampling = call.sampling
    return GeneratedSpan(
        call_id=call.call_id,
        start=call.prompt_len,
        end=call.cum_len,
        owned=owned,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
