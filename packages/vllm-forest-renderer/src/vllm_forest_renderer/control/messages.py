"""Bodies of control requests and answers.

Guarantees: a request body is read up to a bound and decoded as exactly one type; every refusal is
an `ErrorBody` with a `Reason`; a refusal that repeats itself carries `x-should-retry: false`, and
only `store_unavailable` (503) invites a retry.
"""

import json
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from forest_schema import Reason
from forest_schema.control import ErrorBody
from forest_schema.shards import ShardError

from vllm_forest_renderer.errors import ForestError

MAX_BODY = 1 << 20
"""Bytes of a control request's body."""

_STATUS: Mapping[Reason, int] = {
    Reason.CONTROL_TOKEN_REQUIRED: 401,
    Reason.UNREADABLE_SHARD: 404,
    Reason.ATTEMPT_UNKNOWN: 422,
    Reason.ATTEMPT_CLOSED: 422,
    Reason.STAGING_FAILED: 500,
    Reason.ENGINE_ERROR: 500,
    Reason.STORE_UNAVAILABLE: 503,
}

T = TypeVar("T")


def status_of(reason: Reason) -> int:
    """HTTP status of a refusal; 400 for everything that the request itself got wrong."""
    return _STATUS.get(reason, 400)


def answer(message: msgspec.Struct) -> Response:
    """A message as a JSON response."""
    return Response(msgspec.json.encode(message), media_type="application/json")


def refusal(error: ForestError | ShardError) -> Response:
    """The response to a request that `error` refused, or that met damaged data (500)."""
    status = status_of(error.reason) if isinstance(error, ForestError) else 500
    param = error.param if isinstance(error, ForestError) else None
    body = ErrorBody(
        error=ErrorBody.Error(message=str(error), type=error.reason, param=param, code=status)
    )
    headers = {} if error.reason is Reason.STORE_UNAVAILABLE else {"x-should-retry": "false"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


async def read_body(
    request: Request, kind: type[T], *, default: T | None = None, max_bytes: int = MAX_BODY
) -> T:
    """The request's body as a `kind`; `default`, where there is one, for an empty body.

    Raises `ForestError` (`malformed_request`) for a body that is too large or does not fit.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise ForestError(
                Reason.MALFORMED_REQUEST, f"body: larger than {max_bytes} bytes", param="body"
            )
    if not data and default is not None:
        return default
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ForestError(
            Reason.MALFORMED_REQUEST, f"body: {_complaint(error, bytes(data))}", param="body"
        ) from error


def _complaint(error: Exception, data: bytes) -> str:
    """msgspec's message, except where it takes half of a surrogate pair for a missing end."""
    if "truncated" in str(error):
        try:
            json.loads(data)
        except (ValueError, RecursionError):
            return str(error)
        return "a string with half of a surrogate pair (\\ud800 to \\udfff) is no text"
    return str(error)
