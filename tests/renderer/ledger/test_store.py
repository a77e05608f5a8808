"""The safetensors delta store: durability order, sharing, deletion by key, leftovers."""

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from forest_schema import Reason, SchemaError
from forest_schema.digests import delta_digest, token_digest
from forest_schema.shards import ShardError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from vllm_forest_renderer.errors import ForestError, StoreUnavailable
from vllm_forest_renderer.process import ProcessIdentity
from vllm_forest_renderer.store import SafetensorsSink
from vllm_forest_renderer.store import files as store_files

from tests.support.capture import PARTITION, make_delta

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sink(tmp_path, anyio_backend):
    sink = SafetensorsSink(tmp_path / "store")
    await sink.prepare(PARTITION)
    yield sink
    await sink.shutdown()


def _same(left, right):
    return set(left) == set(right) and all(
        left[n].dtype == right[n].dtype and np.array_equal(left[n], right[n]) for n in left
    )


@pytest.mark.requirement("C3", "C4")
async def test_a_delta_comes_back_bit_for_bit(sink):
    random = np.random.default_rng(0)
    delta = dict(make_delta()) | {
        "routes": random.integers(0, 255, (12, 3, 2)).astype(np.uint8),
        "empty": np.zeros((0, 4), np.float16),
        "strided": np.arange(20, dtype=np.int64)[::2],
        "flag": np.array(True),
    }
    ref = await sink.put(PARTITION, "call_1", delta)
    assert _same(await sink.get(ref), delta)
    path = sink.shard_path(PARTITION, ref.shard)
    stored = safetensors.numpy.load_file(path)
    assert _same({n.removeprefix("call_1/"): a for n, a in stored.items()}, delta)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "routes", "pixels"]),
            st.sampled_from(["u1", "<i4", "<f4", "<f2", "<i8", "?"]).flatmap(
                lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_side=4))
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_tensors_survive_the_shard(tmp_path_factory, deltas):
    async def scenario():
        sink = SafetensorsSink(tmp_path_factory.mktemp("store"))
        await sink.prepare(PARTITION)
        whole = [dict(make_delta()) | extra for extra in deltas]
        refs = await asyncio.gather(
            *(sink.put(PARTITION, f"k{n}", delta) for n, delta in enumerate(whole))
        )
        sealed = await sink.seal(PARTITION, refs)
        for ref, new, delta in zip(refs, sealed, whole, strict=True):
            assert ref.digest == new.digest == delta_digest(delta)
            for address in (ref, new):
                stored = await sink.get(address)
                assert {n: a.tobytes() for n, a in stored.items()} == {
                    n: a.tobytes() for n, a in delta.items()
                }
        await sink.shutdown()

    asyncio.run(scenario())


