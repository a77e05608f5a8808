"""What cannot be served exactly is refused before inference and leaves nothing behind."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from forest_schema import Reason
from PIL import Image
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.family import media_family

from tests.support.engine import worker_prompts
from tests.support.episodes import END, Episode
from tests.support.vision import image, png, text
from tests.support.web import ImageServer


def script(episode: Episode, words: str = "Noise") -> list[int]:
    return [*episode.spell(words), *episode.ids(END)]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture
def web() -> Iterator[ImageServer]:
    with ImageServer() as running:
        yield running


def refused(episode: Episode, messages: list[Any]) -> tuple[str, str]:
    """Reason and message of a refusal that left nothing: no record, no failure, no inference."""
    before = episode.server.receipt(episode.attempt)
    seen = len(worker_prompts(episode.prompts_file))
    with pytest.raises(openai.APIStatusError) as caught:
        episode.chat(messages, script(episode))
    assert caught.value.status_code == 400
    assert caught.value.response.headers["x-should-retry"] == "false"
    after = episode.server.receipt(episode.attempt)
    assert (after.calls, after.failures, after.pending) == (before.calls, (), ())
    assert len(worker_prompts(episode.prompts_file)) == seen
    body: Any = caught.value.body
    return body["type"], body["message"]


def measured(episode: Episode, messages: list[Any]) -> tuple[int, str]:
    """Status and reason of a measurement that is refused."""
    url = f"{episode.server.base_url(episode.attempt)}/measure"
    answer = httpx.post(url, json={"model": "tiny", "messages": messages}, timeout=60)
    return answer.status_code, answer.json()["error"]["type"]


@pytest.mark.requirement("XM6", "B7", "B8", "D5")
@pytest.mark.parametrize("by", ["url", "uuid"])
@pytest.mark.parametrize(
    ("changed", "differs"),
    [((1, 56, 56), None), ((2, 56, 56), "pixel_values"), ((1, 84, 56), "length")],
)
def test_another_content_under_one_name_is_refused(episode, web, by, changed, differs):
    web.content = png(1)

    def look() -> dict[str, Any]:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": web.url}}
        if by == "uuid":
            part["uuid"] = "photo-1"
        return user(text("Look"), part)

    answer, one = episode.chat([look()], script(episode))
    expected = "uuid:photo-1" if by == "uuid" else f"url:{web.url}"
    assert [o.identity for o in one.media] == [expected]
    web.content = png(*changed)
    messages = [look(), answer, user(text("Again"))]
    if differs is None:
        _, two = episode.chat(messages, script(episode))
        assert two.parent_call_id == one.call_id
        return
    reason, message = refused(episode, messages)
    assert measured(episode, messages) == (400, reason)
    assert reason == Reason.MEDIA_MISMATCH
    assert "image 1 of 1" in message
    assert differs in message
    # A rewrite takes the new content, and a continuation of that one too.
    answer, root = episode.chat([look()], script(episode, "Other"))
    assert root.parent_call_id is None
    assert root.media[0].blob != one.media[0].blob


@pytest.mark.requirement("XM6", "B9")
def test_a_data_url_with_other_bytes_is_another_image_so_a_root(episode):
    answer, one = episode.chat([user(image(1), text("Look"))], script(episode))
    _, two = episode.chat([user(image(2), text("Look")), answer, user(text("?"))], script(episode))
    assert (two.parent_call_id, two.root_reason) == (None, "no_match")
    assert one.media[0].blob != two.media[0].blob


@pytest.mark.requirement("XM6")
def test_a_uuid_does_not_make_vllm_serve_what_it_remembers(episode):
    def look(seed: int) -> dict[str, Any]:
        return user({**image(seed), "uuid": "photo-2"}, text("Look"))

    _, one = episode.chat([look(1)], script(episode))
    _, two = episode.chat([look(2)], script(episode))
    assert one.media[0].blob != two.media[0].blob
    assert one.media[0].identity != two.media[0].identity


@pytest.mark.requirement("XM5")
@pytest.mark.parametrize("continued", [False, True])
def test_literal_placeholder_text_is_refused_with_the_counts(episode, continued):
    history = []
    if continued:
        first = user(image(1), text("Look"))
        answer, _ = episode.chat([first], script(episode))
        history = [first, answer]
    reason, message = refused(episode, [*history, user(text("<|image_pad|> and"), image(2))])
    assert reason == Reason.MEDIA_MISMATCH
    assert "2 placeholders (<|image_pad|>) are rendered for 1 media parts" in message


@pytest.mark.requirement("XM5")
@pytest.mark.parametrize("continued", [False, True])
def test_literal_placeholder_text_is_refused_without_an_image_too(episode, continued):
    """The engine would read it as text; to a trainer it is an image without pixels."""
    history: list[Any] = []
    if continued:
        first = user(text("Look"))
        answer, _ = episode.chat([first], script(episode))
        history = [first, answer]
    messages = [*history, user(text("What does <|image_pad|> mean?"))]
    reason, message = refused(episode, messages)
    assert measured(episode, messages) == (400, reason)
    assert reason == Reason.MEDIA_MISMATCH
    assert "1 placeholders (<|image_pad|>) are rendered for 0 media parts" in message


@pytest.mark.requirement("XM8")
def test_video_is_refused_with_its_reason(episode):
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    reason, message = refused(episode, [user(video, text("Look"))])
    assert reason == Reason.UNSUPPORTED_ITEM
    assert "send its frames as images" in message


def bomb() -> str:
    """A small file of 400 million pixels."""
    buffer = io.BytesIO()
    Image.new("1", (20000, 20000)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


UNREADABLE = {
    "content": (lambda: "data:image/png;base64,AAAA", "cannot identify image"),
    "base64": (lambda: "data:image/png;base64,@@@@", "not base64"),
    "encoding": (lambda: "data:image/png,%89PNG", "must be data:<type>;base64,<data>"),
    "pixels": (bomb, "could be decompression bomb"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_image_that_does_not_decode_is_refused(episode, what):
    make, expected = UNREADABLE[what]
    reason, message = refused(episode, [user({"type": "image_url", "image_url": {"url": make()}})])
    assert reason == Reason.MALFORMED_REQUEST
    assert expected in message


def test_a_uuid_without_the_image_is_refused(episode):
    absent = {"type": "image_url", "image_url": None, "uuid": "photo-1"}
    reason, message = refused(episode, [user(absent)])
    assert reason == Reason.MALFORMED_REQUEST
    assert "image_url" in message


def test_more_images_than_the_context_holds_are_refused(episode):
    # 16 images of 64 tokens are 1024; the text fills the rest of 4096 tokens.
    images = [image(seed, 224, 224) for seed in range(16)]
    reason, _ = refused(episode, [user(*images, text("word " * 3100))])
    assert reason == Reason.MALFORMED_REQUEST


def test_a_processor_without_a_remapper_is_refused_by_name():
    class PixtralMultiModalProcessor:
        pass

    with pytest.raises(ForestError) as caught:
        media_family(PixtralMultiModalProcessor(), None)
    assert caught.value.reason is Reason.UNSUPPORTED_ITEM
    assert "PixtralMultiModalProcessor" in str(caught.value)
    assert "vllm_forest_renderer.media_remappers" in str(caught.value)


def test_a_template_that_leaves_an_image_out_is_refused(episode):
    family = episode.server.engine.renderer.forest_media()
    family.check_placeholders("<|vision_start|><|image_pad|><|vision_end|>", 1)
    with pytest.raises(ForestError, match="0 placeholders"):
        family.check_placeholders("nothing", 1)
