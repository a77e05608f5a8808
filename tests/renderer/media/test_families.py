"""The built-in remappers on the processors that they are registered for, as vLLM runs them."""

import asyncio
import importlib
from typing import Any

import pytest
from vllm_forest_renderer import compat, plugin
from vllm_forest_renderer.qualify.images import image_rules, judge_images
from vllm_forest_renderer.qualify.rehearsal import Rehearsal

from tests.support.vision import family_dir, image, text

FAMILIES = {
    "qwen2": ("qwen2_vl", "Qwen2VLForConditionalGeneration", 14),
    "qwen25": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", 14),
    "qwen3": ("qwen3_vl", "Qwen3VLForConditionalGeneration", 16),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, int]:
    """A renderer without engine, and the processor's patch size."""
    from vllm.model_executor.models import ModelRegistry

    module, architecture, patch = FAMILIES[request.param]
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    # A registered class needs no inspection in a process of its own.
    ModelRegistry.register_model(architecture, getattr(found, architecture))
    directory = family_dir(request.param, tmp_path_factory.mktemp("family") / request.param)
    plugin.wrap_renderers()
    return compat.offline_renderer(str(directory)), patch


@pytest.mark.requirement("B6", "XM2")
def test_conversations_with_images_are_continued_exactly(family):
    renderer, _ = family
    end = renderer.get_tokenizer().convert_tokens_to_ids("<|im_end|>")

    async def judge() -> list[Any]:
        return [await judge_images(renderer, None, rule, end) for rule in image_rules()]

    reports = asyncio.run(judge())
    assert {report.rule: report.outcome for report in reports} == {
        "image": "spliced", "images": "spliced", "image_later": "spliced",
    }  # fmt: skip


@pytest.mark.requirement("B5")
def test_the_geometry_is_the_processors(family):
    renderer, patch = family
    rehearsal = Rehearsal(renderer, None)
    side = 2 * patch
    message = {"role": "user", "content": [image(1, 3 * side, 2 * side), text("Look")]}
    call = asyncio.run(rehearsal.request([message]))
    (item,) = call.media
    found = item.described
    assert (found.grid, found.height, found.width) == ((1, 4, 6), 2 * side, 3 * side)
    assert (found.length, found.embed_count) == (6, 6)
    assert item.arrays["pixel_values"].shape == (24, 3 * 2 * patch * patch)
    assert found.normalization is not None
