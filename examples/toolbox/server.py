"""The stock vLLM server as a child process.

Guarantees: the plugin is found through its entry points alone; the process is stopped on the way
out, whatever happened; a server that does not come up is reported with the end of its log.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

START_TIMEOUT_S = 300.0


class ServerFailed(RuntimeError):
    """The server did not come up."""


@dataclass(frozen=True)
class Server:
    """Where a server answers and what reaches it."""

    port: int
    token_file: Path
    store: Path

    @property
    def url(self) -> str:
        """Root of its routes."""
        return f"http://127.0.0.1:{self.port}"

    def settings(self) -> dict[str, str]:
        """Configuration keys that reach it."""
        return {
            "server.url": self.url,
            "server.control_token_file": str(self.token_file),
            "server.store_path": str(self.store),
        }


def reserve(out: Path) -> Server:
    """A free port, a fresh control token and a store below `out`; nothing runs yet."""
    token_file = out / "control_token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_urlsafe(32))
    return Server(_free_port(), token_file, out / "store")


@contextlib.contextmanager
def serving(
    server: Server, model: Path, out: Path, console: Console, arguments: Sequence[str]
) -> Iterator[None]:
    """Serve `model`, with the ledger and the log below `out`. Raises `ServerFailed`."""
    forest = {"state_dir": str(out / "state"), "store_dir": str(server.store)}
    command = [
        sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry",
        "--model", str(model), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(server.port),
        "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "1024", "--max-num-seqs", "32", "--block-size", "32",
        "--kv-cache-memory-bytes", str(256 << 20),
        "--distributed-executor-backend", "uni",
        *arguments,
        "--generation-config", "vllm",
        "--logprobs-mode", "processed_logprobs",
        "--disable-uvicorn-access-log",
        "--additional-config", json.dumps({"forest": forest}),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "forest_renderer,forest_endpoints",
        "FOREST_CONTROL_TOKEN": server.token_file.read_text(),
        # Small on the CPU: one engine process without workers, no compiler, no hub.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = out / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        try:
            with console.status("starting vLLM"):
                _wait_until_healthy(process, server.url, log)
            console.print(f"vLLM serves {model.name} at {server.url}")
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"vLLM exited with status {process.returncode}:\n{_end_of(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.25)
    raise ServerFailed(f"vLLM did not answer within {START_TIMEOUT_S:.0f} s:\n{_end_of(log)}")


def _end_of(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
