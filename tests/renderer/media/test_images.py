"""Images through the real engine: what it saw is what is stored, whatever is sent again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from forest_schema import CallRecord
from forest_schema.media import authenticate, occurrence_tensors

from tests.support.episodes import END, Episode
from tests.support.vision import image, text

PAD = 151655
START = 151652


def script(episode: Episode, words: str) -> list[int]:
    """A scripted answer in another tokenization than the tokenizer's own."""
    return [*episode.spell(words), *episode.ids(END)]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def stored(episode: Episode, record: CallRecord) -> dict[str, Any]:
    sink = episode.server.app.state.forest.control.sink
    return dict(episode.server.run(sink.get(record.delta)))


def blobs(episode: Episode, record: CallRecord) -> set[str]:
    """Digests of the contents that the call's delta holds."""
    return {name.split(".")[1] for name in stored(episode, record) if name.startswith("media.")}


def identities(records: Sequence[CallRecord]) -> list[str]:
    return [occurrence.identity for record in records for occurrence in record.media]


def check_spans(episode: Episode, records: Sequence[CallRecord]) -> None:
    """Every captured occurrence lies on pad tokens of the prompt that the engine was given."""
    places = [(o.offset, o.length) for record in records for o in record.media]
    assert places == sorted(places)
    served = episode.served
    for offset, length in places:
        assert served[offset - 1] == START
        assert served[offset : offset + length] == [PAD] * length
        assert served[offset + length] != PAD
    assert served.count(PAD) == sum(length for _, length in places)


@pytest.mark.requirement("XM1", "B1", "B3", "B6", "A19", "A20")
def test_one_image_over_three_turns_stays_one_expansion(episode):
    messages = [user(image(1), text("What is it?"))]
    records: list[CallRecord] = []
    for words in ("Noise.", "Only noise.", "Nothing but noise."):
        answer, record = episode.chat(messages, script(episode, words))
        assert episode.served.count(PAD) == 4
        if records:
            assert record.parent_call_id == records[-1].call_id
            assert episode.tail(records[-1]) == episode.served[record.prev_len :]
        records.append(record)
        check_spans(episode, records)
        assert [*episode.served, *script(episode, words)] == episode.history(record)
        messages += [answer, user(text("Look again."))]
    assert [len(record.media) for record in records] == [1, 0, 0]
    assert [len(blobs(episode, record)) for record in records] == [1, 0, 0]
    assert all(record.media_digest is None for record in records[1:])


@pytest.mark.requirement("XM2", "XM3", "B3", "B4", "B5", "B9")
def test_a_kept_b_added_then_a_rewrite_to_b(episode):
    first = user(image(1), text("This?"))
    answer, one = episode.chat([first], script(episode, "A"))
    second = user(text("And this?"), image(2, 84, 56))
    _, two = episode.chat([first, answer, second], script(episode, "B"))
    (a,), (b,) = one.media, two.media
    assert two.parent_call_id == one.call_id
    check_spans(episode, [one, two])
    assert (a.length, b.length) == (4, 6)
    assert two.prev_len < b.offset < two.prompt_len
    _, three = episode.chat([second], script(episode, "B again"))
    assert (three.parent_call_id, three.root_reason) == (None, "no_match")
    check_spans(episode, [three])
    assert identities([one, two, three]) == [a.identity, b.identity, b.identity]
    assert [blobs(episode, call) for call in (one, two, three)] == [{a.blob}, {b.blob}, {b.blob}]
    assert (b.grid, b.height, b.width, b.frames) == ((1, 4, 6), 56, 84, 1)
    assert (b.embed_spans, b.placeholder_token_id) == (((0, 6),), PAD)
    for record in (one, two, three):
        assert "media" in record.required_features
        authenticate(record.media, record.media_digest)


@pytest.mark.requirement("XM4")
def test_the_same_image_twice_is_stored_once(episode):
    _, record = episode.chat([user(image(3), text("and"), image(3))], script(episode, "Same"))
    first, second = record.media
    assert first.blob == second.blob
    assert first.offset != second.offset
    check_spans(episode, [record])
    assert sorted(stored(episode, record)) == [
        "logprobs",
        f"media.{first.blob}.image_grid_thw",
        f"media.{first.blob}.pixel_values",
        "tokens",
    ]


@pytest.mark.requirement("B2", "C3")
def test_stored_pixels_are_the_processors_own_and_can_be_normalised(episode):
    import io

    from PIL import Image
    from transformers import AutoImageProcessor

    from tests.support.vision import png, vision_dir

    _, record = episode.chat([user(image(4, 84, 56), text("?"))], script(episode, "Pixels"))
    (occurrence,) = record.media
    tensors = occurrence_tensors(occurrence, stored(episode, record))
    assert tensors["pixel_values"].dtype == np.uint8
    assert tensors["image_grid_thw"].tolist() == list(occurrence.grid)
    raw, norm = tensors["pixel_values"], occurrence.normalization
    assert norm is not None
    channels = raw.reshape(len(raw), 3, -1).astype(np.float32)
    std, mean = (np.array(values, np.float32)[None, :, None] for values in (norm.std, norm.mean))
    ours = (channels * (norm.rescale_factor / std) - mean / std).reshape(raw.shape)
    reference = AutoImageProcessor.from_pretrained(vision_dir())(
        images=[Image.open(io.BytesIO(png(4, 84, 56)))], return_tensors="np"
    )
    assert np.allclose(ours, reference["pixel_values"], atol=1e-5)
