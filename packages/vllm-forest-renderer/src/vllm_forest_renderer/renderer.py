"""The capture hook around vLLM's renderers.

Guarantees: outside a captured request the wrapped renderer behaves as the registered one. Inside,
a continuation's prompt is its parent's captured tokens, bit for bit, followed by what the template
renders after them; only that tail is tokenized. A cut that cannot be proven leaves the request as
the renderer renders it: a root, with the reason.
"""

import asyncio
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from forest_schema.reasons import Reason

from vllm_forest_renderer import compat
from vllm_forest_renderer.context import CURRENT, Call, Predecessor
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.family import media_family
from vllm_forest_renderer.media.items import MediaFamily
from vllm_forest_renderer.media.placing import place
from vllm_forest_renderer.media.retained import captured_media, check_count, check_retained
from vllm_forest_renderer.plugin import wrapped
from vllm_forest_renderer.render_options import render_option_digest
from vllm_forest_renderer.resolution import (
    AmbiguousParent,
    Candidate,
    MissingParentEvidence,
    Root,
    verify_candidate,
)
from vllm_forest_renderer.resolution.source_history import SUFFIX_ROLES
from vllm_forest_renderer.splice import (
    NotProvable,
    Proof,
    Tail,
    TailProver,
    answered,
    answered_async,
)
from vllm_forest_renderer.startup import check_startup, will_capture
from vllm_forest_renderer.template_sandbox import quicken_chat_templates

_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids")


