"""Images and a tiny vision-language model for tests."""

import base64
import functools
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from examples.pictures.tiny_vision import TinyVision, save_vision_model, vision_model
from tests.support.models import CACHE, load_qwen3_tokenizer


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
