"""Routed experts of a mixture of experts: which experts computed a token, layer by layer.

Guarantees: the rows of a delta join its parent's without gap or overlap. An engine has no row for
the last token that it sampled, because no forward pass took that token in; so a call's rows start
at its parent's last token, and the last token of a chain has none. Row counts are checked against
the tokens, never cut or filled; a row is handed out only where it names different experts of the
model.
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

        Raises `ValueError` for a tensor that is not the one described here, and for a row that
        names an expert twice or one that does not exist.
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
        self._check_experts(rows, call_id=call_id)
        return rows

    def _check_experts(self, rows: NDArray[Any], *, call_id: str) -> None:
        # Each comparison of all rows at once runs over contiguous memory.
        experts_KN = np.ascontiguousarray(rows.reshape(-1, self.top_k).T)
        wrong_N = (experts_KN >= self.experts).any(axis=0)
        for apart in range(1, self.top_k):
            wrong_N |= (experts_KN[apart:] == experts_KN[:-apart]).any(axis=0)
        wrong_TL = wrong_N.reshape(rows.shape[:2])
        if wrong_TL.any():
            # An engine reports zeros for a layer without experts. Which layers have some is known
            # to the model, whose replay refuses zeros there.
            wrong_TL &= rows.any(axis=(0, 2))
        if wrong_TL.any():
            row, layer = np.argwhere(wrong_TL)[0].tolist()
            raise ValueError(
                f"call {call_id}: token {self.first + row}, layer {layer + 1}: "
                f"{rows[row, layer].tolist()} are not {self.top_k} different experts of "
                f"{self.experts}"
            )


def route_dtype(experts: int) -> np.dtype[Any]:
    """The smallest of uint8 and uint16 that holds every expert's index.

    Raises `ValueError` for more experts than uint16 counts.
    """
    if experts <= 1 << 8:
        return np.dtype("u1")
    if experts <= 1 << 16:
        return np.dtype("<u2")
    raise ValueError(f"routes: {experts} experts are more than uint16 holds")
