"""The task of the image example: name the colour of the newest picture.

Guarantees: a task is plain data made from a seed, the pictures' pixels included; the same seed
gives the same tasks. An episode has three calls: the first picture; a second picture of another
size, beside the first one; then a rewritten context that keeps the second picture only. The reward
is the share of right answers.
"""

import base64
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {
    "red": (205, 45, 45),
    "green": (45, 170, 60),
    "blue": (50, 70, 200),
    "gray": (128, 128, 128),
}
NOISE = 40
"""Every channel of every pixel is this far, at most, from its colour."""
SIZES = ((56, 56), (84, 56), (56, 84))
"""Width and height in pixels; multiples of 28, so that the processor resizes nothing."""
QUESTION = "colour?"
AGAIN = "again?"


def make_task(rng: random.Random) -> dict[str, Any]:
    """One task: two pictures of different sizes."""
    sizes = rng.sample(SIZES, 2)
    return {
        "pictures": [
            {
                "colour": rng.choice(list(COLOURS)),
                "width": width,
                "height": height,
                "seed": rng.randrange(2**32),
            }
            for width, height in sizes
        ]
    }


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Endless tasks of one seed."""
    rng = random.Random(seed)
    while True:
        yield make_task(rng)


def paint(picture: dict[str, Any]) -> Image.Image:
    """The picture: noise around its colour."""
    shape = (picture["height"], picture["width"], 3)
    noise = np.random.default_rng(picture["seed"]).integers(-NOISE, NOISE + 1, shape)
    pixels = np.clip(np.asarray(COLOURS[picture["colour"]]) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def ask(question: str, picture: dict[str, Any]) -> dict[str, Any]:
    """A user's message with a picture."""
    buffer = io.BytesIO()
    paint(picture).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ],
    }


def contexts(task: dict[str, Any], answers: list[str]) -> list[dict[str, Any]]:
    """Messages of the call after `answers`: a continuation, and from the third on a rewrite."""
    first, second = task["pictures"]
    if len(answers) == 2:
        return [ask(AGAIN, second)]
    history = [ask(QUESTION, first)]
    for answer in answers:
        history += [{"role": "assistant", "content": answer}, ask(QUESTION, second)]
    return history


def truth(task: dict[str, Any]) -> list[str]:
    """The right answers."""
    first, second = (picture["colour"] for picture in task["pictures"])
    return [first, second, second]


async def look(
    client: Any, task: dict[str, Any], *, model: str, sampling: dict[str, Any], options: Any
) -> dict[str, Any]:
    """The harness: three calls over stock Chat Completions."""
    responses: list[dict[str, Any]] = []
    answers: list[str] = []
    for number in range(len(truth(task))):
        response = await client.chat.completions.create(
            model=model,
            messages=contexts(task, answers),
            **{**sampling, "seed": sampling["seed"] + number},
        )
        responses.append(response.model_dump())
        answers.append(response.choices[0].message.content or "")
    right = sum(said.strip() == true for said, true in zip(answers, truth(task), strict=True))
    return {"responses": responses, "reward": right / len(answers)}
