"""A web server in a thread of the test process. Use as a context manager."""

import asyncio
import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import uvicorn

T = TypeVar("T")


def free_port() -> int:
    """A port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ThreadServer(ABC):
    """The server's event loop runs in a thread of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._uvicorn: uvicorn.Server
        self._thread = threading.Thread(target=self._work, daemon=True)

    @abstractmethod
    async def _main(self) -> None:
        """Prepare, `_serve` an application until the end, clean up."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(60)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    async def _serve(self, app: Any, **options: Any) -> None:
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", **options)
        app.state.server = self._uvicorn = uvicorn.Server(config)
        # Only the main thread may install signal handlers.
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._error = error
            self._ready.set()
