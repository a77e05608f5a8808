"""Descriptors, places and comparisons without an engine."""

import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from forest_schema import CallRecord, Reason
from forest_schema.media import MediaOccurrence, MediaTensor, media_digest
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import PlaceholderRange
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.cache import MediaCache
from vllm_forest_renderer.media.items import MediaItem, embed_spans
from vllm_forest_renderer.media.placing import place
from vllm_forest_renderer.media.retained import Captured, captured_media, check_retained
from vllm_forest_renderer.media.tensors import same_bytes, to_array

from tests.support.forests import Forest

PATCHES = MediaTensor(name="pixel_values", dtype="uint8", shape=(4, 6))


def described(offset: int, length: int, modality: str = "image", **changes: Any) -> MediaOccurrence:
    fields: dict[str, Any] = {
        "modality": modality, "identity": "url:a", "offset": offset, "length": length,
        "embed_spans": ((0, length),), "placeholder_token_id": 7, "grid": (1, 2, 2),
        "height": 28, "width": 28, "blob": "", "tensors": (PATCHES,),
    }  # fmt: skip
    return MediaOccurrence(**{**fields, **changes})


def pixels(seed: int = 0) -> dict[str, Any]:
    values = np.random.default_rng(seed).integers(0, 256, (4, 6), dtype=np.uint8)
    return {"pixel_values": values}


kinds = st.sampled_from(["image", "other"])
segments = st.lists(
    st.tuples(kinds, st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=6
)


@given(segments, segments, st.integers(0, 5))
def test_every_item_lies_on_its_own_tokens_after_the_splice(before, after, end_text):
    """Tokens that name their item make the oracle: the spliced prompt holds each item's tokens
    exactly where its range says.
    """
    history: list[int] = []
    captured, ranges, rendered, items = [], {"image": [], "other": []}, [], []
    record: Any = SimpleNamespace()
    for number, (kind, length, gap, masked) in enumerate(before):
        history += [-1] * gap
        captured.append(Captured(record, described(len(history), length, kind)))
        history += [number] * length
        _add(rendered, items, ranges, number, kind, length, masked)
    history += [-2] * end_text
    for number, (kind, length, gap, masked) in enumerate(after, len(before)):
        rendered += [-3] * gap
        _add(rendered, items, ranges, number, kind, length, masked)
    placed = place(rendered, items, captured, ranges, len(history))
    served = history + placed.tail
    numbers = {
        kind: iter([i for i, segment in enumerate(before + after) if segment[0] == kind])
        for kind in ranges
    }
    for kind, places in placed.placeholders.items():
        for place_, old in zip(places, ranges[kind], strict=True):
            number = next(numbers[kind])
            assert served[place_.offset : place_.offset + place_.length] == [number] * place_.length
            assert place_.is_embed is old.is_embed
    offsets = [item.described.offset for item in placed.added]
    assert offsets == sorted(offsets)
    assert all(offset >= len(history) for offset in offsets)
    assert [served[offset] for offset in offsets] == list(
        range(len(before), len(before) + len(after))
    )


def _add(
    rendered: list[int],
    items: list[MediaItem],
    ranges: dict[str, list[Any]],
    number: int,
    kind: str,
    length: int,
    masked: bool,
) -> None:
    mask = torch.ones(length, dtype=torch.bool) if masked else None
    ranges[kind].append(PlaceholderRange(offset=len(rendered), length=length, is_embed=mask))
    items.append(MediaItem(len(ranges[kind]) - 1, described(len(rendered), length, kind), {}))
    rendered += [number] * length


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_embedding_spans_are_the_runs_of_the_mask(mask):
    place_ = PlaceholderRange(offset=3, length=len(mask), is_embed=torch.tensor(mask))
    spans = embed_spans(place_)
    inside = {at for start, end in spans for at in range(start, end)}
    assert inside == {at for at, embeds in enumerate(mask) if embeds}
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))
    assert embed_spans(PlaceholderRange(offset=3, length=4)) == ((0, 4),)


