"""A tiny vision-language checkpoint, rollouts with images, and their oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from forest_schema import MediaOccurrence, Receipt
from forest_schema.digests import delta_digest
from forest_schema.media import (
    MediaTensor,
    PixelNormalization,
    blob_digest,
    media_digest,
    tensor_name,
)
from forest_schema.version import features_of
from numpy.typing import NDArray

from tests.trainer.megatron.support import VOCAB, Oracle, Rollout, oracle_of

IMAGE, VISION_START, VISION_END = 57, 59, 60
"""Token ids of the tiny checkpoint."""
PATCH, MERGE, FRAMES = 4, 2, 2
CLIP = PixelNormalization(
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    rescale_factor=1 / 255,
)


def tiny_vision_checkpoint(directory: Path, *, tied: bool = False) -> Path:
    """A random Qwen2.5-VL: two decoder and two tower layers, saved as transformers saves it."""
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "tie_word_embeddings": tied,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 32,
        },
        image_token_id=IMAGE,
        video_token_id=58,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(7)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Picture:
    """A processed image: `[rows * columns, 96]` patches of 0..255."""

    rows: int
    columns: int
    pixels: NDArray[Any]
    normalization: PixelNormalization | None = CLIP

    @property
    def tokens(self) -> int:
        return self.rows * self.columns // MERGE**2

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "image_grid_thw": np.array([1, self.rows, self.columns], np.int64),
            "pixel_values": self.pixels,
        }

    def occurrence(self, offset: int) -> MediaOccurrence:
        arrays = self.arrays
        tensors = tuple(
            MediaTensor(name=name, dtype=array.dtype.name, shape=array.shape)
            for name, array in arrays.items()
        )
        return MediaOccurrence(
            modality="image",
            identity="made for tests",
            offset=offset,
            length=self.tokens,
            embed_spans=((0, self.tokens),),
            placeholder_token_id=IMAGE,
            grid=(1, self.rows, self.columns),
            height=self.rows * PATCH,
            width=self.columns * PATCH,
            blob=blob_digest(tensors, arrays),
            tensors=tensors,
            normalization=self.normalization,
        )


def picture(seed: int, rows: int, columns: int) -> Picture:
    """A random image."""
    values = 3 * FRAMES * PATCH * PATCH
    generator = np.random.default_rng(seed)
    return Picture(rows, columns, generator.integers(0, 256, (rows * columns, values), np.uint8))


class ImageRollout(Rollout):
    """A rollout whose prompts are made of token ids and pictures."""

    def see(
        self,
        call_id: str,
        parent: str | None,
        prompt: Sequence[int | Picture],
        generated: Sequence[int] | NDArray[Any],
    ) -> None:
        """Capture one call; its pictures stand between the vision tokens."""
        before = next((r.cum_len for r in self.records if r.call_id == parent), 0)
        tokens: list[int] = []
        occurrences = []
        tensors: dict[str, NDArray[Any]] = {}
        for part in prompt:
            if isinstance(part, int):
                tokens.append(part)
                continue
            tokens.append(VISION_START)
            occurrence = part.occurrence(before + len(tokens))
            occurrences.append(occurrence)
            for name, array in part.arrays.items():
                tensors[tensor_name(occurrence.blob, name)] = array
            tokens += [IMAGE] * part.tokens + [VISION_END]
        self.call(call_id, parent, tokens, generated, np.full(len(generated), -4.0))
        self.change_media(occurrences, tensors)

    def change_media(
        self, occurrences: Sequence[MediaOccurrence], tensors: Mapping[str, NDArray[Any]]
    ) -> None:
        """Give the last call these images, committed and stored as a server would."""
        record = self.records[-1]
        delta = self.deltas[record.delta.key] | tensors
        self.deltas[record.delta.key] = delta
        self.records[-1] = msgspec.structs.replace(
            record,
            media=tuple(occurrences),
            media_digest=media_digest(occurrences) if occurrences else None,
            required_features=features_of(delta),
            delta=msgspec.structs.replace(record.delta, digest=delta_digest(delta)),
        )

    def receipt(self) -> Receipt:
        """What the server would hand out after the attempt."""
        return Receipt(
            store="s",
            partition="p",
            attempt_id=f"att_{self.rollout_id}",
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            closed=True,
            calls=tuple(self.records),
        )

    def images(self, call_id: str | None) -> list[tuple[MediaOccurrence, NDArray[Any]]]:
        """Descriptors and patches of a call's whole context."""
        if call_id is None:
            return []
        record = next(record for record in self.records if record.call_id == call_id)
        delta = self.deltas[record.delta.key]
        own = [(o, delta[tensor_name(o.blob, "pixel_values")]) for o in record.media]
        return self.images(record.parent_call_id) + own


def rollouts() -> list[Rollout]:
    """Pictures of several sizes: in roots, in a branch, after a rewrite; one rollout of text."""
    generator = np.random.default_rng(3)

    def text(count: int) -> list[int]:
        return generator.integers(0, IMAGE, count).tolist()

    a, b, c = picture(1, 4, 6), picture(2, 2, 4), picture(3, 6, 4)
    branches = ImageRollout("x")
    branches.see("a", None, [*text(3), a, *text(2)], text(4))
    branches.see("b", "a", [*text(2), b, *text(1)], text(5))
    branches.see("c", "a", [*text(1), c, *text(3)], text(3))
    branches.see("d", None, [*text(2), b, *text(3)], text(4))
    chain = ImageRollout("y")
    chain.see("a", None, text(5), text(3))
    chain.see("b", "a", [c, a, *text(2)], text(6))
    words = ImageRollout("z")
    words.see("a", None, text(6), text(5))
    return [branches, chain, words]


ADVANTAGES = {"x": 1.0, "y": -0.5, "z": 0.25}


def vision_oracle(
    hf_dir: Path, made: Sequence[Rollout], advantages: Mapping[str, float], **settings: Any
) -> Oracle:
    """Hugging Face's own model, one forward pass per call on its whole context and its images."""
    import transformers

    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        hf_dir, attn_implementation="eager"
    ).float()
    contexts = {
        rollout.context(record.call_id).tobytes(): rollout.images(record.call_id)
        for rollout in made
        for record in rollout.records
    }

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        images = contexts[ids.numpy().astype(np.int32).tobytes()]
        if not images:
            return model(input_ids=ids[None]).logits[0]
        return model(
            input_ids=ids[None],
            pixel_values=torch.from_numpy(np.concatenate([_normalized(*item) for item in images])),
            image_grid_thw=torch.tensor([occurrence.grid for occurrence, _ in images]),
            mm_token_type_ids=(ids[None] == IMAGE).int(),
        ).logits[0]

    oracle = oracle_of(model, logits_of, made, advantages, **settings)
    gradients = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in oracle.gradients.items()
    }
    return Oracle(oracle.loss, oracle.tokens, gradients, oracle.logprobs)


def _normalized(occurrence: MediaOccurrence, pixels: NDArray[Any]) -> NDArray[np.float32]:
    """What `PixelNormalization` says, patch by patch and channel by channel."""
    recorded = occurrence.normalization
    if recorded is None:
        return pixels.astype(np.float32)
    result = np.empty(pixels.shape, np.float32)
    channel = FRAMES * PATCH * PATCH
    for number, patch in enumerate(pixels.astype(np.float64)):
        for c, (mean, std) in enumerate(zip(recorded.mean, recorded.std, strict=True)):
            part = slice(c * channel, (c + 1) * channel)
            result[number, part] = (patch[part] * recorded.rescale_factor - mean) / std
    return result
