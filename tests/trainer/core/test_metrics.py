import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.core.metrics import TokenErrors, error_metrics, pool, token_errors

LOGPROBS = st.floats(-20, 0)


def test_golden_divergences() -> None:
    errors = token_errors([-5.0], [-15.0], [True])
    assert errors.gen_kl == pytest.approx(9.00005, abs=1e-5)
    assert errors.policy_kl == pytest.approx(22015.47, abs=1e-2)
    assert errors.js == pytest.approx(4.307, abs=1e-3)


@pytest.mark.parametrize(("error", "expected"), [(0.1, 1.04674), (0.5, 1.28832), (1.0, 1.76368)])
def test_golden_multiplicative_errors(error: float, expected: float) -> None:
    """Four of nine owned tokens are off by `error`, in eight equal rows."""
    gen = np.full(9, -1.0)
    prev = gen + np.array([error, -error, error, -error, 0, 0, 0, 0, 0])
    rows = [token_errors(gen, prev, np.ones(9, bool)) for _ in range(8)]
    metrics = error_metrics(rows)
    assert metrics["token_mult_prob_error"] == pytest.approx(expected, abs=1e-5)
    assert metrics["seq_logprob_error/max"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.requirement("XL10", "G11")
def test_rows_without_owned_tokens_are_left_out_of_min_mean_and_max() -> None:
    rows = [TokenErrors(tokens=3, mult=6.0), TokenErrors(tokens=1, mult=4.0)]
    rows += [TokenErrors()] * 14
    metrics = error_metrics(rows)
    assert metrics["seq_logprob_error/min"] == 2.0
    assert metrics["seq_logprob_error/mean"] == 3.0
    assert metrics["seq_logprob_error/max"] == 4.0
    assert metrics["token_mult_prob_error"] == 2.5


@pytest.mark.requirement("XL12", "G9")
def test_filtered_tokens_are_excluded() -> None:
    gen, prev = [-1.0, -np.inf, -2.0], [-1.0, -3.0, -np.inf]
    errors = token_errors(gen, prev, [True, True, True])
    assert errors == TokenErrors(tokens=1, mult=1.0, gen_kl=0.0, policy_kl=0.0, js=0.0, ratio=1.0)


@pytest.mark.requirement("G6", "G9")
@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), max_size=12), st.data())
def test_pooling_does_not_depend_on_the_segmentation(
    tokens: list[tuple[float, float, bool]], data: st.DataObject
) -> None:
    gen, prev, mask = (
        (list(column) for column in zip(*tokens, strict=True)) if tokens else ([], [], [])
    )
    whole = token_errors(gen, prev, mask)
    cut = data.draw(st.integers(0, len(tokens)))
    parts = pool(token_errors(gen[s], prev[s], mask[s]) for s in (slice(cut), slice(cut, None)))
    assert parts.tokens == whole.tokens
    for name in ("mult", "gen_kl", "policy_kl", "js", "ratio"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    expected = sum(math.exp(abs(g - p)) for g, p, m in tokens if m)
    assert whole.mult == pytest.approx(expected)
    assert min(whole.gen_kl, whole.policy_kl, whole.js) >= -1e-12


@pytest.mark.requirement("H4", "XL3")
def test_rows_of_padding_change_no_metric() -> None:
    rows = [token_errors([-1.0, -2.0], [-1.5, -2.0], [True, True])]
    assert error_metrics([*rows, *[TokenErrors()] * 7]) == error_metrics(rows)
    assert error_metrics([TokenErrors()]) == {}
