"""Images are proved call by call before a row exists."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema import MediaOccurrence, Reason
from forest_schema.digests import EMPTY_CHAIN, chain_digest, delta_digest
from forest_schema.media import MediaTensor, media_digest, tensor_name
from forest_schema.shards import TOKENS
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.selection import Selection, all_captured
from megatron_forest_trainer.core.types import Finalized
from megatron_forest_trainer.finalize import finalize_rollout, finalize_selection

from tests.trainer.media.support import IMAGE, ImageRollout, picture
from tests.trainer.megatron.support import MemoryReader

A, B = picture(1, 4, 6), picture(2, 2, 4)


def captured(*, until: int = 3) -> ImageRollout:
    """XM3: A, then A and B, then a rewrite that keeps B only."""
    rollout = ImageRollout("r")
    rollout.see("1", None, [1, 2, A, 3], [4, 5])
    if until > 1:
        rollout.see("2", "1", [6, B, 7], [8, 9, 10])
    if until > 2:
        rollout.see("3", None, [11, B, 12], [13])
    return rollout


def finalize(rollout: ImageRollout) -> Finalized:
    reader = MemoryReader(rollout.deltas)
    scored = {"terminal_response_id": rollout.records[-1].output.response_id}
    return finalize_rollout(rollout.receipt(), scored, reader, all_captured)


@pytest.mark.requirement("B4", "B15", "XM3", "L1")
def test_rows_have_the_images_of_their_paths_in_order():
    rollout = captured()
    final = finalize(rollout)
    assert final.verified, final.detail
    rows = [assemble(plan, MemoryReader(rollout.deltas)) for plan in final.rows]
    assert [[o.grid for o in row.media.occurrences] for row in rows] == [
        [(1, 4, 6), (1, 2, 4)],
        [(1, 2, 4)],
    ]
    for row, pictures in zip(rows, [(A, B), (B,)], strict=True):
        for occurrence, tensors, expected in zip(
            row.media.occurrences, row.media.tensors, pictures, strict=True
        ):
            assert np.array_equal(tensors["pixel_values"], expected.pixels)
            assert tensors["pixel_values"].dtype == np.uint8
            at = slice(occurrence.offset, occurrence.end)
            assert (row.tokens_T[at] == IMAGE).all()


@pytest.mark.requirement("XM4")
def test_one_picture_twice_is_stored_once_and_seen_twice():
    rollout = ImageRollout("r")
    rollout.see("1", None, [1, A, B, A, 2], [3])
    assert finalize(rollout).verified
    stored = [name for name in rollout.deltas["g0.r.1"] if name.endswith("pixel_values")]
    assert (len(stored), len(rollout.records[0].media)) == (2, 3)


def change(rollout: ImageRollout, *, commit: bool = True, **fields: Any) -> None:
    """Change the only image of the last call; `commit` writes the commitment of the change."""
    record = rollout.records[-1]
    media = (msgspec.structs.replace(record.media[0], **fields),)
    digest = media_digest(media) if commit else record.media_digest
    rollout.records[-1] = msgspec.structs.replace(record, media=media, media_digest=digest)


def tokens_changed(rollout: ImageRollout, position: int, token: int) -> None:
    """Another token in the last call's delta, with digests that agree."""
    record = rollout.records[-1]
    delta = dict(rollout.deltas[record.delta.key])
    delta[TOKENS] = delta[TOKENS].copy()
    delta[TOKENS][position] = token
    rollout.deltas[record.delta.key] = delta
    before = next((r for r in rollout.records if r.call_id == record.parent_call_id), None)
    parent = before.chain_digest if before else EMPTY_CHAIN
    rollout.records[-1] = msgspec.structs.replace(
        record,
        chain_digest=chain_digest(parent, delta[TOKENS]),
        delta=msgspec.structs.replace(record.delta, digest=delta_digest(delta)),
    )


def record_changed(**fields: Any) -> Callable[[ImageRollout], None]:
    def damage(rollout: ImageRollout) -> None:
        rollout.records[-1] = msgspec.structs.replace(rollout.records[-1], **fields)

    return damage


def tensor_changed(name: str, array: Any) -> Callable[[ImageRollout], None]:
    """Another tensor in the delta, and a descriptor that agrees."""

    def damage(rollout: ImageRollout) -> None:
        record = rollout.records[-1]
        occurrence = record.media[0]
        tensors = [
            t
            if t.name != name
            else MediaTensor(name=name, dtype=array.dtype.name, shape=array.shape)
            for t in occurrence.tensors
        ]
        rollout.change_media(
            [msgspec.structs.replace(occurrence, tensors=tuple(tensors))],
            {tensor_name(occurrence.blob, name): array},
        )

    return damage


def second_image(rollout: ImageRollout, place: Callable[[MediaOccurrence], int]) -> None:
    record = rollout.records[-1]
    first = record.media[0]
    rollout.change_media([first, msgspec.structs.replace(first, offset=place(first))], {})


