"""The built-in remappers on the processors that they are registered for, as vLLM runs them."""

import asyncio
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    # Where vLLM leaves the normalisation to the engine, the patches are raw.
    raw = item.arrays["pixel_values"].dtype == np.uint8
    assert raw == (found.normalization is not None)


def model_config(directory: Any, image_processor: dict[str, Any]) -> Any:
    """What the normalisation is read from, of vLLM's `ModelConfig`."""
    return SimpleNamespace(
        model=str(directory), revision=None, hf_image_processor_config=image_processor,
        multimodal_config=SimpleNamespace(mm_device_do_normalize=True),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ((0.5,) * 3, (0.25,) * 3, 1 / 255)),
        ({"rescale_factor": 0.5}, ((0.5,) * 3, (0.25,) * 3, 0.5)),
        ({"do_rescale": False}, ((0.5,) * 3, (0.25,) * 3, 1.0)),
        ({"do_normalize": False}, ((0.0,) * 3, (1.0,) * 3, 1 / 255)),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_the_normalisation_is_what_the_processors_configuration_says(
    tmp_path, changes, expected, named
):
    """vLLM's own reading of the configuration is the oracle, where this version has it."""
    config = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, **changes}
    if named:
        config["processor_class"] = "Qwen2VLProcessor"
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    model = model_config(tmp_path, {} if named else config)
    found = compat.pixel_normalization(model)
    assert found is not None
    assert (found["mean"], found["std"], found["rescale_factor"]) == expected
    name = "vllm.model_executor.layers.fusion.mm_input_norm"
    if importlib.util.find_spec(name) is not None:
        theirs = importlib.import_module(name)._load_norm_params(model)
        assert (tuple(theirs.image_mean), tuple(theirs.image_std)) == expected[:2]
        assert theirs.rescale_factor == expected[2]


def test_a_configuration_that_does_not_say_how_pixels_are_normalised(tmp_path):
    model = model_config(tmp_path, {"patch_size": 14})
    with pytest.raises(ValueError, match="--no-mm-device-do-normalize"):
        compat.pixel_normalization(model)
    model.multimodal_config.mm_device_do_normalize = False
    assert compat.pixel_normalization(model) is None
