"""Runs a function on several gloo ranks, as torchrun would.

Ranks are forked from a server process that has imported torch and Megatron once, so that a test
with two ranks costs seconds. Megatron's global state never enters the test process.
"""

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["megatron_forest_trainer.controller.run", "transformers"])


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


def run_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 1, timeout_s: float = 180
) -> list[Any]:
    """`function(*args)` on `ranks` processes; their results in rank order.

    `function` must be importable by name, and its arguments and result picklable. Raises
    `RankError` with the traceback of the first rank that raised.
    """
    port = _free_port()
    processes, connections = [], []
    for rank in range(ranks):
        parent, child = FORKSERVER.Pipe(duplex=False)
        process = FORKSERVER.Process(target=_rank, args=(child, rank, ranks, port, function, args))
        process.start()
        child.close()
        processes.append(process)
        connections.append(parent)
    results: dict[int, Any] = {}
    try:
        while len(results) < ranks:
            ready = wait([c for i, c in enumerate(connections) if i not in results], timeout_s)
            if not ready:
                raise RankError(f"ranks {set(range(ranks)) - set(results)}: no result in time")
            for connection in ready:
                rank = connections.index(connection)  # type: ignore[arg-type]
                try:
                    ok, value = connections[rank].recv()
                except EOFError:
                    ok, value = False, "the process ended without a result"
                if not ok:
                    raise RankError(f"rank {rank}:\n{value}")
                results[rank] = value
    finally:
        for process in processes:
            process.join(5 if len(results) == ranks else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [results[rank] for rank in range(ranks)]


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(
    connection: Connection,
    rank: int,
    ranks: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch
    from megatron_forest_trainer.model import parallel
    from megatron_forest_trainer.testing import cpu

    torch.set_num_threads(1)
    cpu.enable()
    try:
        result = function(*args)
        parallel.shutdown()
    except BaseException:
        connection.send((False, traceback.format_exc()))
    else:
        connection.send((True, result))
    finally:
        connection.close()
