"""Pause, resume and weight updates of the running engine, and what the server says about itself.

Guarantees: updates are in-process engine calls, one at a time; generations in flight are frozen,
not lost, their tokens are labelled with the weights that made them, and no key or value computed
with old weights survives in the prefix cache. Where the engine does not label tokens, generations
and updates of one process exclude each other. An update that fails half-way leaves the engine
paused and says so, it never serves a mixture.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forest_schema.control import EngineState, Handshake, WeightUpdate
from forest_schema.model_files import model_digests
from forest_schema.reasons import Reason
from forest_schema.routes import ROUTES

from vllm_forest_renderer import __version__, compat
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.names import check_label

_LOADING = "loading "
"""Start of the engine's weight version while weights are loaded. The engine itself holds it, so
every API-server process knows of an update that did not finish."""

FEATURES = ("chat", "responses", "measure", "streaming")
"""Abilities that every server's handshake reports."""

WEIGHTS_FEATURE = "weights"
"""Reported where weights can be updated exactly."""

_POLL_S = 0.05
"""Pause between two looks at an engine that another server process has paused."""


class _Gate:
    """Generations pass while it is open; `shut` waits for those inside."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside = 0

    async def enter(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def shut(self) -> None:
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()


class EngineControl:
    """Control over one vLLM engine client."""

    def __init__(
        self,
        engine: Any,
        *,
        store_id: str,
        model: str,
        chat_template: str | None,
        captures_routes: bool,
    ) -> None:
        """`model` is the served name; `chat_template` the text of `--chat-template`, if given."""
        self._engine = engine
        self._store_id = store_id
        self._model = model
        self._chat_template = chat_template
        self._lock = asyncio.Lock()
        self._gate = _Gate()
        self.labels_tokens = compat.labels_tokens_with_versions()
        """The engine says which weights made each generated token. Where it does not, no
        generation may span two versions."""
        self._captures_routes = captures_routes
        self._inexact_reload = compat.inexact_reload(engine.vllm_config.model_config)

    async def weight_version(self) -> str:
        """Name of the weights that the next token is made with."""
        version: str = await self._engine.get_weight_version()
        return version

    @asynccontextmanager
    async def generation(self) -> AsyncIterator[Callable[[], Awaitable[str | None]]]:
        """Around one generation, its admission included.

        What it gives names, at the end of the generation, the version that made all its tokens;
        None where the engine labels them. Raises `ForestError` (`engine_error`) there if another
        process of the server changed the weights meanwhile.
        """
        if self.labels_tokens:
            yield _labelled
            return
        await self._gate.enter()
        try:
            before = await self._settled_version()

            async def whole() -> str:
                if await self.weight_version() != before:
                    raise ForestError(
                        Reason.ENGINE_ERROR,
                        "the weights changed around this generation; repeat the call",
                    )
                return before

            yield whole
        finally:
            self._gate.leave()

    async def _settled_version(self) -> str:
        while True:
            version = await self.weight_version()
            if not version.startswith(_LOADING) and not await self._engine.is_paused():
                return version
            await asyncio.sleep(_POLL_S)

    async def handshake(self) -> Handshake:
        """What the trainer checks before its first rollout."""
        model_config = self._engine.vllm_config.model_config
        digests = await asyncio.to_thread(
            model_digests,
            Path(model_config.model),
            tokenizer=Path(model_config.tokenizer),
            chat_template=self._chat_template,
        )
        return Handshake(
            renderer_version=__version__,
            vllm_version=compat.installed_version()[1],
            store=self._store_id,
            model=self._model,
            model_digest=digests.model,
            tokenizer_digest=digests.tokenizer,
            template_digest=digests.template,
            processor_digest=digests.processor,
            max_model_len=model_config.max_model_len,
            logprobs_mode=model_config.logprobs_mode,
            weight_version=await self.weight_version(),
            features=(
                *FEATURES,
                *([WEIGHTS_FEATURE] if self._inexact_reload is None else ()),
                *([ROUTES] if self._captures_routes else ()),
            ),
        )

    async def pause(self) -> EngineState:
        """Freeze generation; requests in flight wait. Does nothing where it is paused."""
        async with self._lock:
            await self._pause()
            return await self._state()

    async def resume(self) -> EngineState:
        """Go on generating. Raises `ForestError` after a weight update that did not finish."""
        async with self._lock:
            version = await self.weight_version()
            if version.startswith(_LOADING):
                raise ForestError(
                    Reason.ENGINE_ERROR,
                    f"the engine stays paused: {version!r} did not finish; update the weights "
                    "again",
                )
            await self._resume()
            return await self._state()

    async def update_weights(self, update: WeightUpdate) -> EngineState:
        """Load weights between two tokens. The engine is paused afterwards if it was before.

        Raises `ForestError`: `unsupported_request` for a model whose reload would not be exact and
        `malformed_request` for a directory without weights, with nothing changed; `engine_error`
        where loading failed, with the engine left paused.
        """
        if self._inexact_reload is not None:
            raise ForestError(Reason.UNSUPPORTED_REQUEST, self._inexact_reload)
        check_label(update.version, "version")
        if update.version.startswith(_LOADING):
            raise ForestError(
                Reason.MALFORMED_REQUEST,
                f"version: must not start with {_LOADING!r}",
                param="version",
            )
        directory = Path(update.path)
        if not await asyncio.to_thread(_has_weights, directory):
            raise ForestError(
                Reason.MALFORMED_REQUEST,
                "path: no *.safetensors in this directory on the server; give the directory of a "
                "Hugging Face checkpoint that the engine's workers can read",
                param="path",
            )
        async with self._lock:
            unfinished = (await self.weight_version()).startswith(_LOADING)
            was_paused = not unfinished and await self._engine.is_paused()
            await self._pause()
            try:
                await self._engine.update_weight_version(_LOADING + update.version)
                await self._engine.collective_rpc(
                    "reload_weights", kwargs={"weights_path": str(directory)}
                )
                # Requests in flight give up their blocks too and compute them again.
                if not await self._engine.reset_prefix_cache(reset_running_requests=True):
                    raise RuntimeError("the prefix cache could not be reset")
                await self._engine.update_weight_version(update.version)
            except Exception as error:
                raise ForestError(
                    Reason.ENGINE_ERROR,
                    f"loading weights {update.version!r} failed ({error}); the engine stays "
                    "paused: update the weights again",
                ) from error
            if not was_paused:
                await self._resume()
            return await self._state()

    async def _pause(self) -> None:
        if await self._engine.is_paused():
            return
        try:
            if not self.labels_tokens:
                await self._gate.shut()
            # Other processes of the server may have generations in flight.
            mode = "keep" if self.labels_tokens else "wait"
            await self._engine.pause_generation(mode=mode, clear_cache=False)
        except BaseException:
            self._gate.open()
            raise

    async def _resume(self) -> None:
        await self._engine.resume_generation()
        self._gate.open()

    async def _state(self) -> EngineState:
        return EngineState(
            paused=await self._engine.is_paused(), weight_version=await self.weight_version()
        )


async def _labelled() -> None:
    """The engine says it itself."""


def _has_weights(directory: Path) -> bool:
    try:
        return any(directory.glob("*.safetensors"))
    except (OSError, ValueError):
        return False  # A name too long, or one with a NUL.
