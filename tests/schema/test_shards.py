"""Shards: what is read is what was committed, or an error says why not."""

import json

import msgspec
import numpy as np
import pytest
from forest_schema import Reason, SchemaError, TensorRef
from forest_schema.digests import delta_digest
from forest_schema.shards import MappedFile, ShardError, ShardReader, encode_shard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

DTYPES = (np.uint8, np.int32, np.float32, np.float16, np.int64)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0))
)
deltas = st.dictionaries(st.sampled_from(["tokens", "logprobs", "routes"]), arrays, min_size=1)


class Bytes:
    def __init__(self, data):
        self.data = memoryview(data)

    def size(self):
        return len(self.data)

    def read(self, offset, length):
        return self.data[offset : offset + length]


@pytest.fixture
def delta():
    return {"tokens": np.arange(5, dtype=np.int32), "logprobs": np.zeros(2, np.float32)}


def address(delta, **changes):
    fields = {"store": "s", "partition": "p", "shard": "x", "key": "c1"}
    return TensorRef(**{**fields, "digest": delta_digest(delta), **changes})


@pytest.mark.requirement("C4", "C27")
@given(st.dictionaries(st.sampled_from(["a", "b", "att_1.c"]), deltas, min_size=1))
def test_round_trip(by_key):
    reader = ShardReader(Bytes(encode_shard(by_key, store="s", partition="p")), shard="x")
    for key, tensors in by_key.items():
        found = reader.read(address(tensors, key=key))
        assert found.keys() == tensors.keys()
        for name, array in tensors.items():
            assert found[name].dtype == array.dtype
            assert found[name].tobytes() == array.tobytes()
            assert found[name].shape == array.shape


GOLDEN = b"".join(
    (
        (504).to_bytes(8, "little"),
        b'{"__metadata__":{"forest_schema":"3",'
        b'"required_features":"[\\"replay_summary\\", \\"weight_spans\\"]",'
        b'"store":"store0","partition":"run-step0",'
        b'"digests":"{\\"c0\\": \\"cd507873e4be3dbb1a4b9131f9c3910e\\", '
        b'\\"c1\\": \\"f59043a780364b042b3f9e62d521ac76\\"}"},'
        b'"c0/logprobs":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"c0/tokens":{"dtype":"I32","shape":[4],"data_offsets":[8,24]},'
        b'"c1/logprobs":{"dtype":"F32","shape":[1],"data_offsets":[24,28]},'
        b'"c1/tokens":{"dtype":"I32","shape":[2],"data_offsets":[28,36]}}      ',
        bytes.fromhex("000000bf 0000a0bf 5c500200 68030000 c6000000 eb250000"),
        bytes.fromhex("00000000 07000000 08000000"),
    )
)
"""A sealed shard of two calls, byte for byte."""


@pytest.mark.requirement("C19")
def test_a_shard_that_was_written_earlier_still_reads():
    reader = ShardReader(Bytes(GOLDEN), shard="x")
    assert (reader.store, reader.partition) == ("store0", "run-step0")
    expected = {
        "c0": ([151644, 872, 198, 9707], [-0.5, -1.25], "cd507873e4be3dbb1a4b9131f9c3910e"),
        "c1": ([7, 8], [0.0], "f59043a780364b042b3f9e62d521ac76"),
    }
    written = {}
    for key, (tokens, logprobs, digest) in expected.items():
        ref = TensorRef(store="store0", partition="run-step0", shard="x", key=key, digest=digest)
        found = written[key] = reader.read(ref)
        assert found.keys() == {"tokens", "logprobs"}
        assert (found["tokens"].dtype, found["logprobs"].dtype) == ("<i4", "<f4")
        assert (found["tokens"].tolist(), found["logprobs"].tolist()) == (tokens, logprobs)
    # What is sealed today has the same layout.
    assert encode_shard(written, store="store0", partition="run-step0") == GOLDEN


@pytest.mark.requirement("C27")
def test_mapped_file_reads_the_same_bytes(delta, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_shard({"c1": delta}, store="s", partition="p"))
    found = ShardReader(MappedFile(path), shard="x").read(address(delta))
    assert found["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert not found["tokens"].flags.writeable


@pytest.mark.requirement("C27")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"store": "other"}, Reason.FOREIGN_SHARD),
        ({"partition": "other"}, Reason.FOREIGN_SHARD),
        ({"key": "c2"}, Reason.FOREIGN_SHARD),
        ({"digest": "0" * 32}, Reason.DIGEST_MISMATCH),
    ],
)
def test_wrong_address_is_refused(delta, changes, reason):
    reader = ShardReader(Bytes(encode_shard({"c1": delta}, store="s", partition="p")), shard="x")
    with pytest.raises(ShardError) as caught:
        reader.read(address(delta, **changes))
    assert caught.value.reason is reason


@given(st.data())
def test_a_damaged_or_torn_shard_is_never_read(data):
    delta = {"tokens": np.arange(64, dtype=np.int32), "logprobs": np.ones(9, np.float32)}
    whole = encode_shard({"c1": delta}, store="s", partition="p")
    if data.draw(st.booleans(), label="torn"):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        position = data.draw(st.integers(0, len(whole) - 1))
        damaged = bytearray(whole)
        damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        found = ShardReader(Bytes(bytes(damaged)), shard="x").read(address(delta))
    except (ShardError, SchemaError):
        return
    # A flip inside the header's padding or in a field that is not used leaves the tensors alone.
    assert all(found[name].tobytes() == delta[name].tobytes() for name in delta)


@pytest.mark.requirement("C20", "J7")
def test_another_schema_version_is_refused_by_name(delta):
    whole = encode_shard({"c1": delta}, store="s", partition="p")
    old = whole.replace(b'"forest_schema":"3"', b'"forest_schema":"2"')
    assert old != whole
    with pytest.raises(SchemaError, match="version 2"):
        ShardReader(Bytes(old), shard="x")


@pytest.mark.requirement("C20")
def test_unknown_required_feature_is_refused_and_unknown_metadata_kept(delta):
    whole = encode_shard({"c1": delta}, store="s", partition="p")
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def rebuilt(**metadata):
        changed = {**header, "__metadata__": {**header["__metadata__"], **metadata}}
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    with pytest.raises(SchemaError, match="holograms"):
        ShardReader(Bytes(rebuilt(required_features='["holograms"]')), shard="x")
    reader = ShardReader(Bytes(rebuilt(colour="blue")), shard="x")
    assert reader.read(address(delta))["tokens"].size == 5


def test_references_survive_json(delta):
    ref = address(delta)
    assert msgspec.json.decode(msgspec.json.encode(ref), type=TensorRef) == ref
