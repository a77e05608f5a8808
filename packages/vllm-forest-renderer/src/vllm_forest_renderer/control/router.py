"""The control routes of `forest_schema.control`.

Guarantees: no route answers without the control token; a name from a path is checked before it is
used and never becomes a path by itself; errors carry a `Reason`, never content of an attempt.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from fastapi import APIRouter, Request, Response
from forest_schema import Reason
from forest_schema.control import (
    CONTROL_PREFIX,
    CloseAttempt,
    EngineState,
    Handshake,
    OpenAttempt,
    RestoreAttempt,
    WeightUpdate,
)
from forest_schema.shards import ShardError

from vllm_forest_renderer.control.access import ControlToken
from vllm_forest_renderer.control.messages import answer, read_body, refusal
from vllm_forest_renderer.control.ranges import UnsatisfiableRange, shard_response
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.ledger import Ledger
from vllm_forest_renderer.names import check_partition, check_shard
from vllm_forest_renderer.store import DeltaSink, ShardFiles

logger = logging.getLogger("vllm.forest")

_LONGEST_WAIT = 3600.0


class EngineControls(Protocol):
    """What the control routes ask of the engine. Refusals are raised as `ForestError`."""

    async def handshake(self) -> Handshake:
        """What this server serves and captures."""
        ...

    async def pause(self) -> EngineState:
        """Hold generation; requests in flight keep their state."""
        ...

    async def resume(self) -> EngineState:
        """Go on generating."""
        ...

    async def update_weights(self, update: WeightUpdate) -> EngineState:
        """Pause, load, reset the prefix cache, resume."""
        ...


class ControlServices(NamedTuple):
    """What the routes work on."""

    ledger: Ledger
    sink: DeltaSink
    token: ControlToken
    engine: EngineControls


_Handler = Callable[[ControlServices, Request], Awaitable[Response]]


def control_router(services: Callable[[Request], ControlServices]) -> APIRouter:
    """The routes; `services` finds what a request works on, usually in `request.app.state`."""
    router = APIRouter(prefix=CONTROL_PREFIX, tags=["forest control"])

    def guarded(handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            found = services(request)
            try:
                found.token.check(request.headers)
                return await handler(found, request)
            except (ForestError, ShardError) as error:
                return refusal(error)
            except Exception as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                what = f"{type(error).__name__}; the server's log says more"
                return refusal(ForestError(Reason.ENGINE_ERROR, what))

        return endpoint

    routes: tuple[tuple[str, str, _Handler], ...] = (
        ("GET", "/handshake", _handshake),
        ("POST", "/attempts", _open),
        ("POST", "/attempts/{attempt}/close", _close),
        ("GET", "/attempts/{attempt}/receipt", _receipt),
        ("POST", "/attempts/{attempt}/restore", _restore),
        ("DELETE", "/attempts/{attempt}", _cleanup),
        ("DELETE", "/partitions/{partition}", _cleanup_partition),
        ("GET", "/shards/{partition}/{shard}", _shard),
        ("POST", "/pause", _pause),
        ("POST", "/resume", _resume),
        ("POST", "/weights", _weights),
    )
    for method, path, handler in routes:
        router.add_api_route(
            path,
            guarded(handler),
            methods=[method],
            name=f"forest_control{handler.__name__}",
            response_model=None,
        )
    return router


async def _handshake(services: ControlServices, request: Request) -> Response:
    return answer(await services.engine.handshake())


async def _open(services: ControlServices, request: Request) -> Response:
    body = await read_body(request, OpenAttempt)
    return answer(await services.ledger.open_attempt(body))


async def _close(services: ControlServices, request: Request) -> Response:
    body = await read_body(request, CloseAttempt, default=CloseAttempt())
    if not (math.isfinite(body.wait_s) and 0 <= body.wait_s <= _LONGEST_WAIT):
        raise ForestError(
            Reason.MALFORMED_REQUEST,
            f"wait_s: use 0 to {_LONGEST_WAIT:g} seconds, not {body.wait_s}",
            param="wait_s",
        )
    return answer(await services.ledger.close(request.path_params["attempt"], body.wait_s))


async def _receipt(services: ControlServices, request: Request) -> Response:
    return answer(await services.ledger.receipt(request.path_params["attempt"]))


async def _restore(services: ControlServices, request: Request) -> Response:
    body = await read_body(request, RestoreAttempt, default=RestoreAttempt())
    return answer(await services.ledger.restore(request.path_params["attempt"], body.calls))


async def _cleanup(services: ControlServices, request: Request) -> Response:
    return answer(await services.ledger.cleanup(request.path_params["attempt"]))


async def _cleanup_partition(services: ControlServices, request: Request) -> Response:
    return answer(await services.ledger.cleanup_partition(request.path_params["partition"]))


async def _shard(services: ControlServices, request: Request) -> Response:
    partition = check_partition(request.path_params["partition"])
    shard = check_shard(request.path_params["shard"])
    path = (
        services.sink.shard_path(partition, shard)
        if isinstance(services.sink, ShardFiles)
        else None
    )
    try:
        if path is None:
            raise FileNotFoundError
        return await asyncio.to_thread(shard_response, path, request.headers.get("range"))
    except FileNotFoundError as error:
        raise ForestError(
            Reason.UNREADABLE_SHARD, f"partition {partition} holds no shard {shard}", param="shard"
        ) from error
    except UnsatisfiableRange as error:
        raise ForestError(Reason.MALFORMED_REQUEST, str(error), param="range") from error


async def _pause(services: ControlServices, request: Request) -> Response:
    return answer(await services.engine.pause())


async def _resume(services: ControlServices, request: Request) -> Response:
    return answer(await services.engine.resume())


async def _weights(services: ControlServices, request: Request) -> Response:
    return answer(await services.engine.update_weights(await read_body(request, WeightUpdate)))
