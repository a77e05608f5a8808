"""Images in the forest in one pass: a shared image is seen once, another image is never shared."""

from dataclasses import replace

import numpy as np
import pytest
from megatron_forest_trainer.core.plan import ForestShape
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.data.collate import RowInput
from megatron_forest_trainer.model.hf_config import read_model_shape

from tests.support.distributed import run_ranks
from tests.trainer.media.support import ImageRollout, picture, rollouts, vision_oracle
from tests.trainer.megatron.support import assert_gradients_close, make_config, make_step, run_step

CFG = "policy__megatron_cfg__"
TREES = {"policy__forest_execution__enabled": True}
ADVANTAGES = {"x": 1.0, "y": -0.5, "z": 0.25, "same": -0.75, "other": 0.5, "text": 1.5}
SHIFT = 0.1


def sharing():
    """Besides all others, rollouts with the same image, another one, and none at its place."""
    prompts = {
        "same": [7, 8, picture(1, 4, 6), 9],
        "other": [7, 8, picture(5, 4, 6), 9],
        "text": [7, 8, 9],
    }
    made = rollouts()
    for number, (name, prompt) in enumerate(prompts.items()):
        rollout = ImageRollout(name)
        # The oracle knows a context by its tokens: they differ where the images do.
        rollout.see("a", None, prompt, [10 + 10 * number, 11])
        rollout.see("b", "a", [12], [13, 14])
        rollout.see("c", "a", [15], [16, 17])
        made.append(rollout)
    again = ImageRollout("x2")
    again.see("a", None, prompts["same"], [10, 11, 12])
    return [*made, again]


@pytest.fixture(scope="module")
def oracle(sees):
    return vision_oracle(sees, sharing(), ADVANTAGES | {"x2": 0.1}, previous_shift=SHIFT)


LAYOUTS = {
    "one": (1, 1, {f"{CFG}activation_checkpointing": True}),
    "data": (2, 2, {}),
    "sequence": (2, 1, {f"{CFG}tensor_model_parallel_size": 2, f"{CFG}sequence_parallel": True}),
    "pipeline": (2, 1, {f"{CFG}pipeline_model_parallel_size": 2}),
    "context": (2, 1, {f"{CFG}context_parallel_size": 2}),
}
"""Name -> (ranks, data-parallel ranks, configuration)."""


@pytest.mark.requirement("B2", "B15", "H5")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_matches_the_per_call_oracle(sees, oracle, layout):
    ranks, data_parallel, overrides = LAYOUTS[layout]
    shape = ForestShape(data_parallel=data_parallel, max_tokens=80, across_rollouts=True)
    step = make_step(sharing(), ADVANTAGES | {"x2": 0.1}, shape)
    results = run_ranks(run_step, make_config(**TREES, **overrides), sees, step, SHIFT, ranks=ranks)
    gradients, logprobs = {}, {}
    for result in results:
        assert result["stats"] == results[0]["stats"]
        gradients |= result["gradients"]
        logprobs |= result["previous"]
    assert results[0]["stats"]["loss"] == pytest.approx(oracle.loss, abs=1e-5)
    assert_gradients_close(gradients, oracle.gradients, 1e-5)
    for row in step.decoded.rows:
        own = [
            oracle.logprobs[row.plan.rollout_id, span.call_id]
            for span in row.plan.spans
            if span.owned
        ]
        assert np.abs(logprobs[row.row_id] - np.concatenate(own)).max() < 1e-5


def collated(hf_dir, names, routes=None):
    """(planned tokens, tokens, images, embeddings) of the rollouts `names` in one trie.

    `routes` are the experts of each row's tokens.
    """
    from megatron_forest_trainer.data.tree import TreeCollator

    made = [rollout for rollout in sharing() if rollout.rollout_id in names]
    shape = ForestShape(data_parallel=1, max_tokens=4096, across_rollouts=True)
    step = make_step(made, ADVANTAGES | {"x2": 0.1}, shape)
    rows = [RowInput(assemble(row.plan, step.reader)) for row in step.decoded.rows]
    if routes is not None:
        rows = [
            RowInput(replace(item.row, routes_TLK=np.resize(own, (item.length, 1, 1))))
            for item, own in zip(rows, routes, strict=True)
        ]
    collate = TreeCollator(
        across_rollouts=True,
        vision=read_model_shape(hf_dir).vision,
        routed=None if routes is None else (1, 1),
    )
    batch = collate(rows, training=False)
    media = batch.media
    return step.decoded.executed_tokens, batch.tokens.numel(), len(media.grids), len(media.target)


def test_an_image_is_seen_once_per_place_and_shared_by_equal_ones_only(sees):
    # Two tokens, vision start, six placeholders, vision end, one token; the last generated token of
    # the one rollout is the prompt of the other.
    (same,) = run_ranks(collated, sees, {"same", "x2"})
    assert same == (11 + 2 + 3 + 3, 11 + 2 + 3 + 3, 1, 6)
    (other,) = run_ranks(collated, sees, {"same", "other"})
    # They part at the first placeholder.
    assert other == (3 + 2 * (8 + 2 + 6), 3 + 2 * (8 + 2 + 6), 2, 12)


def test_rows_that_part_inside_an_image_have_all_of_its_embeddings(sees):
    """Another expert saw the third placeholder: one image, and four of six embeddings twice."""
    same = np.zeros(32, np.int32)
    other = same.copy()
    other[5] = 1
    (found,) = run_ranks(collated, sees, {"x2", "same"}, [same, same, other])
    assert found[2:] == (1, 6 + 4)
