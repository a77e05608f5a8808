"""The rules on images: whether calls with them are captured, and continued exactly.

Guarantees: what is tried is the path of a served request, processor and remapper included; a
conversation passes only if each placeholder of the last prompt lies on its image's tokens.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forest_schema.media import MediaOccurrence

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.qualify.rehearsal import Rehearsal
from vllm_forest_renderer.qualify.report import REFUSED, ROOT, SPLICED, RuleReport

_ANSWER = {"role": "assistant", "content": "A square."}


def _image(red: int, width: int, height: int) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (red, 90, 160)).save(buffer, "PNG")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


@dataclass(frozen=True, slots=True)
class ImageRule:
    """One thing that may happen to an image."""

    name: str
    asks: str
    first: Mapping[str, Any]
    following: Sequence[Mapping[str, Any]]


def image_rules() -> Sequence[ImageRule]:
    """Every rule on images."""
    first, second = _image(200, 96, 64), _image(20, 64, 160)
    look = {"type": "text", "text": "What is it?"}
    asked = {"role": "user", "content": [first, look]}
    return (
        ImageRule(
            "image", "an image, an answer, then a user message", asked,
            ({"role": "user", "content": "And its colour?"},),
        ),
        ImageRule(
            "images", "an image, an answer, then another image and the first again", asked,
            ({"role": "user", "content": [look, second, first]},),
        ),
        ImageRule(
            "image_later", "a text, an answer, then an image",
            {"role": "user", "content": "Hello."}, (asked,),
        ),
    )  # fmt: skip


async def judge_images(
    renderer: Any, chat_template: str | None, rule: ImageRule, end_id: int | None
) -> RuleReport:
    """What happens to calls like the rule's witness."""
    rehearsal = Rehearsal(renderer, chat_template)
    encode = renderer.get_tokenizer().encode
    generated = list(encode(_ANSWER["content"], add_special_tokens=False))
    if end_id is not None:
        generated.append(end_id)

    def report(outcome: str, **fields: Any) -> RuleReport:
        return RuleReport(rule=rule.name, asks=rule.asks, outcome=outcome, **fields)

    try:
        first = await rehearsal.request([rule.first])
        answer = rehearsal.answer(first, _ANSWER["content"], generated)
        second = await rehearsal.request([rule.first, answer, *rule.following])
    except ForestError as error:
        return report(REFUSED, reason=error.reason, detail=str(error))
    if second.predecessor is None:
        return report(ROOT, reason=second.root_reason, detail="the boundary is not proven")
    captured = [old.occurrence for old in second.retained]
    added = [item.described for item in second.media]
    prompt = second.prompt_tokens or []
    if not all(_lies_on_its_tokens(prompt, occurrence) for occurrence in captured + added):
        return report(REFUSED, detail="an image does not lie on its placeholder tokens")
    return report(SPLICED, tail=renderer.get_tokenizer().decode(second.tail_tokens))


def _lies_on_its_tokens(prompt: Sequence[int], occurrence: MediaOccurrence) -> bool:
    return all(
        set(prompt[occurrence.offset + start : occurrence.offset + end])
        == {occurrence.placeholder_token_id}
        for start, end in occurrence.embed_spans
    )
