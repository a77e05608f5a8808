"""Media descriptors: committed to as a whole, their tensors found and checked by name."""

import msgspec
import numpy as np
import pytest
from forest_schema import Reason, SchemaError, TensorRef, decode_call
from forest_schema.digests import delta_digest
from forest_schema.media import (
    BFLOAT16,
    MediaError,
    MediaOccurrence,
    MediaTensor,
    PixelNormalization,
    authenticate,
    blob_digest,
    media_digest,
    occurrence_tensors,
    tensor_name,
)
from forest_schema.shards import ShardError, ShardReader, encode_shard
from forest_schema.version import REQUIRED_FEATURES, features_of
from hypothesis import given
from hypothesis import strategies as st

from tests.schema.test_records import make_record
from tests.schema.test_shards import Bytes

PATCHES = MediaTensor(name="pixel_values", dtype="uint8", shape=(4, 6))


def make_occurrence(**changes):
    fields = {
        "modality": "image",
        "identity": "sha256:00",
        "offset": 3,
        "length": 1,
        "embed_spans": ((0, 1),),
        "placeholder_token_id": 7,
        "grid": (1, 2, 2),
        "height": 28,
        "width": 28,
        "blob": "ab" * 16,
        "tensors": (PATCHES,),
        "normalization": PixelNormalization(mean=(0.5,), std=(0.25,), rescale_factor=1 / 255),
    }
    return MediaOccurrence(**{**fields, **changes})


CHANGES = {
    "modality": "video",
    "identity": "sha256:01",
    "offset": 4,
    "length": 2,
    "embed_spans": ((0, 2),),
    "placeholder_token_id": 8,
    "grid": (1, 2, 4),
    "height": 56,
    "width": 56,
    "frames": 2,
    "blob": "cd" * 16,
    "tensors": (msgspec.structs.replace(PATCHES, dtype="float32"),),
    "normalization": None,
}


@pytest.mark.requirement("B5")
@pytest.mark.parametrize("field", sorted(CHANGES))
def test_the_commitment_covers_every_field(field):
    one = make_occurrence()
    assert field in one.__struct_fields__
    assert set(CHANGES) == set(one.__struct_fields__)
    changed = msgspec.structs.replace(one, **{field: CHANGES[field]})
    authenticate([one, one], media_digest([one, one]))
    with pytest.raises(MediaError):
        authenticate([one, changed], media_digest([one, one]))


def test_presence_and_commitment_go_together():
    authenticate([], None)
    with pytest.raises(MediaError):
        authenticate([], media_digest([make_occurrence()]))
    with pytest.raises(MediaError):
        authenticate([make_occurrence()], None)
    with pytest.raises(MediaError):
        authenticate([make_occurrence()], media_digest([make_occurrence()] * 2))


@pytest.mark.requirement("C13")
def test_golden_digests():
    assert media_digest([make_occurrence()]) == "91ab6e101466eaa118c04fb7ffdc7da8"
    array = np.arange(24, dtype=np.uint8).reshape(4, 6)
    assert blob_digest([PATCHES], {"pixel_values": array}) == "6b252fd2c90fae8f6d18f46e272037be"


@given(
    st.lists(
        st.builds(
            make_occurrence,
            offset=st.integers(0, 2**31),
            normalization=st.none()
            | st.builds(
                PixelNormalization,
                mean=st.tuples(st.floats(0, 1)),
                std=st.tuples(st.floats(0.1, 1)),
                rescale_factor=st.floats(1e-9, 1),
            ),
        ),
        max_size=3,
    )
)
def test_the_commitment_survives_json(occurrences):
    committed = media_digest(occurrences) if occurrences else None
    record = make_record(media=tuple(occurrences), media_digest=committed)
    found = decode_call(msgspec.json.encode(record))
    assert found == record
    authenticate(found.media, found.media_digest)


