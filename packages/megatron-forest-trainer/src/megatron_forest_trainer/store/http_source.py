"""Random access to a shard over HTTP range reads.

Guarantees: bytes come from one unchanged shard (its length never varies between answers); a read
transfers only the blocks that are not cached; transport failures and 5xx answers are retried, which
is safe because a shard never changes; everything else raises `ShardError`.
"""

import threading

import httpx
from forest_schema import Reason
from forest_schema.shards import ShardError
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

BLOCK = 1 << 20
"""Bytes of a cached block: one request covers all missing blocks of a read."""

_ATTEMPTS = 5


class _Unavailable(Exception):
    """A failure that a later try may not meet."""


class HttpShard:
    """A `forest_schema.shards.ByteSource` over `GET url` with a `Range` header."""

    def __init__(self, client: httpx.Client, url: str, *, shard: str) -> None:
        """`client` carries the server's address and the control token."""
        self._client = client
        self._url = url
        self._shard = shard
        self._lock = threading.Lock()
        self._blocks: dict[int, bytes] = {}
        self._size: int | None = None

    def size(self) -> int:
        """Length of the shard in bytes."""
        with self._lock:
            if self._size is None:
                self._fetch(0, 1)
            assert self._size is not None
            return self._size

    def read(self, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes from `offset`. Raises `ShardError`."""
        if length == 0:
            return memoryview(b"")
        with self._lock:
            first, last = offset // BLOCK, (offset + length - 1) // BLOCK
            missing = [n for n in range(first, last + 1) if n not in self._blocks]
            if missing:
                self._fetch(missing[0], missing[-1] + 1)
            data = b"".join(self._blocks[n] for n in range(first, last + 1))
        start = offset - first * BLOCK
        view = memoryview(data)[start : start + length]
        if len(view) != length:
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"shard {self._shard}: {len(view)} of {length} bytes at offset {offset}",
            )
        return view

    def _fetch(self, first: int, stop: int) -> None:
        """Cache the blocks `[first, stop)`."""
        retrying = Retrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=2.0),
            retry=retry_if_exception_type(_Unavailable),
            reraise=True,
        )
        try:
            data, size = retrying(self._request, first * BLOCK, stop * BLOCK - 1)
        except _Unavailable as error:
            raise ShardError(
                Reason.UNREADABLE_SHARD, f"shard {self._shard}: {error} ({_ATTEMPTS} tries)"
            ) from error
        if self._size is not None and size != self._size:
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"shard {self._shard} changed its length from {self._size} to {size} bytes",
            )
        self._size = size
        for number in range(first, stop):
            start = (number - first) * BLOCK
            self._blocks[number] = data[start : start + BLOCK]

    def _request(self, start: int, end: int) -> tuple[bytes, int]:
        """Bytes `[start, end]`, as far as the shard goes, and the shard's length."""
        try:
            answer = self._client.get(self._url, headers={"Range": f"bytes={start}-{end}"})
        except httpx.TransportError as error:
            raise _Unavailable(f"not reachable: {error!r}") from error
        if answer.status_code >= 500:
            raise _Unavailable(f"the server answered {answer.status_code}")
        if answer.status_code == 200:
            # A server may answer with the whole file, in particular to a range behind its end.
            whole = answer.content
            return whole[start : end + 1], len(whole)
        if answer.status_code != 206:
            hint = {
                401: "; check server.control_token_file",
                403: "; check server.control_token_file",
                404: "; it was cleaned up, or the receipt is another server's",
            }.get(answer.status_code, "")
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"shard {self._shard}: the server answered {answer.status_code}{hint}",
            )
        content_range = answer.headers.get("content-range", "")
        span, _, total = content_range.removeprefix("bytes ").partition("/")
        expected_end = min(end, int(total) - 1) if total.isdigit() else -1
        if span != f"{start}-{expected_end}" or len(answer.content) != expected_end - start + 1:
            raise ShardError(
                Reason.UNREADABLE_SHARD,
                f"shard {self._shard}: asked for bytes {start}-{end}, got {content_range!r} with "
                f"{len(answer.content)} bytes",
            )
        return answer.content, int(total)
