"""The outcome of a qualification, as text and as JSON."""

from collections.abc import Iterable

import msgspec

SPLICED = "spliced"
ROOT = "root"
REFUSED = "refused"
UNAVAILABLE = "unavailable"


class RuleReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to calls like one rule's witness."""

    rule: str
    asks: str
    outcome: str
    """`spliced`: continued exactly. `root`: captured as a root. `refused`: not served under an
    attempt. `unavailable`: the template refuses such messages altogether."""
    reason: str | None = None
    """A `Reason` for a root or a refusal."""
    detail: str = ""
    tail: str | None = None
    """What follows the captured tokens."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The qualification of one model directory."""

    model: str
    renderer: str
    end_tokens: tuple[str, ...]
    rules: tuple[RuleReport, ...]

    @property
    def exact(self) -> bool:
        """Every message that the template accepts can be continued."""
        return all(rule.outcome not in (ROOT, REFUSED) for rule in self.rules)


def as_json(report: Report) -> bytes:
    """The report as one JSON object."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)


def as_text(report: Report) -> str:
    """The report for people."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterable[str]:
    yield f"{report.model}: {report.renderer}, turns end with {', '.join(report.end_tokens)}"
    for rule in report.rules:
        mark = {SPLICED: "exact", ROOT: "root ", REFUSED: "never"}.get(rule.outcome, "  -  ")
        yield f"  {mark}  {rule.rule}: {rule.asks}"
        if rule.outcome == SPLICED:
            yield f"           continues with {rule.tail!r}"
        else:
            yield f"           {rule.reason or 'not accepted by the template'}: {rule.detail}"
    for outcome, what in ((ROOT, "become roots"), (REFUSED, "are refused")):
        count = sum(rule.outcome == outcome for rule in report.rules)
        if count:
            yield f"{count} of {len(report.rules)} kinds of calls {what}"
    if report.exact:
        yield "every kind of call that the template accepts is continued exactly"