def tensor_lost(rollout: ImageRollout) -> None:
    record = rollout.records[-1]
    delta = rollout.deltas[record.delta.key]
    rollout.deltas[record.delta.key] = {k: v for k, v in delta.items() if "grid" not in k}


DAMAGES: dict[str, tuple[Callable[[ImageRollout], None], str]] = {
    "descriptor": (lambda r: change(r, commit=False, height=99), "have the digest"),
    "no commitment": (record_changed(media_digest=None), "have the digest"),
    "no descriptors": (record_changed(media=()), "have the digest None"),
    "no presence flag": (record_changed(required_features=("replay_summary",)), "1 images, but"),
    "flag without images": (record_changed(media=(), media_digest=None), "0 images, but"),
    "extra tensor": (lambda r: r.change_media(r.records[-1].media, {"media.x.y": A.pixels}),
                     "the descriptors name 2 tensors and the delta holds 3"),
    "lost tensor": (tensor_lost, "name 2 tensors and the delta holds 1"),
    "other dtype": (lambda r: r.change_media(
        r.records[-1].media,
        {tensor_name(r.records[-1].media[0].blob, "pixel_values"): B.pixels.astype(np.float32)}),
        "pixel_values is float32"),
    "inherited": (lambda r: change(r, offset=3), "not inside what is left"),
    "one too early": (lambda r: change(r, offset=r.records[-1].media[0].offset - 1),
                      "where the descriptors have placeholder"),
    "generated": (lambda r: change(r, offset=r.records[-1].prompt_len - 1), "not inside"),
    "overlapping": (lambda r: second_image(r, lambda o: o.end - 1), "not inside what is left"),
    "out of order": (lambda r: second_image(r, lambda o: o.offset - 2), "not inside what is left"),
    "on text": (lambda r: second_image(r, lambda o: o.end), "have placeholder 57"),
    "token": (lambda r: tokens_changed(r, 2, 5), "token 5 at position"),
    "placeholder without image": (lambda r: tokens_changed(r, 0, IMAGE), "have no image"),
    "other placeholder": (lambda r: change(r, placeholder_token_id=58), "have placeholder 58"),
    "video": (lambda r: change(r, modality="video"), "only images are trained on"),
    "frames": (lambda r: change(r, frames=2), "2 frames"),
    "time": (lambda r: change(r, grid=(2, 2, 4)), "a grid of 2 in time"),
    "height": (lambda r: change(r, height=0), "an image of 0 x 16 pixels"),
    "width": (lambda r: change(r, width=12), "8 x 12 pixels are not 2 x 4 square patches"),
    "patches": (lambda r: change(r, height=9, width=18), "9 x 18 pixels are not"),
    "grid": (lambda r: change(r, grid=(1, 4, 2), height=16, width=8), "image_grid_thw is"),
    "pixels": (tensor_changed("pixel_values", B.pixels[:4]), "the grid has 8 patches"),
    "no pixels": (lambda r: change(r, tensors=()), "the descriptors name 0 tensors"),
    "spans behind": (lambda r: change(r, embed_spans=((0, 3),)), "are not in order inside 2"),
    "spans back": (lambda r: change(r, embed_spans=((1, 2), (0, 1))), "are not in order"),
    "empty span": (lambda r: change(r, embed_spans=((0, 1), (1, 1), (1, 2))), "an empty one"),
    "no spans": (lambda r: change(r, embed_spans=()), "are not in order"),
    "hole": (lambda r: change(r, embed_spans=((0, 1),)), "have no image"),
}  # fmt: skip


@pytest.mark.requirement("B11", "B12", "B13", "B14")
@pytest.mark.parametrize("what", DAMAGES)
def test_one_bad_call_masks_the_whole_rollout(what):
    damage, message = DAMAGES[what]
    rollout = captured(until=2)
    damage(rollout)
    final = finalize(rollout)
    assert final.reason == Reason.MEDIA_AUTHENTICATION_FAILED
    assert final.detail.startswith("call 2: ")
    assert message in final.detail
    assert final.rows == ()


@pytest.mark.requirement("B13")
def test_a_bad_call_that_is_not_selected_does_no_harm():
    rollout = captured(until=2)
    change(rollout, height=99)
    selection = Selection((rollout.records[0],), rollout.records[0].output.response_id)
    final = finalize_selection(rollout.receipt(), selection, MemoryReader(rollout.deltas))
    assert final.verified


@pytest.mark.requirement("B12")
def test_a_generated_placeholder_is_an_ordinary_token():
    rollout = ImageRollout("r")
    rollout.see("1", None, [1, A, 2], [IMAGE, 3])
    rollout.see("2", "1", [4], [5, IMAGE])
    assert finalize(rollout).verified


def test_holes_between_embeddings_are_allowed_on_other_tokens():
    """Other families put row separators between an image's embeddings."""
    rollout = captured(until=1)
    record = rollout.records[0]
    tokens_changed(rollout, record.media[0].offset + 2, 7)
    change(rollout, embed_spans=((0, 2), (3, 6)))
    assert finalize(rollout).verified
