"""The real ledger, store and control routes over HTTP, with scripted generations.

Only the engine is missing: a chat request's last message says what happens: `say 7 yes` answers
`yes` with 7 random tokens. A request whose history ends with an earlier answer of its attempt
continues that call, any other is a root, as the serving side decides for real prompts.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from forest_schema import CallRecord, CompletionStatus, Reason, WeightSpan
from forest_schema.control import CONTROL_PREFIX, EngineState, Handshake, WeightUpdate
from forest_schema.items import output_evidence
from forest_schema.model_files import model_digests
from forest_schema.shards import LOGPROBS, TOKENS
from vllm_forest_renderer.control import ControlServices, ControlToken, control_router
from vllm_forest_renderer.errors import AttemptError

from tests.support.capture import Capture
from tests.support.engine import CONTROL_TOKEN
from tests.support.thread_server import ThreadServer


class ScriptedEngine:
    """Generations, weights and state that the control routes steer."""

    def __init__(self, model: Path, *, vocab: int, max_model_len: int) -> None:
        self.digests = model_digests(model)
        self.vocab = vocab
        self.max_model_len = max_model_len
        self.weight_version = "unknown"
        self.updates: list[str] = []
        self.paused = False
        self.features: tuple[str, ...] = ("chat", "weights")

    async def handshake(self) -> Handshake:
        return Handshake(
            renderer_version="test",
            vllm_version="scripted",
            store="store",
            model="tiny",
            model_digest=self.digests.model,
            tokenizer_digest=self.digests.tokenizer,
            template_digest=self.digests.template,
            processor_digest=self.digests.processor,
            max_model_len=self.max_model_len,
            logprobs_mode="processed_logprobs",
            weight_version=self.weight_version,
            features=self.features,
        )

    async def pause(self) -> EngineState:
        self.paused = True
        return self._state()

    async def resume(self) -> EngineState:
        self.paused = False
        return self._state()

    async def update_weights(self, update: WeightUpdate) -> EngineState:
        assert (Path(update.path) / "config.json").is_file()
        self.weight_version = update.version
        self.updates.append(update.version)
        return self._state()

    def _state(self) -> EngineState:
        return EngineState(paused=self.paused, weight_version=self.weight_version)


class ScriptedServer(ThreadServer):
    """One server."""

    def __init__(
        self, directory: Path, model: Path, *, vocab: int = 61, max_model_len: int = 4096
    ) -> None:
        super().__init__()
        self.directory = directory
        self.engine = ScriptedEngine(model, vocab=vocab, max_model_len=max_model_len)
        self.token_file = directory / "control_token"
        self.token_file.parent.mkdir(parents=True, exist_ok=True)
        self.token_file.write_text(CONTROL_TOKEN)
        self.capture: Capture
        self.requests: list[str] = []
        """Method and path of every request, in order of arrival."""
        self.open_now = 0
        """Chat requests being answered."""
        self.open_most = 0
        self.gate = threading.Event()
        """Requests that `wait` hold until it is set."""
        self._calls: dict[str, list[tuple[str, CallRecord]]] = {}
        self._random = np.random.default_rng(0)

    @property
    def store(self) -> Path:
        """Root of the delta store."""
        return self.directory / "store"

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._uvicorn.force_exit = True
        super().__exit__()

    async def _main(self) -> None:
        self.capture = await Capture.open(self.directory)
        services = ControlServices(
            self.capture.ledger, self.capture.sink, ControlToken(CONTROL_TOKEN), self.engine
        )
        app = FastAPI()
        app.middleware("http")(self._count)
        app.include_router(control_router(lambda _: services))
        app.add_api_route("/v1/forest/{attempt}/chat/completions", self._chat, methods=["POST"])
        await self._serve(app, lifespan="off")
        await self.capture.shutdown()

    async def _count(self, request: Request, call_next: Any) -> Any:
        self.requests.append(f"{request.method} {request.url.path}")
        if request.url.path.startswith(CONTROL_PREFIX):
            return await call_next(request)
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            return await call_next(request)
        finally:
            self.open_now -= 1

    async def _chat(self, attempt: str, request: Request) -> JSONResponse:
        body = msgspec.json.decode(await request.body())
        script = str(body["messages"][-1]["content"]).split()
        verb, arguments = script[0], script[1:]
        if verb == "refuse":
            return _error(400, "context too long")
        try:
            intent = await self.capture.ledger.record_intent(attempt, api="chat", model="tiny")
        except AttemptError as error:
            return _error(422, str(error))
        if verb == "wait":
            await asyncio.to_thread(self.gate.wait)
        if verb == "hang":
            await asyncio.sleep(3600)
        if verb == "fail":
            await self.capture.ledger.record_failure(
                attempt, intent.call_id, Reason.ENGINE_ERROR, "scripted"
            )
            return _error(400, "the engine failed")
        if verb == "crash":
            await self.capture.ledger.record_failure(
                attempt, intent.call_id, Reason.ENGINE_ERROR, "scripted"
            )
            return _error(500, "the server failed")
        generated = int(arguments[0]) if arguments and arguments[0].isdigit() else 4
        text = " ".join(arguments[1:]) or f"answer {intent.order}"
        finish = "length" if verb == "long" else "stop"
        if verb != "lose":
            await self._commit(attempt, intent, body, text, generated, finish)
        return JSONResponse(_completion(attempt, intent.order, text, finish))

    async def _commit(
        self, attempt: str, intent: Any, body: Any, text: str, generated: int, finish: str
    ) -> None:
        known = self._calls.setdefault(attempt, [])
        said = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
        parent = next((r for t, r in reversed(known) if said and t == said[-1]), None)
        delta = {
            TOKENS: self._random.integers(1, self.engine.vocab, 3 + generated, dtype=np.int32),
            LOGPROBS: np.full(generated, -np.log(self.engine.vocab), np.float32),
        }
        record = await self.capture.finish(
            attempt,
            intent,
            parent,
            delta=delta,
            finish_reason=finish,
            status=CompletionStatus.COMPLETED if finish == "stop" else CompletionStatus.INCOMPLETE,
            output=output_evidence(
                _response_id(attempt, intent.order),
                [{"role": "assistant", "content": text}],
                api="chat",
            ),
            weight_spans=(WeightSpan(version=self.engine.weight_version, start=0, end=generated),),
        )
        known.append((text, record))


def _response_id(attempt: str, order: int) -> str:
    return f"chatcmpl-{attempt[-12:]}-{order}"


def _completion(attempt: str, order: int, text: str, finish: str) -> dict[str, Any]:
    return {
        "id": _response_id(attempt, order),
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text},
            }
        ],
    }


def _error(status: int, message: str) -> JSONResponse:
    body = {"error": {"message": message, "type": "scripted", "param": None, "code": status}}
    return JSONResponse(body, status, headers={"x-should-retry": "false"})
