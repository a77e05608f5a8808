"""What a benchmark says: one figure of ours, its peers and its physical limit, and the goal.

Guarantees: plain data that goes through JSON unchanged; a ratio is always ours divided by the
other, and comes from the same rounds of the same run.
"""

from collections.abc import Mapping, Sequence
from statistics import quantiles

import msgspec
import numpy as np


class Spread(msgspec.Struct, frozen=True):
    """Median and quartiles of what the rounds gave."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of `values`, one per round."""
        several = len(values) > 1
        low, middle, high = quantiles(values, method="inclusive") if several else [values[0]] * 3
        return cls(middle, low, high, len(values))


class Other(msgspec.Struct, frozen=True):
    """What ours is put beside."""

    name: str
    spread: Spread
    ratio: float
    """Ours divided by this: the median over rounds that belong together."""
    limit: bool
    """The machine's own speed for the same bytes, rather than other software's."""


class Goal(msgspec.Struct, frozen=True):
    """What was promised of a figure."""

    text: str
    value: float
    """What is judged: the figure or one of its ratios, in the unit that `text` names."""
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """The value keeps the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


class Figure(msgspec.Struct, frozen=True):
    """One row of the report."""

    section: str
    case: str
    unit: str
    ours: Spread
    others: tuple[Other, ...] = ()
    goals: tuple[Goal, ...] = ()
    x: float | None = None
    """Where the section's plot shows the row; None leaves it out."""
    x_label: str = ""
    headline: str = ""
    """The row's name in the README; empty leaves it out."""

    def other(self, name: str) -> Other:
        """What stands beside ours under `name`."""
        (found,) = (other for other in self.others if other.name == name)
        return found


def figure(
    section: str,
    case: str,
    unit: str,
    ours: Sequence[float],
    *,
    peers: Mapping[str, Sequence[float]] | None = None,
    limits: Mapping[str, Sequence[float]] | None = None,
    x: float | None = None,
    x_label: str = "",
    headline: str = "",
) -> Figure:
    """A figure from the values of the rounds, in `unit`."""
    return Figure(
        section=section,
        case=case,
        unit=unit,
        ours=Spread.of(ours),
        others=tuple(
            Other(name, Spread.of(values), _ratio(ours, values), limit)
            for group, limit in ((peers or {}, False), (limits or {}, True))
            for name, values in group.items()
        ),
        x=x,
        x_label=x_label,
        headline=headline,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of neighbouring rounds where they come in pairs: a slow drift of the machine cancels."""
    if len(ours) == len(theirs) and all(theirs):
        return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)]).median
    return Spread.of(ours).median / Spread.of(theirs).median


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of the power law through the points: 1 is linear growth."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
