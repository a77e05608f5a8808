"""vLLM endpoint plugin: wires ledger, store, capture and routes into the server.

Guarantees: a server that cannot capture exactly does not start, and the error says what to set;
vLLM's own routes and serving objects stay as they are, the capture routes work on copies.
"""

import copy
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from forest_schema.control import ATTEMPT_PREFIX

from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.engine_client import CaptureClient
from vllm_forest_renderer.capture.routes import RouteShape
from vllm_forest_renderer.capture.service import CaptureService
from vllm_forest_renderer.config import ForestConfig, unknown_variables
from vllm_forest_renderer.control import ControlServices, control_router, load_token
from vllm_forest_renderer.extensions import DELTA_SINKS, PREFIX_RESOLVERS, load_extension
from vllm_forest_renderer.ledger import Ledger
from vllm_forest_renderer.plugin import ENDPOINT_PLUGIN, GENERAL_PLUGIN, activation_advice
from vllm_forest_renderer.renderer import ForestRenderer
from vllm_forest_renderer.resolution import PrefixResolver
from vllm_forest_renderer.serving.chat import ChatAdapter
from vllm_forest_renderer.serving.exchange import CapturedApi
from vllm_forest_renderer.serving.reasoning import judging_on_tail
from vllm_forest_renderer.serving.responses import ResponsesAdapter
from vllm_forest_renderer.serving.router import serving_router, unknown_route
from vllm_forest_renderer.startup import check_startup
from vllm_forest_renderer.store.protocol import DeltaSink
from vllm_forest_renderer.weights import EngineControl

logger = logging.getLogger("vllm.forest")


@dataclass(frozen=True, kw_only=True)
class ForestState:
    """What the routes work on, in `app.state.forest`."""

    control: ControlServices
    service: CaptureService
    chat: CapturedApi
    responses: CapturedApi
    models_serving: Any
    max_body_bytes: int

    def check_attempt(self, attempt_id: str) -> None:
        """Raise `ForestError` for an attempt that admits nothing."""
        self.control.ledger.calls(attempt_id)

    async def models(self) -> Any:
        """vLLM's list of models."""
        return await self.models_serving.show_available_models()

    async def shutdown(self) -> None:
        """Make durable what is under way and release files."""
        await self.service.shutdown()
        await self.control.ledger.shutdown()
        await self.control.sink.shutdown()


class ForestEndpoints:
    """Entry point `vllm.endpoint_plugins: forest_endpoints`."""

    name = ENDPOINT_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the clean end of the server."""
        app.include_router(control_router(lambda request: request.app.state.forest.control))
        app.include_router(serving_router(lambda request: request.app.state.forest))
        app.mount(ATTEMPT_PREFIX, unknown_route)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(running: FastAPI) -> AsyncIterator[Any]:
            async with inner(running) as state:
                try:
                    yield state
                finally:
                    forest = getattr(running.state, "forest", None)
                    if forest is not None:
                        await forest.shutdown()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open ledger and store. Raises what names the setting to change."""
        vllm_config = engine_client.vllm_config
        config = check_startup(vllm_config)
        if not isinstance(engine_client.renderer, ForestRenderer):
            raise compat.UnsupportedVllm(
                f"the renderer is not wrapped: the plugin {GENERAL_PLUGIN} is not active; "
                f"{activation_advice()}"
            )
        for variable in unknown_variables():
            logger.warning("environment variable %s is not a setting", variable)
        model = args.served_model_name[0] if args.served_model_name else args.model
        config.state_path.mkdir(parents=True, exist_ok=True, mode=0o700)
        sink: DeltaSink = load_extension(DELTA_SINKS, config.delta_sink)(config.store_location)
        ledger = await Ledger.open(config.state_path / "ledger.sqlite", sink)
        shape = compat.route_shape(vllm_config)
        routes = RouteShape(*shape) if shape is not None else None
        control = EngineControl(
            engine_client,
            captures_routes=routes is not None,
            store_id=sink.store_id,
            model=model,
            chat_template=getattr(state.openai_serving_chat, "chat_template", None),
        )
        service = _service(config, vllm_config, ledger, sink, control, routes)
        client = CaptureClient(engine_client)
        chat = ChatAdapter(
            _capturing(state.openai_serving_chat, client, "parser_cls"),
            default_model=model,
            incremental=config.chat_stream == "incremental",
        )
        responses = ResponsesAdapter(
            _capturing(state.openai_serving_responses, client, "parser"),
            default_model=model,
        )
        state.forest = ForestState(
            control=ControlServices(
                ledger=ledger,
                sink=sink,
                token=load_token(config.control_token, config.state_path / "control-token"),
                engine=control,
            ),
            service=service,
            chat=CapturedApi(service, chat, keep_alive_s=config.keep_alive_s),
            responses=CapturedApi(service, responses, keep_alive_s=config.keep_alive_s),
            models_serving=state.openai_serving_models,
            max_body_bytes=config.max_body_bytes,
        )
        logger.info(
            "capturing chat completions and responses of %s under /v1/forest/{attempt}, %s routed "
            "experts: ledger %s, store %s (%s)",
            model,
            "with" if routes is not None else "without",
            config.state_path / "ledger.sqlite",
            config.store_location,
            sink.store_id,
        )


def _capturing(serving: Any, client: CaptureClient, parser_attribute: str) -> Any:
    """A copy of one of vLLM's serving objects that generates through the capture proxy."""
    copied = copy.copy(serving)
    copied.engine_client = client
    parser_class = getattr(copied, parser_attribute)
    if parser_class is not None:
        setattr(copied, parser_attribute, judging_on_tail(parser_class))
    return copied


def _service(
    config: ForestConfig,
    vllm_config: Any,
    ledger: Ledger,
    sink: DeltaSink,
    control: EngineControl,
    routes: RouteShape | None,
) -> CaptureService:
    resolver = load_extension(PREFIX_RESOLVERS, config.prefix_resolver)()
    if not isinstance(resolver, PrefixResolver):
        raise TypeError(
            f"prefix resolver {config.prefix_resolver!r} has no method resolve; see PrefixResolver"
        )
    changing = [
        f"logits processor {name}"
        for name in compat.custom_logits_processors(vllm_config.model_config)
        if name not in config.reproducible_logits_processors
    ]
    if getattr(vllm_config, "watermark_config", None) is not None:
        changing.append("watermark")
    return CaptureService(
        ledger=ledger,
        sink=sink,
        resolver=resolver,
        control=control,
        logprobs_mode=vllm_config.model_config.logprobs_mode,
        routes=routes,
        server_changes=changing,
        allow_unreproducible=config.allow_unreproducible_sampling,
        hot_prefix_tokens=config.hot_prefix_tokens,
        hot_media_bytes=config.hot_media_bytes,
    )
