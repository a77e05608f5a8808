"""Routes under `/v1/forest/{attempt}`: what an unmodified OpenAI client talks to."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from forest_schema.control import ATTEMPT_PREFIX

from vllm_forest_renderer import compat
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.serving.answers import read_json, refusal


class Handler(Protocol):
    """One API."""

    async def handle(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Answer one decoded request body."""
        ...


class ServingServices(Protocol):
    """What the routes work on."""

    @property
    def chat(self) -> Handler:
        """Chat Completions."""
        ...

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        ...

    def check_attempt(self, attempt_id: str) -> None:
        """Raise `ForestError` for an attempt that admits nothing."""
        ...

    async def models(self, raw_request: Request) -> Any:
        """vLLM's list of models."""
        ...


def serving_router(services: Callable[[Request], ServingServices]) -> APIRouter:
    """The routes; `services` finds what a request works on."""
    router = APIRouter(prefix=f"{ATTEMPT_PREFIX}/{{attempt}}", tags=["forest"])

    # FastAPI's own body parsing would answer errors in another shape and without a bound.
    @compat.with_cancellation
    @compat.load_aware_call
    async def run(body: tuple[Handler, dict[str, Any]], raw_request: Request) -> Response:
        handler, decoded = body
        return await handler.handle(decoded, raw_request)

    def posting(pick: Callable[[ServingServices], Handler]) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(raw_request: Request) -> Any:
            found = services(raw_request)
            try:
                body = await read_json(raw_request, found.max_body_bytes)
            except ForestError as error:
                return refusal(error, intent_written=False)
            return await run((pick(found), body), raw_request)

        return endpoint

    async def models(raw_request: Request) -> Response:
        found = services(raw_request)
        try:
            found.check_attempt(raw_request.path_params["attempt"])
        except ForestError as error:
            return refusal(error, intent_written=False)
        return JSONResponse((await found.models(raw_request)).model_dump())

    router.add_api_route(
        "/chat/completions",
        posting(lambda found: found.chat),
        methods=["POST"],
        name="forest_chat_completions",
        response_model=None,
    )
    router.add_api_route(
        "/models", models, methods=["GET"], name="forest_models", response_model=None
    )
    return router