class ForestRenderer:
    """Mixin in front of a registered renderer class."""

    _prover: TailProver | None = None
    _media: MediaFamily | None = None

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """Raises what `check_startup` raises, for a server that will capture."""
        if will_capture(config):
            check_startup(config)
        super().__init__(config, tokenizer)  # type: ignore[call-arg]

    async def render_chat_async(
        self,
        conversations: Sequence[list[Any]],
        chat_params: Any,
        tok_params: Any = None,
        **keywords: Any,
    ) -> Any:
        """Resolve the parent, then render; the prompt of a continuation comes out spliced."""
        render: Any = super().render_chat_async  # type: ignore[misc]
        call = CURRENT.get()
        if call is None:
            return await render(conversations, chat_params, tok_params, **keywords)
        if len(conversations) != 1:
            raise ForestError(Reason.UNSUPPORTED_REQUEST, "a captured request is one conversation")
        renderer: Any = self
        call.tok_params = tok_params or renderer.default_chat_tok_params
        call.render_option_digest = render_option_digest(
            chat_params,
            model=call.model,
            add_special_tokens=call.tok_params.add_special_tokens,
            takes_api_fields=not isinstance(self, compat.HfRenderer),
        )
        await _resolve(call)
        if call.history.media():
            self.forest_media()  # refuses before anything is fetched or decoded
        # Without the cache that leaves out tensors which the engine is believed to have.
        keywords["skip_mm_cache"] = True
        try:
            converted, inputs = await render(
                conversations, chat_params, call.tok_params, **keywords
            )
        except Exception as error:
            if compat.is_oversized_image(error):
                raise ForestError(
                    Reason.MALFORMED_REQUEST, f"messages: {error}", param="messages"
                ) from error
            raise
        (engine_input,) = inputs
        if engine_input.get("type") == "multimodal":
            await self._forest_place_media(call, engine_input)
        elif engine_input.get("type") != "token":
            raise ForestError(
                Reason.UNSUPPORTED_ITEM,
                "only prompts of text and images are captured",
                param="messages",
            )
        served = engine_input["prompt_token_ids"]
        if call.predecessor is None:
            call.prompt_tokens = call.tail_tokens = served
        elif served is not call.prompt_tokens and served != call.prompt_tokens:
            raise ForestError(
                Reason.MISSING_PARENT_EVIDENCE, "the renderer changed the captured tokens"
            )
        else:
            call.prompt_tokens = served
        return converted, inputs

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        """Parent's tokens and tokenized tail for a continuation, else what the renderer gives.

        Where there are media, stand-ins of the parent's media take the place of its tokens: vLLM
        processes and expands all of them, then `render_chat_async` splices.
        """
        render: Any = super().render_messages_async  # type: ignore[misc]
        call = CURRENT.get()
        if call is None:
            return await render(messages, params)
        candidate, call.candidate = call.candidate, None
        if candidate is not None:
            try:
                return list(messages), await self._forest_continue(
                    call, candidate, messages, params
                )
            except NotProvable as error:
                call.root_reason = error.reason
        converted, prompt = await render(messages, params)
        self._forest_check_placeholders(prompt.get("prompt"), len(call.history.media()))
        return converted, prompt

    async def _forest_continue(
        self, call: Call, candidate: Candidate, messages: list[Any], params: Any
    ) -> Any:
        """Prompt of a continuation. Raises `NotProvable` and `ForestError`."""
        parent = candidate.parent
        tokens = await call.history_tokens(parent, call.calls)
        proof = self.forest_prover().prove(
            messages,
            _turn_count(messages, candidate, call),
            generated=tokens[len(tokens) - parent.generated_len :],
            options=call.render_option_digest or "",
            used_null_empty_equivalence=candidate.used_null_empty_equivalence,
            stop_token_ids=parent.sampling.stop_token_ids,
            stopped_on_string=isinstance(parent.stop_reason, str),
        )
        captured = captured_media(parent, call.calls)
        sent, inherited = call.history.media(), call.history.media(candidate.item_count)
        text_only = not sent and not captured
        in_thread = text_only and self._forest_renders_alike
        prove = self._forest_prove_in_thread if in_thread else self._forest_prove_on_loop
        tail, tail_tokens, media = await prove(proof, params, call.tok_params)
        call.predecessor = Predecessor(parent, candidate.used_null_empty_equivalence)
        check_count(len(inherited), captured)
        self._forest_check_placeholders(tail.text, len(sent) - len(inherited))
        if text_only:
            call.tail_tokens, call.prompt_tokens = tail_tokens, tokens + tail_tokens
            return compat.TokensPrompt(prompt_token_ids=call.prompt_tokens)
        call.retained, call.inherited_tokens = captured, tokens
        stand_ins = self.forest_media().stand_ins([old.occurrence.modality for old in captured])
        return compat.TokensPrompt(prompt_token_ids=stand_ins + tail_tokens, **media)

    async def _forest_prove_in_thread(
        self, proof: Proof[Tail], params: Any, tok_params: Any
    ) -> "_Proven":
        """One hand-over to vLLM's renderer thread for templates, proof and tokens."""
        render: Any = super().render_messages  # type: ignore[misc]

        def prove() -> _Proven:
            tail = answered(proof, lambda asked: prompt_text(render(list(asked), params)[1]))
            return _Proven(tail, self._forest_tokenize(tail, tok_params), {})

        proven: _Proven = await self._forest_in_thread(prove)
        return proven

    async def _forest_prove_on_loop(
        self, proof: Proof[Tail], params: Any, tok_params: Any
    ) -> "_Proven":
        """Renderings are waited for: vLLM fetches media without holding up its renderer thread."""
        render: Any = super().render_messages_async  # type: ignore[misc]
        first: Any = None

        async def text(asked: Sequence[Any]) -> str:
            nonlocal first
            _, prompt = await render(list(asked), params)
            first = first or prompt
            return prompt_text(prompt)

        tail = await answered_async(proof, text)
        tokens = await self._forest_in_thread(
            functools.partial(self._forest_tokenize, tail, tok_params)
        )
        # A probe leaves media out; the first messages asked for are the request's but for words.
        media = {key: first[key] for key in _MEDIA_KEYS if key in first}
        return _Proven(tail, tokens, media)

    async def _forest_in_thread(self, work: Callable[[], Any]) -> Any:
        return await compat.in_renderer_thread(self, work)

    async def _forest_place_media(self, call: Call, engine_input: Any) -> None:
        """Splice a processed prompt and check every retained item. Raises `ForestError`."""
        items = self.forest_media().read(engine_input, call.history.media())
        if call.predecessor is None:
            call.media = items
            return
        rendered, history = engine_input["prompt_token_ids"], call.inherited_tokens
        placed = place(
            rendered, items, call.retained, engine_input["mm_placeholders"], len(history)
        )
        stored = await call.stored_media(call.retained)
        kept = items[: len(call.retained)]
        await asyncio.to_thread(check_retained, kept, call.retained, rendered, history, stored)
        call.media, call.tail_tokens = placed.added, placed.tail
        call.prompt_tokens = history + placed.tail
        engine_input["prompt_token_ids"] = call.prompt_tokens
        engine_input["mm_placeholders"] = placed.placeholders

    def forest_media(self) -> MediaFamily:
        """The model's processor with its remapper. Raises `ForestError`."""
        if self._media is None:
            renderer: Any = self
            try:
                processor = renderer.get_mm_processor()
            except ValueError as error:
                raise ForestError(
                    Reason.UNSUPPORTED_ITEM, "messages: this server takes text only",
                    param="messages",
                ) from error  # fmt: skip
            self._media = media_family(processor, renderer.model_config)
        return self._media

    @functools.cached_property
    def _forest_renders_alike(self) -> bool:
        """Whether one class gives both ways to render: roots take the one that is waited for."""
        classes = type(self).__mro__
        behind = classes[classes.index(ForestRenderer) + 1 :]
        found = next(cls for cls in behind if "render_messages_async" in vars(cls))
        return found is next((cls for cls in behind if "render_messages" in vars(cls)), None)

    @functools.cached_property
    def _forest_takes_media(self) -> bool:
        try:
            self.forest_media()
        except ForestError:
            return False
        return True

    def _forest_check_placeholders(self, text: Any, count: int) -> None:
        """Refuse literal placeholders, whether or not there are media: a trainer could not tell
        them from an image without pixels. Raises `ForestError`.
        """
        if not count and not (isinstance(text, str) and self._forest_takes_media):
            return
        if not isinstance(text, str):
            raise ForestError(
                Reason.UNSUPPORTED_ITEM,
                f"messages: {type(self).__name__} gives no text to count the placeholders in",
                param="messages",
            )
        self.forest_media().check_placeholders(text, count)

    def forest_prover(self) -> TailProver:
        """The prover over this renderer's tokenizer."""
        if self._prover is None:
            renderer: Any = self
            tokenizer = renderer.get_tokenizer()
            end_ids = compat.end_token_ids(renderer.model_config, tokenizer)
            self._prover = TailProver(
                added_tokens=tokenizer.get_added_vocab(),
                end_ids=end_ids,
                decode=functools.partial(tokenizer.decode, skip_special_tokens=False),
            )
        return self._prover

    def _forest_tokenize(self, tail: Tail, tok_params: Any) -> list[int]:
        renderer: Any = self
        params = dataclasses.replace(tok_params, add_special_tokens=False)
        text = compat.TextPrompt(prompt=tail.anchor + tail.text)
        prompt = renderer._tokenize_prompt(text, params)
        return self.forest_prover().tail_tokens(tail, prompt["prompt_token_ids"])


