"""Routed experts of a mixture of experts: which experts computed a token, layer by layer.

Guarantees: the rows of a delta join its parent's without gap or overlap. An engine has no row for
the last token that it sampled, because no forward pass took that token in; so a call's rows start
at its parent's last token, and the last token of a chain has none. Row counts are checked against
the tokens, never cut or filled.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

ROUTES = "routes"
"""Name of the delta's tensor, `[rows, layers, top_k]` in `route_dtype`, and of the feature that a
reader of such a delta must know."""


class RouteInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the routes of one delta cover. Positions count tokens of the whole history."""

    first: int
    """Position of the token that the first row belongs to: the parent's last token, 0 for a
    root."""
    rows: int
    layers: int
    top_k: int
    """Experts per token."""
    experts: int
    """Experts per layer; a route is below it."""
    has_last: bool = False
    """The last row is a placeholder for the call's last token, which no forward pass took in. A
    reader leaves it out: that token's row comes with a child, or there is none."""

    def __post_init__(self) -> None:
        if min(self.first, self.rows - self.has_last) < 0 or min(self.layers, self.top_k) < 1:
            raise ValueError(
                f"routes from {self.first}: {self.rows} rows of {self.layers} layers with "
                f"{self.top_k} experts each are none"
            )
        if self.top_k > self.experts:
            raise ValueError(f"routes: top_k {self.top_k} exceeds the {self.experts} experts")

    @property
    def end(self) -> int:
        """Position of the first token without a row."""
        return self.first + self.rows - self.has_last

    def check(self, *, call_id: str, prev_len: int, cum_len: int) -> None:
        """Raise `ValueError` unless the rows fit a call with these lengths."""
        first, end = max(prev_len - 1, 0), max(cum_len - 1, 0)
        if (self.first, self.end) != (first, end):
            raise ValueError(
                f"call {call_id}: routes of tokens [{self.first}, {self.end}) where the call's "
                f"are [{first}, {end})"
            )

    def read(self, delta: Mapping[str, NDArray[Any]], *, call_id: str) -> NDArray[Any]:
        """The rows of tokens `[first, end)`, `[end - first, layers, top_k]`.

        Raises `ValueError` for a tensor that is not the one described here.
        """
        routes = delta.get(ROUTES)
        shape = (self.rows, self.layers, self.top_k)
        dtype = route_dtype(self.experts)
        if routes is None or routes.shape != shape or routes.dtype != dtype:
            found = "none" if routes is None else f"{routes.dtype}{list(routes.shape)}"
            raise ValueError(
                f"call {call_id}: the delta's routes are {found} where the record says "
                f"{dtype}{list(shape)}"
            )
        rows = routes[: self.end - self.first]
        if rows.size and int(rows.max()) >= self.experts:
            raise ValueError(
                f"call {call_id}: a route leads to expert {int(rows.max())} of {self.experts}"
            )
        return rows


def route_dtype(experts: int) -> np.dtype[Any]:
    """The smallest of uint8 and uint16 that holds every expert's index.

    Raises `ValueError` for more experts than uint16 counts.
    """
    if experts <= 1 << 8:
        return np.dtype("u1")
    if experts <= 1 << 16:
        return np.dtype("<u2")
    raise ValueError(f"routes: {experts} experts are more than uint16 holds")
