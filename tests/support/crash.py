"""Capture processes under load that report what was acknowledged, to be killed at any moment.

`python -m tests.support.crash DIRECTORY` forks one such process per line `SEED PARTITION` of its
standard input, so that a start costs milliseconds. On its standard output it says `{"pid": N}`,
then the process reports, one JSON line written in one piece after each acknowledgement, and when
the process is dead it says `{"dead": N}`.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from forest_schema import Reason

from tests.support.capture import Capture, make_delta

CHAINS = 6


def main() -> None:
    directory = Path(sys.argv[1])
    for line in sys.stdin:
        seed, partition = line.split()
        pid = os.fork()
        if pid == 0:
            asyncio.run(_serve(directory, random.Random(int(seed)), partition))
        report(pid=pid)
        os.waitpid(pid, 0)
        report(dead=pid)


def report(**fact: Any) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")


async def _serve(directory: Path, choose: random.Random, partition: str) -> None:
    capture = await Capture.open(directory)

    async def episodes() -> None:
        while True:
            await _episode(capture, choose, partition)

    await asyncio.gather(*(episodes() for _ in range(CHAINS)))


async def _episode(capture: Capture, choose: random.Random, partition: str) -> None:
    """One attempt: calls, failures, now and then a close and a cleanup."""
    attempt = await capture.attempt(partition)
    report(fact="opened", attempt=attempt)
    calls = []
    for _ in range(choose.randint(1, 6)):
        intent = await capture.admit(attempt)
        if choose.random() < 0.15:
            await capture.ledger.record_failure(attempt, intent.call_id, Reason.ENGINE_ERROR)
            report(fact="failed", attempt=attempt, call=intent.call_id)
            continue
        parent = choose.choice([None, *calls])
        delta = make_delta(choose.randint(1, 3000), 1)
        record = await capture.finish(attempt, intent, parent, delta=delta)
        report(fact="committed", attempt=attempt, call=record.call_id, chain=record.chain_digest)
        calls.append(record)
    if choose.random() < 0.7:
        await capture.ledger.close(attempt, 1.0)
        report(fact="closed", attempt=attempt)
        if choose.random() < 0.4:
            report(fact="cleaning", attempt=attempt)
            await capture.ledger.cleanup(attempt)
            report(fact="cleaned", attempt=attempt)


if __name__ == "__main__":
    main()
