"""Positions of a row's tokens for rotary embeddings in three axes (Qwen2.5-VL).

Guarantees: pure; equal to what the model's own `get_rope_index` gives for images.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rope_positions(
    length: int, images: Sequence[tuple[int, tuple[int, int, int]]], merge_size: int
) -> NDArray[np.int64]:
    """(time, height, width) position of each of `length` tokens, `[3, length]`.

    `images` are (position of the first placeholder, patches in time, height and width), in order;
    `merge_size` patches along each side are one token. Text counts on in all axes at once. An
    image's tokens start where the text before it stopped and take their place in the grid; the text
    behind it goes on behind the image's longer side.
    """
    positions_3T = np.empty((3, length), np.int64)
    done, position = 0, 0
    for offset, (time, rows, columns) in images:
        positions_3T[:, done:offset] = position + np.arange(offset - done)
        position += offset - done
        grid = (time, rows // merge_size, columns // merge_size)
        done = offset + grid[0] * grid[1] * grid[2]
        positions_3T[:, offset:done] = position + np.indices(grid).reshape(3, -1)
        position += max(grid)
    positions_3T[:, done:] = position + np.arange(length - done)
    return positions_3T
