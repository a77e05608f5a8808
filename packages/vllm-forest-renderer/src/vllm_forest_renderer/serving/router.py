"""Routes under `/v1/forest/{attempt}`: what an unmodified OpenAI client talks to."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from forest_schema.control import ATTEMPT_PREFIX
from starlette.types import Receive, Scope, Send

from vllm_forest_renderer import compat
from vllm_forest_renderer.control.messages import read_body
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.serving.answers import Failure


class CapturedRoutes(Protocol):
    """One API."""

    async def handle(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Answer one decoded request body."""
        ...

    async def measure(self, body: dict[str, Any], raw_request: Request) -> Response:
        """Length of the prompt that the body would make."""
        ...


class ServingServices(Protocol):
    """What the routes work on."""

    @property
    def chat(self) -> CapturedRoutes:
        """Chat Completions."""
        ...

    @property
    def responses(self) -> CapturedRoutes:
        """Responses."""
        ...

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        ...

    def check_attempt(self, attempt_id: str) -> None:
        """Raise `ForestError` for an attempt that admits nothing."""
        ...

    async def models(self) -> Any:
        """vLLM's list of models."""
        ...


_Handle = Callable[[dict[str, Any], Request], Awaitable[Response]]


def serving_router(services: Callable[[Request], ServingServices]) -> APIRouter:
    """The routes; `services` finds what a request works on."""
    router = APIRouter(prefix=f"{ATTEMPT_PREFIX}/{{attempt}}", tags=["forest"])

    # FastAPI's own body parsing would answer errors in another shape and without a bound.
    @compat.with_cancellation
    @compat.load_aware_call
    async def run(work: tuple[_Handle, dict[str, Any]], raw_request: Request) -> Response:
        handle, body = work
        return await handle(body, raw_request)

    def posting(
        pick: Callable[[ServingServices, dict[str, Any]], _Handle],
    ) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(raw_request: Request) -> Any:
            found = services(raw_request)
            try:
                body = await read_body(raw_request, dict[str, Any], max_bytes=found.max_body_bytes)
            except ForestError as error:
                return Failure.of(error, intent_written=False).response()
            return await run((pick(found, body), body), raw_request)

        return endpoint

    async def models(raw_request: Request) -> Response:
        found = services(raw_request)
        try:
            found.check_attempt(raw_request.path_params["attempt"])
        except ForestError as error:
            return Failure.of(error, intent_written=False).response()
        return JSONResponse((await found.models()).model_dump())

    posts: dict[str, Callable[[ServingServices, dict[str, Any]], _Handle]] = {
        "/chat/completions": lambda found, body: found.chat.handle,
        "/responses": lambda found, body: found.responses.handle,
        # A Responses request is the one that has an input.
        "/measure": lambda found, body: (
            found.responses.measure if "input" in body else found.chat.measure
        ),
    }
    for path, pick in posts.items():
        name = f"forest{path.replace('/', '_')}"
        router.add_api_route(path, posting(pick), methods=["POST"], name=name, response_model=None)
    router.add_api_route(
        "/models", models, methods=["GET"], name="forest_models", response_model=None
    )
    return router


async def unknown_route(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application for everything below the prefix that no route answers."""
    asked = f"{scope.get('method', scope['type'])} {scope['path']}"
    failure = Failure.upstream(
        f"there is no {asked[:200]}: see docs/http.md", 404, None, intent_written=False
    )
    await failure.response()(scope, receive, send)
