"""Routed experts that the engine reports for a call.

Guarantees: a call's rows are exactly those of the tokens from its parent's last one to its own last
but one, in the smallest type that holds every expert; whatever the engine leaves out, adds or
misnumbers raises `CaptureFailed`, nothing is cut or filled.
"""

from dataclasses import dataclass
from typing import Any

from forest_schema.reasons import Reason
from forest_schema.records import CompletionStatus
from forest_schema.routes import RouteInfo, route_dtype
from numpy.typing import NDArray

from vllm_forest_renderer.capture.generation import CaptureFailed, completion_status
from vllm_forest_renderer.context import Call


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The routed layers of the served model."""

    layers: int
    top_k: int
    """Experts per token."""
    experts: int
    """Experts per layer."""


def first_row(call: Call) -> int:
    """Position of the first token that the call brings a row for: its parent's last token."""
    return call.predecessor.parent.cum_len - 1 if call.predecessor is not None else 0


def captured_routes(call: Call, shape: RouteShape) -> tuple[RouteInfo, NDArray[Any]] | None:
    """What a finished call's rows cover, and the rows `[rows, layers, top_k]`.

    None for a generation that failed: it has no complete rows and nothing continues it. Raises
    `CaptureFailed`.
    """
    generation = call.generation
    assert generation is not None
    if completion_status(generation.finish_reason) is CompletionStatus.FAILED:
        return None
    first = first_row(call)
    rows = len(call.prompt_tokens or ()) + len(generation.tokens) - 1 - first
    expected = (rows, shape.layers, shape.top_k)
    routes = generation.routes
    if routes is None or routes.shape != expected:
        found = "none" if routes is None else str(list(routes.shape))
        raise CaptureFailed(
            Reason.INVALID_ROUTES,
            f"the engine's routed experts are {found} where the call's tokens need "
            f"{list(expected)} (rows, layers, experts per token)",
        )
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < shape.experts:
        raise CaptureFailed(
            Reason.INVALID_ROUTES,
            f"the engine names experts {int(routes.min())} to {int(routes.max())} of "
            f"{shape.experts}",
        )
    info = RouteInfo(
        first=first, rows=rows, layers=shape.layers, top_k=shape.top_k, experts=shape.experts
    )
    return info, routes.astype(route_dtype(shape.experts), copy=False)
