"""A tiny Qwen2.5-VL checkpoint with random weights, for the example and for tests.

Guarantees: the same arguments give the same files; the result is an ordinary Hugging Face
directory (weights, configuration, tokenizer, chat template, image processor).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = Path(__file__).resolve().parent / "chat_template.jinja"

VISION_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PATCH = 14
MERGE = 2
CELL = PATCH * MERGE
"""Pixels of one image token's side: an image of 84 x 56 pixels has 3 x 2 tokens."""


@dataclass(frozen=True, kw_only=True)
class TinyVision:
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    tie_word_embeddings: bool = False
    vision_hidden_size: int = 32
    vision_intermediate_size: int = 64
    vision_layers: int = 2
    vision_heads: int = 2
    max_cells: int = 64
    """Largest number of tokens of one image; larger ones are scaled down."""


def vision_model(size: TinyVision, tokenizer: Any, *, seed: int) -> Any:
    """`Qwen2_5_VLForConditionalGeneration` with random float32 weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = dict(
        zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True)
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    head = size.hidden_size // size.heads
    half = head // 2
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size.vocab_size,
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "mrope",
                "rope_type": "default",
                "mrope_section": [half // 4, half // 8 * 3, half // 8 * 3],
            },
            "tie_word_embeddings": size.tie_word_embeddings,
            "eos_token_id": end,
            "bos_token_id": None,
        },
        vision_config={
            "depth": size.vision_layers,
            "hidden_size": size.vision_hidden_size,
            "intermediate_size": size.vision_intermediate_size,
            "num_heads": size.vision_heads,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [size.vision_layers - 1],
            "out_hidden_size": size.hidden_size,
            "tokens_per_second": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        vision_token_id=ids["<|vision_pad|>"],
        tie_word_embeddings=size.tie_word_embeddings,
        eos_token_id=end,
        bos_token_id=None,
        torch_dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    if not size.tie_word_embeddings:
        with torch.no_grad():
            # Random outputs are almost uniform otherwise.
            model.lm_head.weight.mul_(6.0)
    return model.to(torch.float32)


def save_vision_model(
    directory: Path, model: Any, tokenizer: Any, *, max_cells: int, stop: tuple[str, ...] = ()
) -> None:
    """Write the checkpoint. `stop` are tokens that end a generation beside `<|im_end|>`."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    tokenizer.save_pretrained(directory)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", *stop])
    _write(directory / "generation_config.json", {"eos_token_id": ends})
    processor = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "rescale_factor": 1 / 255,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "resample": 3,
        "size": {"shortest_edge": 4 * CELL**2, "longest_edge": max_cells * CELL**2},
        "processor_class": "Qwen2_5_VLProcessor",
    }
    _write(
        directory / "preprocessor_config.json",
        {**processor, "image_processor_type": "Qwen2VLImageProcessor"},
    )
    _write(
        directory / "video_preprocessor_config.json",
        {**processor, "video_processor_type": "Qwen2VLVideoProcessor"},
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
