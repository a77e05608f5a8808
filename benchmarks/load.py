"""Load from another process, so that the client's Python does not hold the server's up.

    python benchmarks/load.py

Reads one JSON line `[[url, body], ...]` at a time, sends these streaming chat requests at once over
kept connections, and answers with one JSON line when all have ended: the seconds until then, and of
each request the seconds to its first chunk and to its end, the message and the usage. Chunks are
taken apart after the last request has ended, so that their size costs the clock nothing.
"""

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any
from urllib.parse import urlsplit

_THREAD = local()
_KEPT_S = 2.0
"""Idle seconds after which a connection is not used again: the server closes it after five."""


def post(url: str, body: dict[str, Any]) -> tuple[float, float, list[bytes]]:
    """Seconds to the first chunk and to the end, and the lines. Raises `RuntimeError`."""
    parts = urlsplit(url)
    start = time.perf_counter()
    connection = getattr(_THREAD, "connection", None)
    if connection is None or start - _THREAD.used > _KEPT_S:
        connection = _THREAD.connection = http.client.HTTPConnection(parts.netloc)
    connection.request(
        "POST", parts.path, json.dumps(body), headers={"content-type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    first, lines = 0.0, []
    while line := answer.readline():
        if line.startswith(b"data: "):
            first = first or time.perf_counter() - start
            lines.append(line)
    _THREAD.used = time.perf_counter()
    return first, _THREAD.used - start, lines


def assembled(lines: list[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The assistant message and the usage that a stream's chunks add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for line in lines:
        if line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "choices" not in chunk:
            raise RuntimeError(line.decode())
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    part["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.get("id") or call["id"]
                for key in ("name", "arguments"):
                    call["function"][key] += part["function"].get(key) or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    return message, usage


def main() -> None:
    """Serve rounds until the input ends."""
    with ThreadPoolExecutor(64) as pool:
        for line in sys.stdin:
            start = time.perf_counter()
            sent = [pool.submit(post, url, body) for url, body in json.loads(line)]
            answers = [future.result() for future in sent]
            seconds = time.perf_counter() - start
            requests = []
            for first, whole, lines in answers:
                message, usage = assembled(lines)
                requests.append(
                    {"first": first, "seconds": whole, "message": message, "usage": usage}
                )
            print(json.dumps({"seconds": seconds, "requests": requests}), flush=True)


if __name__ == "__main__":
    main()
