"""Captured routes for the mixture tests, and transformers' mixture sent along given routes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from forest_schema import RouteInfo
from forest_schema.routes import ROUTES
from numpy.typing import NDArray

from tests.trainer.megatron.support import Rollout

LAYERS, TOP_K, EXPERTS = 2, 2, 4
"""Of `support.tiny_mixture`."""


def capture(rollout: Rollout, call_id: str, routes_TLK: NDArray[Any]) -> None:
    """Give a call the rows that an engine would report, out of the routes of its whole context."""
    (index,) = (i for i, call in enumerate(rollout.records) if call.call_id == call_id)
    record = rollout.records[index]
    first = max(record.prev_len - 1, 0)
    rows = routes_TLK[first : record.cum_len - 1]
    info = RouteInfo(first=first, rows=len(rows), layers=LAYERS, top_k=TOP_K, experts=EXPERTS)
    rollout.deltas[record.delta.key][ROUTES] = rows.astype(np.uint8)
    rollout.records[index] = msgspec.structs.replace(record, routes=info)


def capture_random(rollout: Rollout, *, seed: int, without: tuple[str, ...] = ()) -> Rollout:
    """Random routes for every call but those in `without`."""
    random = np.random.default_rng(seed)
    for record in list(rollout.records):
        if record.call_id not in without:
            scores = random.random((record.cum_len, LAYERS, EXPERTS))
            capture(rollout, record.call_id, np.argsort(scores)[..., :TOP_K])
    return rollout


def context_routes(rollout: Rollout, call_id: str) -> NDArray[np.int64]:
    """Routes of one call's context, token by token from its chain; -1 where none were captured."""
    by_id = {record.call_id: record for record in rollout.records}
    chain = [by_id[call_id]]
    while chain[0].parent_call_id is not None:
        chain.insert(0, by_id[chain[0].parent_call_id])
    routes = np.full((chain[-1].cum_len, LAYERS, TOP_K), -1)
    for record in chain:
        if record.routes is not None:
            rows = rollout.deltas[record.delta.key][ROUTES]
            for offset, row in enumerate(rows):
                routes[max(record.prev_len - 1, 0) + offset] = row
    return routes


@contextmanager
def sent_along(model: Any, routes_TLK: NDArray[Any]) -> Iterator[None]:
    """Forward passes of transformers' `model` inside use these experts; -1 leaves the choice."""
    handles = [
        layer.mlp.gate.register_forward_hook(_Sent(torch.from_numpy(routes_TLK[:, number])))
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Sent:
    def __init__(self, routes: torch.Tensor) -> None:
        self._routes = routes.long()

    def __call__(self, gate: Any, args: Any, output: tuple[torch.Tensor, ...]) -> Any:
        logits, _, own = output
        experts = torch.where(self._routes < 0, own, self._routes)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, experts)
        return logits, probabilities / probabilities.sum(dim=-1, keepdim=True), experts
