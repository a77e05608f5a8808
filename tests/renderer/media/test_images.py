"""Images through the real engine: what it saw is what is stored, whatever is sent again."""

import io
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from forest_schema import CallRecord
from forest_schema.media import MediaOccurrence, authenticate, occurrence_tensors
from PIL import Image
from vllm_forest_renderer.media.cache import MediaCache

from tests.support.engine import worker_prompts
from tests.support.episodes import END, Episode
from tests.support.vision import data_url, image, png, text, vision_dir

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


@pytest.mark.smoke
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


@pytest.mark.requirement("XM4", "B14")
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


def normalised(occurrence: MediaOccurrence, pixels: Any) -> Any:
    """What the vision tower is given, by the recorded normalisation."""
    norm = occurrence.normalization
    assert norm is not None
    channels = pixels.reshape(len(pixels), 3, -1).astype(np.float32)
    std, mean = (np.array(values, np.float32)[None, :, None] for values in (norm.std, norm.mean))
    return (channels * (norm.rescale_factor / std) - mean / std).reshape(pixels.shape)


@pytest.mark.requirement("B2", "C3")
def test_stored_pixels_are_the_processors_own_and_can_be_normalised(episode):
    from transformers import AutoImageProcessor

    _, record = episode.chat([user(image(4, 84, 56), text("?"))], script(episode, "Pixels"))
    (occurrence,) = record.media
    tensors = occurrence_tensors(occurrence, stored(episode, record))
    assert tensors["pixel_values"].dtype == np.uint8
    assert tensors["image_grid_thw"].tolist() == list(occurrence.grid)
    reference = AutoImageProcessor.from_pretrained(vision_dir())(
        images=[Image.open(io.BytesIO(png(4, 84, 56)))], return_tensors="np"
    )
    ours = normalised(occurrence, tensors["pixel_values"])
    assert np.allclose(ours, reference["pixel_values"], atol=1e-5)


@pytest.mark.smoke
@pytest.mark.requirement("B2", "B6", "A20")
def test_the_stored_tokens_and_pixels_give_the_engines_log_probabilities(episode):
    """An independent forward pass over the deltas alone: every image at its place, the positions
    of a spliced prompt included.
    """
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    first = user(text("Look:"), image(5))
    answer, one = episode.chat([first], script(episode, "A very noisy square"))
    second = user(image(6, 84, 112), text("and this,"), image(5))
    _, two = episode.chat([first, answer, second], max_tokens=6)
    assert two.parent_call_id == one.call_id
    tokens, logprobs = episode.history(two), episode.delta(two)[1]
    parts = [
        (occurrence, occurrence_tensors(occurrence, stored(episode, record)))
        for record in (one, two)
        for occurrence in record.media
    ]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(vision_dir()).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == PAD).int(),
            pixel_values=torch.cat(
                [torch.from_numpy(normalised(o, t["pixel_values"])) for o, t in parts]
            ),
            image_grid_thw=torch.from_numpy(np.stack([t["image_grid_thw"] for _, t in parts])),
        ).logits[0]
    span = range(two.prompt_len, two.cum_len)
    expected = logits.log_softmax(-1)[[at - 1 for at in span], [tokens[at] for at in span]]
    assert np.allclose(expected, logprobs, atol=2e-4)


@pytest.mark.requirement("B6", "A20")
def test_a_spliced_prompt_gives_the_same_from_cache_and_from_nothing(episode):
    first = user(image(7), text("Long enough to fill a block of the cache. " * 4))
    answer, _ = episode.chat([first], script(episode, "Seen"))
    messages = [first, answer, user(text("Again"), image(8))]
    _, cached = episode.chat(messages, temperature=0.0)
    _, fresh = episode.chat(messages, temperature=0.0, extra_body={"cache_salt": "other"})
    assert cached.cached_prompt_tokens
    assert not fresh.cached_prompt_tokens
    assert episode.delta(cached) == episode.delta(fresh)
    assert cached.media == fresh.media


@pytest.mark.requirement("B6")
def test_generated_placeholder_tokens_do_not_move_an_image(episode):
    first = user(text("Look"), image(1))
    generated = [*episode.ids("I see"), START, PAD, PAD, *episode.ids("something"), PAD]
    answer, one = episode.chat([first], [*generated, *episode.ids(END)])
    _, two = episode.chat([first, answer, user(image(2), text("And?"))], script(episode, "Yes"))
    assert two.parent_call_id == one.call_id
    (a,), (b,) = one.media, two.media
    assert episode.served[a.offset : a.end] == [PAD] * 4
    assert episode.served[b.offset - 1 : b.end] == [START] + [PAD] * 4
    assert episode.served.count(PAD) == 11
    assert a.end < two.prev_len < b.offset


