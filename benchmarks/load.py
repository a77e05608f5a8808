"""Load from another process, so that the client's Python does not hold the server's up.

    python benchmarks/load.py

Reads one JSON line `[[url, body], ...]` at a time, sends these requests at once over kept
connections, and answers with one JSON line: the seconds until the last answer, the seconds of each
request, and the completion tokens of all.
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


def post(url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds and completion tokens of one request. Raises `RuntimeError` for a refusal."""
    parts = urlsplit(url)
    start = time.perf_counter()
    connection = getattr(_THREAD, "connection", None)
    if connection is None:
        connection = _THREAD.connection = http.client.HTTPConnection(parts.netloc)
    connection.request(
        "POST", parts.path, json.dumps(body), headers={"content-type": "application/json"}
    )
    answer = connection.getresponse()
    data = answer.read()
    seconds = time.perf_counter() - start
    if answer.status != 200:
        raise RuntimeError(data.decode())
    return seconds, json.loads(data)["usage"]["completion_tokens"]


def main() -> None:
    """Serve rounds until the input ends."""
    with ThreadPoolExecutor(64) as pool:
        for line in sys.stdin:
            start = time.perf_counter()
            sent = [pool.submit(post, url, body) for url, body in json.loads(line)]
            answers = [future.result() for future in sent]
            report = {
                "seconds": time.perf_counter() - start,
                "each": [seconds for seconds, _ in answers],
                "tokens": sum(tokens for _, tokens in answers),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
