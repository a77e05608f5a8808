"""Routed experts along a row's path.

Guarantees: every token of a row has the experts that the engine used for it in that row's context,
or -1 where none were captured; the row of a parent's last token comes from the child on this path,
whose prefill took that token in. Sizes that contradict the records, and rows that do not name
different experts, raise `IntegrityError`; nothing is cut or filled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from forest_schema import CallRecord, Reason, RouteInfo
from forest_schema.routes import ROUTES
from numpy.typing import NDArray

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.types import PathCall

MISSING = -1
"""Expert number of a token without a captured route."""


def call_routes(
    call: CallRecord | PathCall, delta: Mapping[str, NDArray[Any]]
) -> tuple[RouteInfo, NDArray[Any]] | None:
    """What a call's rows cover, and the rows `[end - first, layers, top_k]`; None without any."""
    if call.routes is None:
        if ROUTES in delta:
            raise IntegrityError(
                Reason.DIGEST_MISMATCH,
                f"call {call.call_id}: the delta has routes that its record does not describe",
            )
        return None
    try:
        return call.routes, call.routes.read(delta, call_id=call.call_id)
    except ValueError as error:
        raise IntegrityError(Reason.DIGEST_MISMATCH, str(error)) from error


def join_routes(
    length: int, parts: Sequence[tuple[RouteInfo, NDArray[Any]] | None], *, row_id: str
) -> NDArray[np.int32] | None:
    """Routes `[length, layers, top_k]` of a row from its calls' rows in path order.

    None where no call has routes. The row's last token has none.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    shapes = {(info.layers, info.top_k, info.experts) for info, _ in known}
    if len(shapes) > 1:
        raise IntegrityError(
            Reason.DIGEST_MISMATCH,
            f"row {row_id}: routes of several models (layers, experts per token, experts): "
            f"{sorted(shapes)}",
        )
    ((layers, top_k, _),) = shapes
    routes_TLK = np.full((length, layers, top_k), MISSING, np.int32)
    for info, rows in known:
        routes_TLK[info.first : info.end] = rows
    return routes_TLK
