"""Images and a tiny vision-language model for tests."""

import base64
import functools
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from examples.pictures.tiny_vision import TinyVision, save_vision_model, vision_model
from tests.support.models import CACHE, REPOSITORY, load_qwen3_tokenizer

PICTURES = REPOSITORY / "examples" / "pictures" / "model"
"""The example's Qwen2.5-VL, whose small tokenizer loads fast."""


def make_vision_model(directory: Path) -> Path:
    """A tiny random Qwen2.5-VL with Qwen3's real tokenizer, which has the vision tokens too."""
    tokenizer = load_qwen3_tokenizer()
    size = TinyVision(vocab_size=151936)
    model = vision_model(size, tokenizer, seed=0)
    save_vision_model(
        directory, model, tokenizer, max_cells=size.max_cells, stop=("<|endoftext|>",)
    )
    return directory


def vision_dir() -> Path:
    """The cached model, made on first use."""
    directory = CACHE / "qwen25-vl-tiny"
    if not (directory / "video_preprocessor_config.json").is_file():
        shutil.rmtree(directory, ignore_errors=True)
        make_vision_model(directory)
    return directory


def family_dir(family: str, directory: Path) -> Path:
    """`qwen2`, `qwen25` or `qwen3`: a model directory of a Qwen-VL generation, without weights."""
    from transformers import Qwen2VLConfig, Qwen3VLConfig

    source = PICTURES
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    if family == "qwen25":
        return directory
    known = json.loads((source / "config.json").read_text())
    shared = {key: value for key, value in known.items() if key.endswith("_token_id")}
    text = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    tower = {
        "depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "in_channels": 3,
    }  # fmt: skip
    if family == "qwen2":
        tower |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14}
        config = Qwen2VLConfig(text_config=text, vision_config=tower, **shared)
        names = {"processor_class": "Qwen2VLProcessor"}
        architecture = "Qwen2VLForConditionalGeneration"
    else:
        tower |= {
            "hidden_size": 32, "intermediate_size": 64, "patch_size": 16, "out_hidden_size": 64,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        }  # fmt: skip
        config = Qwen3VLConfig(text_config=text, vision_config=tower, **shared)
        names = {"processor_class": "Qwen3VLProcessor"}
        architecture = "Qwen3VLForConditionalGeneration"
    config.architectures = [architecture]
    config.save_pretrained(directory)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        processor = json.loads((directory / name).read_text())
        processor |= {**names, "patch_size": tower["patch_size"]}
        if family == "qwen3" and name.startswith("video"):
            processor["video_processor_type"] = "Qwen3VLVideoProcessor"
        (directory / name).write_text(json.dumps(processor))
    return directory


@functools.cache
def png(seed: int, width: int = 56, height: int = 56) -> bytes:
    """A PNG of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(seed: int, width: int = 56, height: int = 56) -> str:
    """The PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png(seed, width, height)).decode()


def image(seed: int, width: int = 56, height: int = 56) -> dict[str, Any]:
    """A Chat content part."""
    return {"type": "image_url", "image_url": {"url": data_url(seed, width, height)}}


def text(words: str) -> dict[str, Any]:
    """A Chat content part."""
    return {"type": "text", "text": words}
