"""Rows of routed experts: exactly those of the call's tokens, or a recorded failure."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forest_schema.records import CallRecord
from forest_schema.routes import ROUTES
from vllm_forest_renderer import compat
from vllm_forest_renderer.capture.generation import CaptureFailed, Generation
from vllm_forest_renderer.capture.record import build_delta
from vllm_forest_renderer.capture.routes import RouteShape, captured_routes, first_row
from vllm_forest_renderer.context import Call, Predecessor

from tests.support.forests import Forest

SHAPE = RouteShape(layers=2, top_k=2, experts=8)
PROMPT, GENERATED = 7, 3


def make_call(
    routes: Any, parent: CallRecord | None = None, *, finish_reason: str = "stop"
) -> Call:
    """A finished call of 7 prompt and 3 generated tokens."""
    call = Call(
        attempt_id="att_0", api="chat", model="tiny", history=None, calls=(), resolver=None,
        history_tokens=None, stored_media=None, admit=None, around_generation=None,
    )  # type: ignore[arg-type]  # fmt: skip
    call.prompt_tokens = list(range(PROMPT))
    call.tail_tokens = call.prompt_tokens[parent.cum_len if parent else 0 :]
    call.predecessor = Predecessor(parent, False) if parent else None
    call.generation = Generation(
        tokens=[5] * GENERATED, logprobs=[-1.0] * GENERATED, routes=routes,
        finish_reason=finish_reason, finished=True,
    )  # fmt: skip
    return call


def rows(count: int, shape: RouteShape = SHAPE, dtype: Any = np.uint8) -> Any:
    values = np.arange(count)[:, None, None] + np.zeros((1, shape.layers, shape.top_k))
    return (values % shape.experts).astype(dtype)


@pytest.mark.requirement("C3", "F11", "XR1")
def test_a_continuation_starts_at_its_parents_last_token() -> None:
    parent = Forest().call(prompt=3, generated=2)
    root, child = make_call(rows(9)), make_call(rows(5), parent)
    assert (first_row(root), first_row(child)) == (0, 4)
    for call, first, count in ((root, 0, 9), (child, 4, 5)):
        captured = captured_routes(call, SHAPE)
        assert captured is not None
        info, found = captured
        assert (info.first, info.rows, info.has_last) == (first, count, False)
        assert info.end == PROMPT + GENERATED - 1  # the last token was never taken in
        assert build_delta(call, found)[ROUTES] is found


@pytest.mark.requirement("C3")
@pytest.mark.parametrize(
    ("experts", "dtype"), [(256, np.uint8), (257, np.uint16), (300, np.uint16)]
)
def test_the_stored_type_follows_the_number_of_experts(experts: int, dtype: Any) -> None:
    shape = RouteShape(layers=2, top_k=2, experts=experts)
    captured = captured_routes(make_call(rows(9, shape, np.int32)), shape)
    assert captured is not None
    assert captured[1].dtype == dtype


@pytest.mark.requirement("XR2")
@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, r"are none where the call's tokens need \[9, 2, 2\]"),
        (rows(8), r"are \[8, 2, 2\]"),
        (rows(10), r"are \[10, 2, 2\]"),
        (rows(9)[:, :1], r"are \[9, 1, 2\]"),
        (rows(9)[..., :1], r"are \[9, 2, 1\]"),
        (rows(9).reshape(9, 4), r"are \[9, 4\]"),
        (np.full((9, 2, 2), 8, np.uint8), "experts 8 to 8 of 8"),
        (np.full((9, 2, 2), -1, np.int32), "experts -1 to -1 of 8"),
    ],
    ids=["absent", "short", "long", "layers", "top_k", "flat", "unknown", "negative"],
)
def test_rows_that_do_not_fit_fail_the_capture(routes: Any, message: str) -> None:
    with pytest.raises(CaptureFailed, match=message) as caught:
        captured_routes(make_call(routes), SHAPE)
    assert caught.value.reason == "invalid_routes"


@pytest.mark.requirement("XR2")
def test_an_aborted_generation_is_captured_without_routes() -> None:
    assert captured_routes(make_call(rows(4), finish_reason="abort"), SHAPE) is None


@pytest.mark.requirement("C3")
def test_routes_are_taken_out_of_the_answer() -> None:
    completion = SimpleNamespace(
        token_ids=[], logprobs=None, finish_reason="stop", stop_reason=None, routed_experts=rows(9)
    )
    generation = Generation()
    generation.add(
        SimpleNamespace(
            prompt_token_ids=None, num_cached_tokens=None, outputs=[completion], finished=True
        )
    )
    assert generation.routes is not None
    assert completion.routed_experts is None


@pytest.mark.requirement("K13")
@pytest.mark.parametrize("place", ["model_config", "aux_output_config"])
def test_the_flag_is_found_where_each_vllm_keeps_it(place: str) -> None:
    model_config = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 3,
        get_num_experts_per_tok=lambda: 2,
        get_num_experts=lambda: 8,
    )
    config = SimpleNamespace(model_config=model_config)
    if place == "aux_output_config":
        config.aux_output_config = SimpleNamespace(enable_return_routed_experts=False)
    assert compat.route_shape(config) is None
    getattr(config, place).enable_return_routed_experts = True
    assert compat.route_shape(config) == (3, 2, 8)
