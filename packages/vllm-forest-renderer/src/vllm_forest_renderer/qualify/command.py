"""`forest-qualify MODEL_DIR`: can this model's prompts be spliced?

Guarantees: what is tried is vLLM's own renderer for the model and the splice that serves requests,
without an engine and without weights. Exit status 0: everything that the template accepts is
continued exactly; 1: some calls become roots or are refused; 2: the model cannot be captured or
loaded.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_forest_renderer import compat, plugin
from vllm_forest_renderer.qualify.images import image_rules, judge_images
from vllm_forest_renderer.qualify.report import (
    ROOT,
    SPLICED,
    UNAVAILABLE,
    Report,
    RuleReport,
    as_json,
    as_text,
)
from vllm_forest_renderer.qualify.rules import Rule, rules
from vllm_forest_renderer.renderer import prompt_text
from vllm_forest_renderer.splice import NotProvable, TailProver, answered


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script."""
    parser = argparse.ArgumentParser(prog="forest-qualify", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face model directory (no weights needed)")
    parser.add_argument("--chat-template", type=Path, help="template file, as vLLM's option")
    parser.add_argument("--tokenizer-mode", default="auto", help="as vLLM's option")
    parser.add_argument("--trust-remote-code", action="store_true", help="as vLLM's option")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    try:
        report = qualify(
            options.model,
            chat_template=options.chat_template.read_text() if options.chat_template else None,
            tokenizer_mode=options.tokenizer_mode,
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        print(f"forest-qualify: {error}", file=sys.stderr)
        return 2
    if options.json:
        sys.stdout.buffer.write(as_json(report) + b"\n")
    else:
        print(as_text(report))
    if all(rule.outcome == UNAVAILABLE for rule in report.rules):
        print(f"forest-qualify: {options.model}: no conversation can be rendered", file=sys.stderr)
        return 2
    return 0 if report.exact else 1


def qualify(
    model: Path,
    *,
    chat_template: str | None = None,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
) -> Report:
    """Try every rule on the model's renderer. Raises what vLLM raises for a bad directory."""
    plugin.wrap_renderers()
    if not (model / "config.json").is_file():
        raise FileNotFoundError(
            f"{model} has no config.json: give a model directory, not the name of one on a hub"
        )
    renderer = compat.offline_renderer(
        str(model), tokenizer_mode=tokenizer_mode, trust_remote_code=trust_remote_code
    )
    if getattr(renderer.model_config.hf_config, "model_type", None) == "gpt_oss":
        raise compat.UnsupportedVllm("harmony models (gpt_oss) cannot be captured")
    trial = _Trial(renderer, chat_template)
    return Report(
        model=str(model),
        renderer=type(renderer).__mro__[2].__name__,
        end_tokens=tuple(sorted(trial.end_texts)),
        rules=(
            *(trial.judge(rule) for rule in rules(trial.end_text)),
            *(trial.judge_images() if renderer.model_config.is_multimodal_model else ()),
        ),
    )


class _Trial:
    """One renderer and the prover over it."""

    def __init__(self, renderer: Any, chat_template: str | None) -> None:
        self._renderer = renderer
        self._template = chat_template
        self._prover: TailProver = renderer.forest_prover()
        self._tokenizer = renderer.get_tokenizer()
        ends = sorted(compat.end_token_ids(renderer.model_config, self._tokenizer))
        self.end_texts = [self._tokenizer.decode([end]) for end in ends]
        preferred = getattr(self._tokenizer, "eos_token_id", None)
        self._end_id = preferred if preferred in ends else (ends[0] if ends else None)
        self.end_text = self._tokenizer.decode([self._end_id]) if self._end_id is not None else ""

    def judge(self, rule: Rule) -> RuleReport:
        """What happens to calls like the rule's witness."""
        base: Any = type(self._renderer).__mro__[2]
        params = compat.chat_params(self._template, list(rule.tools) or None)

        def render(messages: Sequence[Any]) -> str:
            _, prompt = base.render_messages(self._renderer, list(messages), params)
            return prompt_text(prompt)

        report = partial(RuleReport, rule=rule.name, asks=rule.asks)
        try:
            render(rule.messages)
        except NotProvable as error:
            return report(outcome=ROOT, reason=error.reason, detail=str(error))
        except Exception as error:
            return report(outcome=UNAVAILABLE, detail=str(error))
        words = rule.messages[rule.count - 1].get("content") or "some words"
        generated = list(self._tokenizer.encode(words, add_special_tokens=False))
        if rule.complete and self._end_id is not None:
            generated.append(self._end_id)
        proof = self._prover.prove(
            rule.messages,
            rule.count,
            generated=generated,
            options=f"{rule.name}",
            used_null_empty_equivalence=rule.equivalence,
        )
        try:
            tail = answered(proof, render)
            ids = self._tokenizer.encode(tail.anchor + tail.text, add_special_tokens=False)
            tokens = self._prover.tail_tokens(tail, ids)
        except NotProvable as error:
            return report(outcome=ROOT, reason=error.reason, detail=str(error))
        return report(outcome=SPLICED, tail=self._tokenizer.decode(tokens))

    def judge_images(self) -> Sequence[RuleReport]:
        """What happens to calls with images."""

        async def judge() -> list[RuleReport]:
            return [
                await judge_images(self._renderer, self._template, rule, self._end_id)
                for rule in image_rules()
            ]

        return asyncio.run(judge())
