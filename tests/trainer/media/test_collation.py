"""What the model takes of a row's images, and which rows it refuses."""

from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema import Reason
from forest_schema.media import MediaTensor, tensor_name
from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import Row
from megatron_forest_trainer.data.collate import Collator, RowInput
from megatron_forest_trainer.data.images import normalized_pixels
from megatron_forest_trainer.model.hf_config import VisionShape, read_model_shape

from tests.support.distributed import run_ranks
from tests.trainer.media.support import CLIP, IMAGE, ImageRollout, Picture, picture
from tests.trainer.megatron.support import MemoryReader

A, B = picture(1, 4, 6), picture(2, 2, 4)


@pytest.fixture(scope="module")
def vision(sees) -> VisionShape:
    shape = read_model_shape(sees).vision
    assert shape is not None
    return shape


def row_of(*prompt: int | Picture, generated: tuple[int, ...] = (4, 5)) -> Row:
    rollout = ImageRollout("r")
    rollout.see("1", None, prompt, generated)
    return assembled(rollout)


def assembled(rollout: ImageRollout) -> Row:
    (plan,) = build_rows(rollout.records, group_id="g0", rollout_id=rollout.rollout_id)
    return assemble(plan, MemoryReader(rollout.deltas))


@pytest.mark.requirement("XM7", "B15")
@pytest.mark.parametrize("packed", [False, True])
def test_embeddings_of_different_sizes_stand_on_their_placeholders(vision, packed):
    rows = [RowInput(row_of(1, A, 2)), RowInput(row_of(3)), RowInput(row_of(B, 1, A, A))]
    batch = Collator(packed=packed, multiple=4, vision=vision)(
        [*rows, RowInput(None)], training=False
    )
    media = batch.media
    assert media is not None
    placeholders = np.flatnonzero(batch.tokens.numpy().ravel() == IMAGE)
    assert np.array_equal(media.target.numpy(), placeholders)
    # Each picture runs once; A has 6 embeddings and comes first, B has 2.
    assert media.source.tolist() == [*range(6), 6, 7, *range(6), *range(6)]
    assert media.grids.tolist() == [[1, 4, 6], [1, 2, 4]]
    expected = np.concatenate([normalized_pixels(p.occurrence(0), p.arrays) for p in (A, B)])
    assert np.array_equal(media.pixels.numpy(), expected)
    assert batch.position_ids.shape == (3, *batch.tokens.shape)


def test_context_ranks_share_the_embeddings(vision):
    rows = [RowInput(row_of(1, A, 2)), RowInput(row_of(B, 1, A))]
    parts = [
        Collator(packed=True, multiple=4, context_ranks=2, context_rank=rank, vision=vision)(
            rows, training=False
        )
        for rank in range(2)
    ]
    used = np.concatenate([part.media.source.numpy() for part in parts])
    assert sorted(used.tolist()) == sorted([*range(6), 6, 7, *range(6)])
    for part in parts:
        assert (part.tokens.numpy().ravel()[part.media.target.numpy()] == IMAGE).all()
        assert part.position_ids.shape[2] == 2 * part.tokens.shape[1]


def test_a_stage_without_a_tower_prepares_no_pixels(vision):
    batch = Collator(packed=True, vision=vision, reads_images=False)(
        [RowInput(row_of(1, A, 2))], training=False
    )
    assert batch.media is None
    assert batch.position_ids.shape[0] == 3


def changed(row: Row, **fields: Any) -> Row:
    """The row with another descriptor of its only image."""
    media = row.media
    assert media is not None
    occurrence = msgspec.structs.replace(media.occurrences[0], **fields)
    return Row(
        plan=row.plan,
        tokens_T=row.tokens_T,
        loss_mask_T=row.loss_mask_T,
        logprobs_T=row.logprobs_T,
        media=type(media)((occurrence,), media.tensors),
    )


def without_pixels(row: Row) -> Row:
    return Row(row.plan, row.tokens_T, row.loss_mask_T, row.logprobs_T)