async def test_file_and_folder_are_flushed_in_order_before_the_acknowledgement(sink, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(descriptor):
        fsync(descriptor)
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def seen_rename(source, target):
        rename(source, target)
        events.append(("rename", os.fspath(target)))

    monkeypatch.setattr(store_files.os, "fsync", seen_fsync)
    monkeypatch.setattr(store_files.os, "rename", seen_rename)
    ref = await sink.put(PARTITION, "call_1", make_delta())
    events.append(("acknowledged", ref.shard))
    folder = sink.directory / PARTITION
    temporary, final = folder / f".{ref.shard}.tmp", folder / f"{ref.shard}.safetensors"
    assert events == [
        ("fsync", str(temporary)),
        ("rename", str(final)),
        ("fsync", str(folder)),
        ("acknowledged", ref.shard),
    ]


async def test_overlapping_puts_share_a_shard_and_partitions_never_do(sink):
    await sink.prepare("other")
    places = [(PARTITION, f"a{n}") for n in range(20)] + [("other", f"b{n}") for n in range(20)]
    refs = await asyncio.gather(*(sink.put(p, k, make_delta()) for p, k in places))
    assert len({ref.shard for ref in refs}) < 20
    shards = {ref.shard: set() for ref in refs}
    for ref in refs:
        shards[ref.shard].add(ref.partition)
    assert all(len(partitions) == 1 for partitions in shards.values())
    assert set(await sink.list(PARTITION)) | set(await sink.list("other")) == set(refs)


async def test_the_same_key_twice_at_once_is_stored_twice(sink):
    deltas = [make_delta(), make_delta(), make_delta()]
    refs = await asyncio.gather(*(sink.put(PARTITION, "call_1", delta) for delta in deltas))
    assert len(set(refs)) == 3
    for ref, delta in zip(refs, deltas, strict=True):
        assert _same(await sink.get(ref), delta)


async def test_an_acknowledgement_says_what_is_stored_also_after_a_restart(sink):
    delta = make_delta(40, 9)
    ref = await sink.put(PARTITION, "call_1", delta)
    reopened = SafetensorsSink(sink.directory)
    for store in (sink, reopened):
        acknowledgement = await store.acknowledgement(ref)
        assert (acknowledgement.delta_len, acknowledgement.generated_len) == (40, 9)
        assert acknowledgement.token_digest == token_digest(delta["tokens"])
    await reopened.shutdown()


@pytest.mark.parametrize(
    "delta",
    [
        {"tokens": np.zeros(3, np.int64), "logprobs": np.zeros(1, np.float32)},
        {"tokens": np.zeros(3, np.int32)},
        {"tokens": np.zeros((3, 1), np.int32), "logprobs": np.zeros(1, np.float32)},
        {"tokens": np.zeros(3, np.int32), "logprobs": np.zeros(4, np.float32)},
        {"tokens": np.zeros(3, np.int32), "logprobs": np.zeros(1, np.float64)},
    ],
)
async def test_a_delta_of_another_shape_is_refused(sink, delta):
    with pytest.raises(ValueError, match="delta call_1"):
        await sink.put(PARTITION, "call_1", delta)


@pytest.mark.parametrize("key", ["", "a/b", "..", "a b", "x" * 129])
async def test_keys_are_checked(sink, key):
    with pytest.raises(ForestError):
        await sink.put(PARTITION, key, make_delta())


async def test_a_shard_goes_with_its_last_delta_whoever_deletes_it(sink):
    refs = await asyncio.gather(*(sink.put(PARTITION, f"k{n}", make_delta()) for n in range(6)))
    shared = max({ref.shard for ref in refs}, key=lambda s: sum(r.shard == s for r in refs))
    members = [ref for ref in refs if ref.shard == shared]
    assert len(members) > 2
    other = SafetensorsSink(sink.directory)
    assert await sink.delete(members[:1]) == 0
    assert await other.delete(members[1:-1]) == 0
    assert await sink.delete(members[:1]) == 0
    assert {r for r in await other.list(PARTITION) if r.shard == shared} == {members[-1]}
    assert await sink.get(members[-1])
    assert await other.delete(members[-1:]) == 1
    assert await sink.delete(members) == 0
    with pytest.raises(ShardError):
        await sink.get(members[0])
    leftover = [p.name for p in (sink.directory / PARTITION).iterdir() if shared in p.name]
    assert leftover == []
    await other.shutdown()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_deletion_frees_exactly_the_empty_shards(tmp_path_factory, seed):
    """Oracle: a shard's file exists as long as one of its deltas was not deleted."""

    async def scenario():
        random = np.random.default_rng(seed)
        sinks = [SafetensorsSink(tmp_path_factory.mktemp("store"))]
        sinks.append(SafetensorsSink(sinks[0].directory))
        await sinks[0].prepare(PARTITION)
        refs = list(
            await asyncio.gather(
                *(sinks[n % 2].put(PARTITION, f"k{n}", make_delta()) for n in range(12))
            )
        )
        live = set(refs)
        while live:
            doomed = [refs[i] for i in random.choice(12, random.integers(1, 5), replace=False)]
            before = {ref.shard for ref in live}
            live -= set(doomed)
            removed = await sinks[random.integers(2)].delete(doomed)
            assert removed == len(before - {ref.shard for ref in live})
            assert set(await sinks[0].list(PARTITION)) == live
            for ref in live:
                await sinks[1].get(ref)
        assert list((sinks[0].directory / PARTITION).iterdir()) == []
        for sink in sinks:
            await sink.shutdown()

    asyncio.run(scenario())


async def test_a_damaged_shard_is_refused(sink):
    ref = await sink.put(PARTITION, "call_1", make_delta())
    path = sink.shard_path(PARTITION, ref.shard)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fresh = SafetensorsSink(sink.directory)
    with pytest.raises(ShardError) as refused:
        await fresh.get(ref)
    assert refused.value.reason is Reason.DIGEST_MISMATCH
    await fresh.shutdown()


async def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(sink):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ours = ProcessIdentity.current()
    folder = sink.directory / PARTITION
    alive = folder / f".{ours.token}-0000000000000000.tmp"
    dead = ProcessIdentity(boot_id=ours.boot_id, pid=sleeper.pid, start_ticks=1)
    for name in (
        alive.name,
        f".{dead.token}-0000000000000000.tmp",
        f".{'0' * 32}-{ours.pid:x}-{ours.start_ticks:x}-0000000000000000.tmp",
        ".nonsense.tmp",
    ):
        (folder / name).write_bytes(b"torn")
    trash = sink.directory / ".trash-0000"
    trash.mkdir()
    (trash / "x.safetensors").write_bytes(b"old")
    reopened = SafetensorsSink(sink.directory)
    assert list(folder.iterdir()) == [alive]
    assert not trash.exists()
    await reopened.shutdown()
    sleeper.kill()
    sleeper.wait()


@pytest.mark.requirement("C20")
async def test_a_store_of_another_version_is_refused_by_name(tmp_path):
    store = tmp_path / "store"
    await SafetensorsSink(store).shutdown()
    header = store / "store.json"
    for wrong, named in (
        (b'{"schema":2,"required_features":[],"store":"s"}', "version 2"),
        (b'{"schema":3,"required_features":["teleport"],"store":"s"}', "teleport"),
        (b'{"schema":3,"required_features":[]}', "store"),
        (b"torn", "schema"),
    ):
        header.write_bytes(wrong)
        with pytest.raises((SchemaError, ShardError), match=named):
            SafetensorsSink(store)


async def test_a_store_that_was_shut_down_refuses(tmp_path):
    sink = SafetensorsSink(tmp_path / "store")
    await sink.prepare(PARTITION)
    ref = await sink.put(PARTITION, "call_1", make_delta())
    await sink.shutdown()
    with pytest.raises(StoreUnavailable):
        await sink.put(PARTITION, "call_2", make_delta())
    with pytest.raises(StoreUnavailable):
        await sink.get(ref)
