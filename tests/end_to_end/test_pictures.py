"""The parts of the example with images."""

import base64
import io
import itertools

import numpy as np
from pictures.task import COLOURS, NOISE, contexts, paint, tasks, truth
from PIL import Image


def pictures_of(messages):
    """The pictures that a request shows."""
    parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_the_same_seed_gives_the_same_tasks():
    some, again, other = (list(itertools.islice(tasks(seed), 20)) for seed in (1, 1, 2))
    assert some == again
    assert some != other


def test_the_third_call_is_a_rewrite_with_the_second_picture_only():
    task = next(tasks(3))
    sizes = [(picture["width"], picture["height"]) for picture in task["pictures"]]
    shown = [
        [image.size for image in pictures_of(contexts(task, truth(task)[:turn]))]
        for turn in range(3)
    ]
    assert shown == [sizes[:1], sizes, sizes[1:]]
    assert sizes[0] != sizes[1]
    assert contexts(task, ["red"])[:1] == contexts(task, [])
    assert len(contexts(task, ["red", "blue"])) == 1


def test_pictures_show_their_colour_and_need_no_resizing():
    for task in itertools.islice(tasks(4), 20):
        for picture in task["pictures"]:
            image = paint(picture)
            assert (image.width % 28, image.height % 28) == (0, 0)
            colour = np.asarray(COLOURS[picture["colour"]])
            assert np.abs(np.asarray(image).astype(int) - colour).max() <= NOISE
