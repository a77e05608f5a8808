"""Which captured calls the generations of a result are.

Guarantees: a generation is matched as a whole, by content; native ids narrow the choice and must
not contradict the content; ids that no call knows are ignored as an exporter's own. A generation
that matches no call, that could be several, or that is returned twice raises `EvidenceError`.
Generations with the same content are told apart by ids; without ids they are accepted only when all
of them are returned, so that the selected set does not depend on a guess.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from forest_schema import CallRecord

from megatron_forest_trainer.core.errors import EvidenceError
from megatron_forest_trainer.core.evidence import Reference, Run, Turn

Content = tuple[str, str | None]
"""Fingerprint of a turn and of its reasoning."""


class Matcher:
    """Index of one attempt's calls by native id and by content."""

    def __init__(self, records: Sequence[CallRecord]) -> None:
        self.identified: set[str] = set()
        """Calls that some generation named by a native id."""
        self._by_response: dict[str, CallRecord] = {}
        self._by_call = {record.call_id: record for record in records}
        self._by_item: dict[str, list[CallRecord]] = defaultdict(list)
        self._by_content: dict[Content, list[CallRecord]] = defaultdict(list)
        self._without_reasoning: dict[str, list[CallRecord]] = defaultdict(list)
        for record in sorted(records, key=lambda record: (record.order, record.call_id)):
            output = record.output
            if output.response_id in self._by_response:
                raise EvidenceError(f"two captured calls share response id {output.response_id}")
            self._by_response[output.response_id] = record
            for item_id in output.item_ids:
                self._by_item[item_id].append(record)
            content = (output.fingerprint, output.reasoning_fingerprint)
            self._by_content[content].append(record)
            self._without_reasoning[output.fingerprint].append(record)

    def by_response_id(self, response_id: str | None) -> CallRecord | None:
        """The call that served `response_id`; None for an id that is not native."""
        return self._by_response.get(response_id) if response_id is not None else None

    def references(self, references: Iterable[Reference]) -> list[CallRecord]:
        """Calls named by id. Raises `EvidenceError` for unknown, contradictory or repeated ones."""
        found: list[CallRecord] = []
        for reference in references:
            named = {
                record.call_id: record
                for record in (
                    self.by_response_id(reference.response_id),
                    self._by_call.get(reference.call_id or ""),
                )
                if record is not None
            }
            if len(named) != 1:
                problem = "two different calls" if named else "no captured call"
                raise EvidenceError(
                    f"{reference.where}: response {reference.response_id!r}, call "
                    f"{reference.call_id!r} names {problem}"
                )
            found += named.values()
            self.identified |= named.keys()
        _refuse_repeats(found, "ng_trajectory")
        return found

    def candidates(self, turn: Turn) -> list[CallRecord]:
        """Calls that `turn` can be, in capture order; empty where there is none.

        Raises `EvidenceError` where its native ids belong to several calls, or to a call whose
        generation is another one.
        """
        named = self._named(turn)
        if not named:
            return self._by_content.get((turn.fingerprint, turn.reasoning_fingerprint), [])
        if len(named) > 1:
            calls = ", ".join(sorted(named))
            raise EvidenceError(f"{turn.where}: carries ids of several captured calls ({calls})")
        (record,) = named.values()
        output = record.output
        if turn.fingerprint != output.fingerprint:
            raise EvidenceError(
                f"{turn.where}: carries ids of call {record.call_id}, but is not that call's whole "
                "generation; return every item of it, unchanged and in order"
            )
        # An id names the call beyond doubt, so exposed reasoning may be left out.
        if turn.reasoning_fingerprint not in (None, output.reasoning_fingerprint):
            raise EvidenceError(
                f"{turn.where}: carries ids of call {record.call_id}, but other reasoning"
            )
        self.identified.add(record.call_id)
        return [record]

    def _named(self, turn: Turn) -> dict[str, CallRecord]:
        """Calls that the turn's native ids name, by call id.

        An item id that several calls share (a parser that numbers tool calls from 0) names none.
        """
        named: dict[str, CallRecord] = {}
        record = self.by_response_id(turn.response_id)
        if record is not None:
            named[record.call_id] = record
        for item_id in turn.native_ids:
            records = self._by_item.get(item_id, [])
            if len(records) == 1:
                named[records[0].call_id] = records[0]
        return named

    def turns(self, turns: Sequence[Turn], form: str) -> list[CallRecord]:
        """The call of every turn, in the order of `turns`. Raises `EvidenceError`."""
        choices = [self.candidates(turn) for turn in turns]
        for turn, choice in zip(turns, choices, strict=True):
            if not choice:
                raise EvidenceError(self._no_match(turn))
        taken = {choice[0].call_id for choice in choices if len(choice) == 1}
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        found: dict[int, CallRecord] = {}
        for index, choice in enumerate(choices):
            if len(choice) == 1:
                found[index] = choice[0]
            else:
                groups[tuple(record.call_id for record in choice)].append(index)
        for ids, indices in groups.items():
            free = [self._by_call[call_id] for call_id in ids if call_id not in taken]
            if len(free) != len(indices):
                raise EvidenceError(
                    f"{turns[indices[0]].where}: {len(indices)} generation(s) without native ids "
                    f"fit {len(free)} captured calls ({', '.join(ids)}); return the response ids"
                )
            found.update(zip(indices, free, strict=True))
        ordered = [found[index] for index in range(len(turns))]
        _refuse_repeats(ordered, form)
        return ordered

    def _no_match(self, turn: Turn) -> str:
        if turn.reasoning_fingerprint is None and self._without_reasoning.get(turn.fingerprint):
            return (
                f"{turn.where}: the generation was returned without its reasoning and without a "
                "native id; return the reasoning or the response id"
            )
        return f"{turn.where}: no captured call generated this"

    def split(self, run: Run) -> list[Turn]:
        """The generations that a run of assistant items is made of.

        Raises `EvidenceError` where it can be cut into captured generations in no way, or in
        several ways.
        """
        if run.size == 1:
            return [run.turns[0, 1]]
        ways = self._ways(run)
        if len(ways) == 1:
            return [run.turns[cut] for cut in ways[0]]
        if not ways:
            whole = run.turns[0, run.size]
            raise EvidenceError(self._no_match(whole))
        raise EvidenceError(f"{run.where}: can be cut into captured generations in several ways")

    def _ways(self, run: Run) -> list[list[tuple[int, int]]]:
        """At most two ways to cut the run, as lists of item ranges."""
        fits: set[tuple[int, int]] = set()
        for cut, turn in run.turns.items():
            try:
                if self.candidates(turn):
                    fits.add(cut)
            except EvidenceError:
                continue
        ways: list[list[list[tuple[int, int]]]] = [[[]]]
        for end in range(1, run.size + 1):
            ways.append(
                [
                    [*way, (start, end)]
                    for start in range(end)
                    if (start, end) in fits
                    for way in ways[start]
                ][:2]
            )
        return ways[run.size]

    def transitions(self, snapshots: Sequence[Sequence[Run]]) -> list[CallRecord]:
        """Calls that snapshots of a conversation show, in the order in which they appear.

        Each snapshot's last run is an accepted generation. Earlier assistant items may be supplied
        context, which no call generated; a call that later snapshots repeat is the same call.
        """
        seen: dict[str, CallRecord] = {}
        shown: Counter[tuple[str, ...]] = Counter()
        open_groups: dict[tuple[str, ...], list[CallRecord]] = {}
        for runs in snapshots:
            in_snapshot: Counter[tuple[str, ...]] = Counter()
            for number, run in enumerate(runs):
                for turn in self._snapshot_turns(run, required=number == len(runs) - 1):
                    choice = self.candidates(turn)
                    ids = tuple(record.call_id for record in choice)
                    if len(choice) == 1:
                        if in_snapshot[ids]:
                            raise EvidenceError(
                                f"{turn.where}: call {ids[0]} appears twice in one snapshot"
                            )
                        seen[ids[0]] = choice[0]
                    in_snapshot[ids] += 1
                    open_groups[ids] = choice
            for ids, count in in_snapshot.items():
                shown[ids] = max(shown[ids], count)
        for ids, choice in open_groups.items():
            if len(ids) == 1:
                continue
            free = [record for record in choice if record.call_id not in seen]
            if free and shown[ids] != len(free):
                raise EvidenceError(
                    f"transitions: {shown[ids]} generation(s) without native ids fit {len(free)} "
                    f"captured calls ({', '.join(ids)}); return the response ids"
                )
            seen.update({record.call_id: record for record in free})
        return list(seen.values())

    def _snapshot_turns(self, run: Run, *, required: bool) -> list[Turn]:
        if required:
            turns = self.split(run)
            for turn in turns:
                if not self.candidates(turn):
                    raise EvidenceError(self._no_match(turn))
            return turns
        ways = self._ways(run)
        return [run.turns[cut] for cut in ways[0]] if len(ways) == 1 else []


def _refuse_repeats(records: Sequence[CallRecord], form: str) -> None:
    counts = Counter(record.call_id for record in records)
    repeated = [call_id for call_id, count in counts.items() if count > 1]
    if repeated:
        raise EvidenceError(f"{form}: call {', '.join(repeated)} was returned more than once")
