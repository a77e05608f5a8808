"""A real vLLM server inside the test process: seconds to start, one for the whole session.

The API server's event loop runs in a thread, the engine core in a forked process with random
weights. vLLM loads the plugins through their entry points, as in production.
"""

import importlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.support.thread_server import ThreadServer

CONTROL_TOKEN = "test-control-token-0123456789"
PLUGINS = "forest_renderer,forest_endpoints"
FORCED = "tests.support.forced:Forced"

T = TypeVar("T")

_ENVIRONMENT = {
    # Lets the CPU platform keep the executor inside the engine core's process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": PLUGINS,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The sampler compiles a ranking kernel at first use, which takes longer than all tests.
    "TORCHDYNAMO_DISABLE": "1",
}


_MODULES = {
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3",
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe",
    "Qwen2_5_VLForConditionalGeneration": "vllm.model_executor.models.qwen2_5_vl",
}
"""Architecture of a test's model -> its module in vLLM."""


def prepare_environment() -> None:
    """Variables that vLLM reads; must run before vLLM is imported."""
    os.environ.update(_ENVIRONMENT)


def server_arguments(model: Path, port: int, *extra: str) -> list[str]:
    """Command line of a small CPU server that captures."""
    return [
        "--model", str(model),
        "--served-model-name", "tiny",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--dtype", "float32",
        "--enforce-eager",
        "--max-model-len", "4096",
        "--max-num-seqs", "8",
        "--block-size", "32",
        "--kv-cache-memory-bytes", str(64 << 20),
        "--distributed-executor-backend", "uni",
        "--enable-prompt-tokens-details",
        "--logprobs-mode", "processed_logprobs",
        *extra,
    ]  # fmt: skip


def returns_routes_on_cpu() -> bool:
    """Whether this vLLM's CPU engine can return routed experts; from 0.31 on it needs a GPU.

    `scripts/check_vllm_versions.sh` names the version that must (`FOREST_ROUTES_ON_CPU`).
    """
    if "FOREST_ROUTES_ON_CPU" in os.environ:
        return True
    prepare_environment()
    from vllm.config import ModelConfig

    return hasattr(ModelConfig, "enable_return_routed_experts")


def import_vllm() -> None:
    """Import what servers need, once, before anything is forked."""
    import vllm.entrypoints.launchers.api_server.app_state
    import vllm.entrypoints.launchers.app
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401


class EngineServer(ThreadServer):
    """One server. Use as a context manager."""

    def __init__(self, model: Path, *extra: str, forest: dict[str, Any]) -> None:
        """`forest` are the settings of `--additional-config '{"forest": ...}'`."""
        super().__init__()
        prepare_environment()
        self._arguments = server_arguments(
            model,
            self.port,
            "--additional-config",
            json.dumps({"forest": {"control_token": CONTROL_TOKEN, **forest}}),
            *extra,
        )
        self.engine: Any = None
        self.app: Any = None
        self.control = httpx.Client(
            base_url=f"{self.url}/v1/forest/control",
            headers={"Authorization": f"Bearer {CONTROL_TOKEN}"},
            timeout=120,
        )

    def __exit__(self, *_: object) -> None:
        self.control.close()
        super().__exit__()

    async def _main(self) -> None:
        import_vllm()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.model_executor.models import ModelRegistry
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(self._arguments)
        (architecture,) = json.loads((Path(args.model) / "config.json").read_text())[
            "architectures"
        ]
        # A registered class needs no inspection in a process of its own.
        ModelRegistry.register_model(
            architecture, getattr(importlib.import_module(_MODULES[architecture]), architecture)
        )
        validate_parsed_serve_args(args)
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        # The CPU platform has just forced spawn, which would import everything again.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.engine = AsyncLLM.from_vllm_config(
            vllm_config=config, usage_context=UsageContext.OPENAI_API_SERVER
        )
        try:
            tasks = await self.engine.get_supported_tasks()
            self.app = build_app(args, tasks, self.engine.model_config)
            await init_app_state(self.engine, self.app.state, args, tasks)
            await self._serve(self.app)
        finally:
            self.engine.shutdown()
            self.engine = None

    # What tests do with an attempt.

    def open_attempt(self, partition: str = "run1-step0", rollout: str = "r0") -> str:
        """A fresh attempt's id."""
        answer = self.control.post(
            "/attempts", json={"rollout_id": rollout, "group_id": "g0", "partition": partition}
        )
        answer.raise_for_status()
        attempt: str = answer.json()["attempt_id"]
        return attempt

    def base_url(self, attempt: str) -> str:
        """base_url of the attempt's OpenAI client."""
        return f"{self.url}/v1/forest/{attempt}"

    def receipt(self, attempt: str) -> Any:
        """The attempt's receipt as it stands."""
        from forest_schema import decode_receipt

        answer = self.control.get(f"/attempts/{attempt}/receipt")
        answer.raise_for_status()
        return decode_receipt(answer.content)

    def close(self, attempt: str, wait_s: float = 30.0) -> Any:
        """Close admissions; the final receipt."""
        from forest_schema import decode_receipt

        answer = self.control.post(f"/attempts/{attempt}/close", json={"wait_s": wait_s})
        answer.raise_for_status()
        return decode_receipt(answer.content)


def worker_prompts(path: Path, since: int = 0) -> list[list[int]]:
    """Prompt ids that the engine process wrote down (see `tests.support.forced`)."""
    if not path.exists():
        return []
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()[since:]]


def wait_until(condition: Any, timeout: float = 60.0) -> None:
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not become true")
        time.sleep(0.01)


__all__: Sequence[str] = (
    "CONTROL_TOKEN", "PLUGINS", "EngineServer", "prepare_environment",
    "returns_routes_on_cpu", "server_arguments", "wait_until", "worker_prompts",
)  # fmt: skip


def scripted_engine(
    model: Path, state_dir: Path, *extra: str, prompts_file: Path | None = None
) -> EngineServer:
    """A server whose generations a request may script (`tests.support.forced`).

    The engine appends the prompt ids that it was given to `prompts_file`.
    """
    if prompts_file is not None:
        os.environ["FORCED_PROMPTS_FILE"] = str(prompts_file)
    return EngineServer(
        model,
        *extra,
        "--logits-processors",
        FORCED,
        # Forced leaves every request alone that does not ask for a script.
        forest={"state_dir": str(state_dir), "reproducible_logits_processors": [FORCED]},
    )