@pytest.mark.requirement("B3", "A20")
def test_an_image_joins_a_conversation_that_had_none(episode):
    first = {"role": "user", "content": "Hello"}
    answer, one = episode.chat([first], script(episode, "Hi"))
    _, two = episode.chat([first, answer, user(image(1))], script(episode, "Noise"))
    assert (two.parent_call_id, one.media, len(two.media)) == (one.call_id, (), 1)
    check_spans(episode, [one, two])


@pytest.mark.requirement("A27", "B3")
def test_images_through_responses(episode):
    first = {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "Look:"},
            {"type": "input_image", "image_url": data_url(1), "detail": "auto"},
        ],
    }

    def call(source: list[Any], words: str) -> Any:
        forced = script(episode, words)
        seen = len(worker_prompts(episode.prompts_file))
        answer = episode.client.responses.create(
            model="tiny", input=source, max_output_tokens=len(forced),
            extra_body={"vllm_xargs": {"force": forced}},
        )  # fmt: skip
        episode.served = worker_prompts(episode.prompts_file, seen)[0]
        return answer, episode.record(answer.id)

    answer, one = call([first], "Noise")
    more = {"type": "input_image", "image_url": data_url(2, 84), "detail": "auto"}
    second = {"role": "user", "content": [more]}
    _, two = call([first, *(item.to_dict() for item in answer.output), second], "More noise")
    assert two.parent_call_id == one.call_id
    check_spans(episode, [one, two])


@pytest.mark.requirement("A31", "B3")
def test_a_tool_result_may_hold_an_image(episode):
    first = {"role": "user", "content": "Take a picture."}
    _, one = episode.chat([first], script(episode, "Taking it"))
    call = {"id": "call_1", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "Taking it", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [image(1), text("done")]}
    answer, two = episode.chat([first, turn, result], script(episode, "Noise"))
    # That turn was not generated here: a root, and the next call continues it.
    assert two.root_reason == "no_match"
    _, three = episode.chat([first, turn, result, answer, user(text("?"))], script(episode, "Yes"))
    assert (three.parent_call_id, three.media) == (two.call_id, ())
    check_spans(episode, [two, three])
    assert one.media == ()


def test_an_image_in_a_function_output_of_responses(episode):
    call = {"type": "function_call", "call_id": "call_1", "name": "shoot", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": data_url(1)}]
    source = [
        {"role": "user", "content": "Take a picture."},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": output},
    ]
    forced = script(episode, "Noise")
    answer = episode.client.responses.create(
        model="tiny", input=source, max_output_tokens=len(forced),
        extra_body={"vllm_xargs": {"force": forced}},
    )  # fmt: skip
    record = episode.record(answer.id)
    assert len(record.media) == 1


@pytest.mark.requirement("X18", "D1", "D4")
def test_measure_counts_images_as_the_engine_does(episode):
    first = user(image(1), text("Look"), image(2, 140, 56))
    answer, one = episode.chat([first], script(episode, "Noise"))
    more = user(image(3, 56, 112))
    for messages in ([first], [first, answer, more], [first, more]):
        body = {"model": "tiny", "messages": messages}
        measured = httpx.post(f"{episode.client.base_url}measure", json=body, timeout=60).json()
        _, record = episode.chat(messages, script(episode, "x"))
        assert measured["count"] == record.prompt_len == len(episode.served)
        assert measured["continuation"] == (record.parent_call_id is not None)
    assert one.prompt_len


@pytest.mark.requirement("B7")
def test_a_parent_that_is_cold_is_compared_with_its_stored_pixels(episode, monkeypatch):
    first = user(image(9, 84, 84), text("Look"))
    answer, one = episode.chat([first], script(episode, "Noise"))
    service = episode.server.app.state.forest.service
    cold = MediaCache(service._sink, capacity_bytes=0)
    monkeypatch.setattr(service, "_media", cold)
    _, two = episode.chat([first, answer, user(text("?"))], script(episode, "Yes"))
    assert (two.parent_call_id, two.media) == (one.call_id, ())
