"""A conversation of 20 turns with 8 images: what comparing, storing and rendering them costs.

    pytest benchmarks/bench_images.py --benchmark-only

The images have 1,200 tokens each (1,120 x 840 pixels, 5.6 MB of patches). The request that is
measured continues the last call and sends all of them again.
"""

import asyncio
import ctypes
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema.media import blob_digest
from vllm_forest_renderer import compat
from vllm_forest_renderer.context import Call
from vllm_forest_renderer.media.items import MediaItem
from vllm_forest_renderer.media.retained import check_retained
from vllm_forest_renderer.plugin import wrap_renderers
from vllm_forest_renderer.qualify.rehearsal import Rehearsal

from benchmarks.conftest import Report, timed
from benchmarks.figures import Goal, figure
from tests.support.vision import family_dir, image, text

TURNS, IMAGES = 20, 8
SIZE, QUICK_SIZE = (1120, 840), (112, 84)
SECTION = "Images"


@dataclass(frozen=True)
class Conversation:
    """The captured conversation and the request that continues it."""

    renderer: Any
    rehearsal: Rehearsal
    messages: list[dict[str, Any]]
    call: Call
    """The request, rendered once."""
    loop: asyncio.AbstractEventLoop

    def arrays(self) -> list[dict[str, Any]]:
        """Copies of the tensors of every retained image, in memory of their own."""
        stored = self.loop.run_until_complete(self.call.stored_media(self.call.retained))
        return [{name: array.copy() for name, array in one.items()} for one in stored]


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory, quick: bool) -> Iterator[Conversation]:
    directory = family_dir("qwen25", tmp_path_factory.mktemp("model") / "model")
    _admit_large_images(directory)
    wrap_renderers()
    renderer = compat.offline_renderer(str(directory))
    end = renderer.get_tokenizer().convert_tokens_to_ids("<|im_end|>")
    loop = asyncio.new_event_loop()
    rehearsal = Rehearsal(renderer, None)
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        parts = [text(f"Question {turn}")]
        if turn < IMAGES:
            parts.append(image(turn, *(QUICK_SIZE if quick else SIZE)))
        messages.append({"role": "user", "content": parts})
        call = loop.run_until_complete(rehearsal.request(messages))
        assert (call.predecessor is not None) == (turn > 0)
        words = f"Answer {turn}"
        generated = [*renderer.get_tokenizer().encode(words), end]
        messages.append(rehearsal.answer(call, words, generated))
    messages.append({"role": "user", "content": "And now?"})
    call = loop.run_until_complete(rehearsal.request(messages))
    assert len(call.retained) == IMAGES
    yield Conversation(renderer, rehearsal, messages, call, loop)
    loop.close()


def _admit_large_images(directory: Path) -> None:
    path = directory / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    processor["size"]["longest_edge"] = SIZE[0] * SIZE[1]
    path.write_text(json.dumps(processor))


def test_comparing_retained_images(report: Report, conversation: Conversation, quick: bool) -> None:
    """Every image processed anew, so that no tensor is the very one that was captured."""
    call = conversation.call
    stored, current = conversation.arrays(), conversation.arrays()
    rendered: list[int] = []
    items = []
    for index, (old, arrays) in enumerate(zip(call.retained, current, strict=True)):
        placed = msgspec.structs.replace(old.occurrence, offset=len(rendered), blob="")
        items.append(MediaItem(index, placed, arrays))
        rendered += [placed.placeholder_token_id] * placed.length
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def ours() -> None:
        check_retained(items, call.retained, rendered, call.inherited_tokens, stored)

    def one_pass() -> None:
        for now, before in zip(current, stored, strict=True):
            array = now["pixel_values"]
            memcmp(array.ctypes.data, before["pixel_values"].ctypes.data, array.nbytes)

    def equal() -> None:
        for now, before in zip(current, stored, strict=True):
            assert np.array_equal(now["pixel_values"], before["pixel_values"])

    def digests() -> None:
        for item in items:
            blob_digest(item.described.tensors, item.arrays)

    row = report.compare(
        SECTION,
        f"compare {IMAGES} retained images",
        timed(ours),
        peers={"numpy.array_equal": timed(equal), "xxh3_128 again": timed(digests)},
        limits={"memcmp": timed(one_pass)},
        rounds=2 if quick else 40,
        headline="comparing 8 retained images (45 MB)",
    )
    report.add(row, Goal("one pass: 1.1 memcmp", row.other("memcmp").ratio, 1.1))


def test_bytes_stored(report: Report, conversation: Conversation) -> None:
    stored = sum(
        array.nbytes
        for delta in conversation.rehearsal.deltas
        for name, array in delta.items()
        if name.startswith("media.")
    )
    distinct = {
        old.occurrence.blob: sum(array.nbytes for array in arrays.values())
        for old, arrays in zip(conversation.call.retained, conversation.arrays(), strict=True)
    }
    sizes = list(distinct.values())
    every_call = sum(sum(sizes[: min(turn + 1, IMAGES)]) for turn in range(TURNS))
    report.benchmark.pedantic(lambda: None, rounds=1)
    row = figure(
        SECTION,
        f"media stored, {TURNS} turns",
        "MB",
        [stored / 1e6],
        peers={"all images in every call": [every_call / 1e6]},
        limits={"distinct pixels": [sum(sizes) / 1e6]},
    )
    ratio = row.other("distinct pixels").ratio
    report.add(row, Goal("each image once: 1.0", ratio, 1.0))


def test_render_step(report: Report, conversation: Conversation, quick: bool) -> None:
    """The whole step with decoding, beside stock vLLM's for the same messages."""
    run, messages = conversation.loop.run_until_complete, conversation.messages
    params = compat.chat_params(None, None)

    def ours() -> None:
        run(conversation.rehearsal.request(messages))

    def stock() -> None:
        run(conversation.renderer.render_chat_async([messages], params))

    report.add(
        report.compare(
            SECTION,
            f"whole render step, {IMAGES} images",
            timed(ours),
            peers={"vLLM": timed(stock)},
            rounds=2 if quick else 20,
        )
    )