@pytest.mark.requirement("B7", "B8")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"identity": "url:b"}, "identity"),
        ({"length": 3, "embed_spans": ((0, 3),)}, "length"),
        ({"embed_spans": ((0, 1),)}, "embed_spans"),
        ({"placeholder_token_id": 8}, "placeholder_token_id"),
        ({"grid": (1, 1, 4)}, "grid"),
        ({"height": 56}, "height"),
        ({"width": 56}, "width"),
        ({"frames": 2}, "frames"),
        ({"modality": "video"}, "modality"),
        ({"tensors": (msgspec.structs.replace(PATCHES, dtype="int8"),)}, "tensors"),
    ],
)
def test_a_changed_field_of_a_retained_image_is_named(changes, named):
    old = Captured(None, described(5, 2, blob="b"))  # type: ignore[arg-type]
    history = [0] * 5 + [7] * 2
    same = MediaItem(0, described(0, 2), pixels())
    check_retained([same], [old], [7, 7], history, [pixels()])
    other = MediaItem(0, msgspec.structs.replace(described(0, 2), **changes), pixels())
    with pytest.raises(ForestError, match=f"image 1 of 1: another {named}") as caught:
        check_retained([other], [old], [7] * 3, history, [pixels()])
    assert caught.value.reason is Reason.MEDIA_MISMATCH


@pytest.mark.requirement("B7", "B8")
def test_changed_tokens_or_pixels_of_a_retained_image_are_named():
    old = Captured(None, described(5, 2, blob="b"))  # type: ignore[arg-type]
    item, history = MediaItem(0, described(0, 2), pixels()), [0] * 5 + [7] * 2
    with pytest.raises(ForestError, match="other placeholder tokens"):
        check_retained([item], [old], [7, 8], history, [pixels()])
    with pytest.raises(ForestError, match="pixel_values has other values"):
        check_retained([item], [old], [7, 7], history, [pixels(1)])


def with_media(record: CallRecord, *occurrences: MediaOccurrence) -> CallRecord:
    return msgspec.structs.replace(
        record, media=occurrences, media_digest=media_digest(occurrences)
    )


@pytest.mark.requirement("B10", "A16")
def test_captured_descriptors_are_authenticated_before_their_offsets_are_used():
    forest = Forest()
    one = with_media(forest.call(prompt=6), described(1, 2), described(3, 2))
    two = with_media(forest.call(one, prompt=5), described(one.cum_len + 1, 3))
    found = captured_media(two, [one, two])
    assert [(old.record, old.occurrence) for old in found] == [
        (one, one.media[0]), (one, one.media[1]), (two, two.media[0]),
    ]  # fmt: skip
    assert captured_media(one, [one, two]) == found[:2]
    moved = msgspec.structs.replace(one.media[0], offset=0)
    damaged = [
        [msgspec.structs.replace(one, media=(moved, one.media[1])), two],
        [msgspec.structs.replace(one, media=()), two],
        [msgspec.structs.replace(one, media_digest=None), two],
        # Committed to, and still not inside the call's own prompt, or out of order.
        [with_media(one, described(one.prompt_len - 1, 2)), two],
        [with_media(one, described(3, 2), described(1, 2)), two],
        [with_media(one, described(1, 3), described(3, 2)), two],
        [two],
    ]
    for records in damaged:
        with pytest.raises(ForestError) as caught:
            captured_media(two, records)
        assert caught.value.reason is Reason.MISSING_PARENT_EVIDENCE
    early = with_media(two, described(one.cum_len - 1, 3))
    with pytest.raises(ForestError):
        captured_media(early, [one, early])


@given(st.integers(0, 23), st.integers(0, 255))
def test_same_bytes_sees_every_byte(position, value):
    one = pixels()["pixel_values"]
    other = one.copy()
    assert same_bytes(one, other)
    other.reshape(-1)[position] = value
    assert same_bytes(one, other) == bool((one == other).all())


def test_bfloat16_keeps_its_bits():
    value = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.bfloat16)
    tensor, array = to_array("pixel_values", value.T)
    assert (tensor.dtype, tensor.shape, array.dtype) == ("bfloat16", (2, 2), np.uint16)
    assert array.tolist() == [[0x3F80, 0x3F00], [0xC000, 0x4040]]
    with pytest.raises(ValueError, match="expected one tensor"):
        to_array("pixel_values", [value])


def test_arrays_share_the_processors_memory():
    value = torch.arange(6, dtype=torch.uint8)
    _, array = to_array("pixel_values", value)
    assert array.ctypes.data == value.data_ptr()


def test_the_cache_holds_no_more_than_its_bytes():
    cache = MediaCache(None, capacity_bytes=60)  # type: ignore[arg-type]
    for name in ("a", "b", "a", "c"):
        cache.put(name, pixels())
    assert list(cache._tensors) == ["a", "c"]
    assert cache._held == 48