REFUSED = {
    "no pixels": (without_pixels, "6 image tokens without pixels, the first at position 2"),
    "geometry": (lambda row: changed(row, grid=(1, 4, 4)), "where its grid gives 4"),
    "odd": (lambda row: changed(row, grid=(1, 3, 8)), "multiples of 2"),
    "video": (lambda row: changed(row, modality="video"), "video of"),
    "spans": (lambda row: changed(row, embed_spans=((0, 2), (3, 6))), "embeddings at"),
    "place": (lambda row: changed(row, offset=3), "are not the model's image token 57"),
    "outside": (lambda row: changed(row, offset=8), "are not the model's image token"),
    "patches": (
        lambda row: changed(
            row, tensors=(MediaTensor(name="pixel_values", dtype="uint8", shape=(24, 12)),)
        ),
        "pixel_values is (24, 12), where the model takes (24, 96)",
    ),
}


@pytest.mark.requirement("B12", "B15")
@pytest.mark.parametrize("what", REFUSED)
def test_rows_that_the_model_cannot_see_exactly_are_refused(vision, what):
    make, message = REFUSED[what]
    row = make(row_of(1, A, 2))
    with pytest.raises(IntegrityError) as error:
        Collator(packed=True, vision=vision)([RowInput(row)], training=False)
    assert error.value.reason == Reason.DIGEST_MISMATCH
    assert message in str(error.value)
    assert row.plan.row_id in str(error.value)


def test_a_model_of_text_refuses_images():
    with pytest.raises(IntegrityError, match=r"policy\.model_name reads text only") as error:
        Collator(packed=True)([RowInput(row_of(1, A, 2))], training=False)
    assert error.value.reason == Reason.CONFIGURATION


def test_a_generated_image_token_is_text(vision):
    batch = Collator(packed=True, vision=vision)(
        [RowInput(row_of(1, B, 2, generated=(IMAGE, 3)))], training=False
    )
    assert batch.media is not None
    assert len(batch.media.target) == B.tokens
    assert batch.position_ids[:, 0, -2:].tolist() == [[6, 7]] * 3


def test_a_delta_without_the_pixels_of_a_row_is_refused():
    rollout = ImageRollout("r")
    rollout.see("1", None, [1, A, 2], [3])
    key = rollout.records[0].delta.key
    rollout.deltas[key] = {k: v for k, v in rollout.deltas[key].items() if "pixel" not in k}
    with pytest.raises(IntegrityError, match="no tensor pixel_values"):
        assembled(rollout)


def engine_normalization(pixels):
    """vLLM's own normalisation of raw patches on the device."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

    with set_current_vllm_config(VllmConfig()):
        norm = FusedMMInputNorm(list(CLIP.mean), list(CLIP.std), CLIP.rescale_factor)
    return norm.forward_native(torch.from_numpy(pixels), torch.float32).numpy()


@pytest.mark.requirement("B2")
def test_patches_are_normalised_as_the_engine_does_it():
    every = np.arange(256, dtype=np.uint8).repeat(3 * 32).reshape(-1, 96)
    image = Picture(16, 16, every)
    (expected,) = run_ranks(engine_normalization, every)
    found = normalized_pixels(image.occurrence(0), image.arrays)
    assert np.array_equal(found, expected)
    assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_normalised_patches_are_taken_as_they_are(dtype):
    import torch

    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    values = values.to(getattr(torch, dtype))
    stored = (values.view(torch.uint16) if dtype == "bfloat16" else values).numpy()
    image = Picture(2, 4, stored, normalization=None)
    occurrence = msgspec.structs.replace(
        image.occurrence(0),
        tensors=(MediaTensor(name="pixel_values", dtype=dtype, shape=(8, 96)),),
    )
    found = normalized_pixels(occurrence, image.arrays)
    assert np.array_equal(found, values.float().numpy())


def test_tensor_names_are_the_schemas():
    rollout = ImageRollout("r")
    rollout.see("1", None, [B], [3])
    (occurrence,) = rollout.records[0].media
    assert tensor_name(occurrence.blob, "pixel_values") in rollout.deltas["g0.r.1"]
