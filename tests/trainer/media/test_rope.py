"""Rotary positions are those of the transformers library."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.core.rope import rope_positions

PARTS = st.lists(
    st.one_of(st.integers(1, 9), st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6))),
    max_size=7,
)
"""Lengths of text, and grids in merged patches."""


@pytest.fixture(scope="module")
def get_rope_index():
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config={"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
                     "num_attention_heads": 1, "num_key_value_heads": 1},
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1, "spatial_merge_size": 2},
    )  # fmt: skip
    return transformers.Qwen2_5_VLModel(config).get_rope_index


@given(parts=PARTS, last=st.integers(1, 9))
@settings(deadline=None)
def test_positions_equal_the_models_own(get_rope_index, parts, last):
    import torch

    kinds: list[int] = []
    images = []
    for part in [*parts, last]:
        if isinstance(part, int):
            kinds += [0] * part
            continue
        # A vision start token stands before each image.
        kinds.append(0)
        time, rows, columns = part
        images.append((len(kinds), (time, 2 * rows, 2 * columns)))
        kinds += [1] * (time * rows * columns)
    expected, _ = get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor([grid for _, grid in images] or [[0, 0, 0]]),
    )
    found = rope_positions(len(kinds), images, 2)
    assert np.array_equal(found, expected[:, 0].numpy())