@given(st.binary(min_size=24, max_size=24), st.integers(0, 23), st.integers(1, 255))
def test_blob_digest_covers_the_content(data, position, flip):
    array = np.frombuffer(data, np.uint8).reshape(4, 6)
    other = array.copy()
    other.reshape(-1)[position] ^= flip
    first = blob_digest([PATCHES], {"pixel_values": array})
    assert first == blob_digest([PATCHES], {"pixel_values": np.asfortranarray(array)})
    assert first != blob_digest([PATCHES], {"pixel_values": other})


def delta_with(occurrence, **arrays):
    tensors = {tensor_name(occurrence.blob, name): array for name, array in arrays.items()}
    return {"tokens": np.arange(5, dtype=np.int32), "logprobs": np.zeros(2, np.float32), **tensors}


@pytest.mark.requirement("C3")
def test_tensors_are_stored_in_the_processors_dtype():
    half = MediaTensor(name="pixel_values", dtype=BFLOAT16, shape=(2, 2))
    raw, bits = make_occurrence(), make_occurrence(blob="cd" * 16, tensors=(half,))
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    # 1.0, -2.0, 0.5, 3.0 as bfloat16.
    halves = np.array([[0x3F80, 0xC000], [0x3F00, 0x4040]], np.uint16)
    delta = {**delta_with(raw, pixel_values=pixels), **delta_with(bits, pixel_values=halves)}
    ref = TensorRef(store="s", partition="p", shard="x", key="c", digest=delta_digest(delta))
    encoded = encode_shard({"c": delta}, store="s", partition="p")
    stored = ShardReader(Bytes(encoded), shard="x").read(ref)
    found = occurrence_tensors(raw, stored)["pixel_values"]
    assert (found.dtype, found.tolist()) == (np.uint8, pixels.tolist())
    back = occurrence_tensors(bits, stored)["pixel_values"].astype(np.uint32) << 16
    assert back.view(np.float32).tolist() == [[1.0, -2.0], [0.5, 3.0]]


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"pixel_values": np.zeros((4, 5), np.uint8)},
        {"pixel_values": np.zeros((4, 6), np.int8)},
        {"other": np.zeros((4, 6), np.uint8)},
    ],
)
def test_a_tensor_that_is_not_as_described_is_refused(arrays):
    occurrence = make_occurrence()
    with pytest.raises(MediaError, match="pixel_values"):
        occurrence_tensors(occurrence, delta_with(occurrence, **arrays))


@pytest.mark.requirement("C20")
def test_media_is_a_required_feature_only_where_there_is_media(monkeypatch):
    occurrence = make_occurrence()
    with_media = delta_with(occurrence, pixel_values=np.zeros((4, 6), np.uint8))
    without = delta_with(occurrence)
    one = encode_shard({"a": without, "b": with_media}, store="s", partition="p")
    other = encode_shard({"a": without}, store="s", partition="p")
    record = make_record(required_features=features_of(with_media))
    encoded = msgspec.json.encode(record)
    assert decode_call(encoded) == record
    monkeypatch.setattr("forest_schema.version.KNOWN_FEATURES", frozenset(REQUIRED_FEATURES))
    ShardReader(Bytes(other), shard="x")
    with pytest.raises(SchemaError, match="media"):
        ShardReader(Bytes(one), shard="x")
    with pytest.raises(SchemaError, match="media"):
        decode_call(encoded)


def test_damaged_pixels_are_a_digest_mismatch():
    occurrence = make_occurrence()
    delta = delta_with(occurrence, pixel_values=np.zeros((4, 6), np.uint8))
    ref = TensorRef(store="s", partition="p", shard="x", key="c", digest=delta_digest(delta))
    encoded = bytearray(encode_shard({"c": delta}, store="s", partition="p"))
    encoded[-1] ^= 1
    with pytest.raises(ShardError) as caught:
        ShardReader(Bytes(bytes(encoded)), shard="x").read(ref)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
