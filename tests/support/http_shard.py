"""Shards over the control routes."""

import httpx


class HttpShard:
    """`ByteSource` over range reads."""

    def __init__(self, client: httpx.Client, path: str) -> None:
        self._client, self._path = client, path

    def size(self) -> int:
        head = self._client.get(self._path, headers={"Range": "bytes=0-0"})
        assert head.status_code == 206
        return int(head.headers["content-range"].rpartition("/")[2])

    def read(self, offset: int, length: int) -> memoryview:
        if not length:
            return memoryview(b"")
        wanted = f"bytes={offset}-{offset + length - 1}"
        answer = self._client.get(self._path, headers={"Range": wanted})
        assert answer.status_code == 206
        return memoryview(answer.content)
