"""Byte ranges of shards over HTTP.

Guarantees: a range is answered with exactly its bytes; an unsatisfiable or malformed one is
refused, never widened; a shard that is deleted while it is read is read to its end. Reads run off
the event loop, a bounded piece at a time.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import Response
from fastapi.responses import StreamingResponse

_PIECE = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


class UnsatisfiableRange(ValueError):
    """A `Range` header that names no byte of the shard, or several ranges."""


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """`[start, end)` that a `Range` header asks of `size` bytes; None for the whole.

    Raises `UnsatisfiableRange`.
    """
    if header is None:
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        raise UnsatisfiableRange(f"Range: use one range as in bytes=0-1023, not {header[:80]!r}")
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1, size) if last else size
    else:
        start, end = max(size - int(last), 0), size
    if start >= end:
        raise UnsatisfiableRange(f"Range: the shard has {size} bytes")
    return start, end


def shard_response(path: Path, range_header: str | None) -> Response:
    """The file's bytes, 200 for the whole and 206 for a range. Blocks for one file open.

    Raises `OSError`; `UnsatisfiableRange`.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        wanted = parse_range(range_header, size)
    except BaseException:
        os.close(descriptor)
        raise
    start, end = wanted or (0, size)
    headers = {"accept-ranges": "bytes", "content-length": str(end - start)}
    if wanted is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        _pieces(descriptor, start, end),
        status_code=200 if wanted is None else 206,
        headers=headers,
        media_type="application/octet-stream",
    )


async def _pieces(descriptor: int, start: int, end: int) -> AsyncIterator[bytes]:
    try:
        while start < end:
            piece = await asyncio.to_thread(os.pread, descriptor, min(_PIECE, end - start), start)
            start += len(piece)
            yield piece
    finally:
        os.close(descriptor)