class _Proven(NamedTuple):
    """What follows a captured turn."""

    tail: Tail
    tokens: list[int]
    """The tail's own."""
    media: dict[str, Any]
    """What a prompt of these messages carries beside its text."""


def prompt_text(prompt: Any) -> str:
    """The text of a rendered prompt. Raises `NotProvable` where the renderer gives none."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else None
    if not isinstance(text, str):
        raise NotProvable(
            "the renderer gives no text to find the turn in", Reason.RENDERER_NOT_QUALIFIED
        )
    return text


def _turn_count(messages: Sequence[Any], candidate: Candidate, call: Call) -> int:
    """Converted messages up to the end of the captured turn. Raises `NotProvable`."""
    count = candidate.item_count
    if (
        len(messages) != len(call.history.items)
        or messages[count - 1].get("role") != "assistant"
        or any(message.get("role") not in SUFFIX_ROLES for message in messages[count:])
    ):
        raise NotProvable("the conversion to messages moved the end of the captured turn")
    return count


async def _resolve(call: Call) -> None:
    """Let the resolver propose a parent and check what it says. Raises `ForestError`."""
    digest = call.render_option_digest or ""
    try:
        found = call.resolver.resolve(
            call.history, render_option_digest=digest, model=call.model, calls=call.calls
        )
        if isinstance(found, Candidate):
            verify_candidate(found, call.history, digest)
    except AmbiguousParent as error:
        raise ForestError(Reason.AMBIGUOUS_PARENT, str(error), param="messages") from error
    except MissingParentEvidence as error:
        raise ForestError(Reason.MISSING_PARENT_EVIDENCE, str(error), param="messages") from error
    if isinstance(found, Root):
        call.root_reason = found.reason
    else:
        call.candidate = found


_classes: dict[str, type] = {}


def __getattr__(name: str) -> type:
    """`Forest_<mode>`: the mixin over the renderer that was registered for the mode.

    vLLM resolves a registered renderer as an attribute of its module.
    """
    mode = name.removeprefix("Forest_")
    if mode == name or mode not in wrapped:
        raise AttributeError(name)
    if mode not in _classes:
        quicken_chat_templates()
        module, class_name = wrapped[mode]
        base = getattr(importlib.import_module(module), class_name)
        _classes[mode] = type(f"Forest{class_name}", (ForestRenderer, base), {})
    return _classes[mode]
