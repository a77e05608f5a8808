"""Typed client of the server's control routes.

Guarantees: every answer is checked against the schema version; every refusal becomes a
`ControlError` with the server's reason; a request that may have had an effect is sent once. Only
reads, closes and deletions, whose repetition changes nothing, and requests that certainly did not
arrive or were answered 503 (nothing was written) are tried again. What cannot be known raises
`TransportFailure`.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec
import tenacity
from forest_schema import Reason, Receipt, decode_receipt
from forest_schema.control import (
    CONTROL_PREFIX,
    CONTROL_TOKEN_HEADER,
    AttemptOpened,
    CleanupReport,
    CloseAttempt,
    EngineState,
    ErrorBody,
    Handshake,
    OpenAttempt,
    RestoreAttempt,
    WeightUpdate,
)
from forest_schema.version import check_message_version

_T = TypeVar("_T")

_ANY_TRANSPORT = (httpx.TransportError,)
"""Errors after which a request that changes nothing when repeated is sent again."""

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Transport errors after which the server certainly has not seen the request."""

IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. vLLM closes its end after 5: a request
that meets the close is lost, and may not be sent twice."""

CLOSE_MARGIN_S = 60.0
"""Seconds that sealing an attempt may take after its wait for admitted calls."""


class ControlError(RuntimeError):
    """A definite refusal by the server."""

    def __init__(self, status: int, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(f"server refused ({status}, {reason}): {message}")
        self.status = status
        self.reason = reason
        """A `Reason` value where the server gave one, else `http_<status>`."""
        self.param = param


class TransportFailure(RuntimeError):
    """The request's fate is unknown, or the server stayed unreachable."""


class ControlClient:
    """Async client of one server. Use as an async context manager.

    `url` is the server's root, e.g. `http://127.0.0.1:8000`; `api_key` is vLLM's `--api-key`,
    where the server has one; `attempts` bounds the tries of a
    repeatable request and `backoff_s` is the first pause between them (it doubles).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        weights_timeout_s: float = 600.0,
        attempts: int = 4,
        backoff_s: float = 0.2,
    ) -> None:
        self.url = url.rstrip("/")
        self._weights_timeout_s = weights_timeout_s
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._http = httpx.AsyncClient(
            base_url=self.url + CONTROL_PREFIX,
            # vLLM's own --api-key guards everything below /v1, these routes included.
            headers={"Authorization": f"Bearer {api_key or token}", CONTROL_TOKEN_HEADER: token},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S
            ),
        )

    async def __aenter__(self) -> "ControlClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def handshake(self) -> Handshake:
        """What the server captures and serves. Raises `SchemaError` for another version."""
        return await self._send(_ANY_TRANSPORT, "GET", "/handshake", Handshake)

    async def open_attempt(self, request: OpenAttempt) -> AttemptOpened:
        """A new attempt; sent once unless it certainly did not arrive."""
        return await self._send(_NOT_SENT, "POST", "/attempts", AttemptOpened, body=request)

    async def close_attempt(self, attempt_id: str, *, wait_s: float) -> Receipt:
        """Close admissions, wait up to `wait_s` for admitted calls, return the receipt."""
        return await self._send(
            _ANY_TRANSPORT,
            "POST",
            f"/attempts/{attempt_id}/close",
            Receipt,
            body=CloseAttempt(wait_s=wait_s),
            timeout_s=wait_s + CLOSE_MARGIN_S,
        )

    async def receipt(self, attempt_id: str) -> Receipt:
        """The attempt's receipt as it stands."""
        return await self._send(_ANY_TRANSPORT, "GET", f"/attempts/{attempt_id}/receipt", Receipt)

    async def restore_attempt(self, attempt_id: str, request: RestoreAttempt) -> AttemptOpened:
        """A new attempt that goes on with calls of an old one, which admits nothing any more.

        Sent once unless it certainly did not arrive; where it had arrived before, the refusal
        (`attempt_closed`) names the attempt that took over.
        """
        return await self._send(
            _NOT_SENT, "POST", f"/attempts/{attempt_id}/restore", AttemptOpened, body=request
        )

    async def delete_attempt(self, attempt_id: str) -> CleanupReport:
        """Drop the attempt's records and shard references; pending calls are kept."""
        return await self._send(_ANY_TRANSPORT, "DELETE", f"/attempts/{attempt_id}", CleanupReport)

    async def delete_partition(self, partition: str) -> CleanupReport:
        """Remove the partition's folder and records, late writes included."""
        return await self._send(_ANY_TRANSPORT, "DELETE", f"/partitions/{partition}", CleanupReport)

    async def pause(self) -> EngineState:
        """Hold generation, requests in flight included."""
        return await self._send(_NOT_SENT, "POST", "/pause", EngineState)

    async def resume(self) -> EngineState:
        """Go on generating."""
        return await self._send(_NOT_SENT, "POST", "/resume", EngineState)

    async def update_weights(self, request: WeightUpdate) -> EngineState:
        """Load a checkpoint directory into the running engine under a new version name."""
        return await self._send(
            _NOT_SENT,
            "POST",
            "/weights",
            EngineState,
            body=request,
            timeout_s=self._weights_timeout_s,
        )

    async def _send(
        self,
        retried: tuple[type[BaseException], ...],
        method: str,
        path: str,
        kind: type[_T],
        *,
        body: msgspec.Struct | None = None,
        timeout_s: float | None = None,
    ) -> _T:
        """The answer; tried again after the errors `retried` and where the store is unavailable."""
        return await self._retrying(
            lambda: self._request(method, path, kind, body, timeout_s),
            retry_if=lambda error: isinstance(error, retried) or _unavailable(error),
            what=f"{method} {path}",
        )

    async def _retrying(
        self,
        send: Callable[[], Awaitable[_T]],
        *,
        retry_if: Callable[[BaseException], bool],
        what: str,
    ) -> _T:
        policy = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(retry_if),
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_exponential(self._backoff_s, max=10.0),
            reraise=True,
        )

        async def attempt() -> _T:
            return await send()

        try:
            return await policy(attempt)
        except httpx.TransportError as error:
            certainty = "did not arrive" if isinstance(error, _NOT_SENT) else "may have arrived"
            raise TransportFailure(
                f"{what} at {self.url}: {type(error).__name__}: {error or 'no detail'}; the "
                f"request {certainty}"
            ) from error

    async def _request(
        self,
        method: str,
        path: str,
        kind: type[_T],
        body: msgspec.Struct | None,
        timeout_s: float | None,
    ) -> _T:
        response = await self._http.request(
            method,
            path,
            content=None if body is None else msgspec.json.encode(body),
            headers={"Content-Type": "application/json"} if body is not None else None,
            timeout=httpx.Timeout(timeout_s or self._timeout_s, connect=10.0),
        )
        if response.status_code >= 400:
            raise _refusal(response)
        if kind is Receipt:
            decoded: Any = decode_receipt(response.content)
            return decoded
        check_message_version(response.content, what=f"answer to {method} {path}")
        return msgspec.json.decode(response.content, type=kind)


def _unavailable(error: BaseException) -> bool:
    return isinstance(error, ControlError) and (
        error.status == 503 and error.reason == Reason.STORE_UNAVAILABLE
    )


def _refusal(response: httpx.Response) -> ControlError:
    try:
        error = msgspec.json.decode(response.content, type=ErrorBody).error
    except msgspec.MsgspecError:
        text = response.text[:500] or response.reason_phrase
        return ControlError(response.status_code, f"http_{response.status_code}", text)
    return ControlError(response.status_code, error.type, error.message, error.param)
