"""The policy loss against a numpy oracle written from docs/formulas.md, one token at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.config.schema import LossConfig
from megatron_forest_trainer.loss.correction import importance_weights
from megatron_forest_trainer.loss.edges import Edges, concatenate, placeholder
from megatron_forest_trainer.loss.policy import policy_loss

finite = st.floats(-8, 0, width=32)
logprob = st.one_of(finite, finite, finite, st.just(-math.inf))


def make_edges(previous, advantage, *, weight=None, reference=None, correction=None) -> Edges:
    count = len(previous)
    return Edges(
        source_E=np.arange(count),
        target_E=np.arange(count),
        weight_E=np.asarray(weight if weight is not None else np.ones(count), np.float32),
        advantage_E=np.asarray(advantage, np.float32),
        temperature_E=np.ones(count, np.float32),
        top_p_E=np.ones(count, np.float32),
        top_k_E=np.zeros(count, np.int64),
        previous_E=np.asarray(previous, np.float32),
        reference_E=np.asarray(reference if reference is not None else np.zeros(count), np.float32),
        correction_E=np.asarray(
            correction if correction is not None else np.ones(count), np.float32
        ),
        row_E=np.zeros(count, np.int64),
        index_E=np.arange(count),
    )


def token_loss(lp, previous, advantage, correction, reference, config: LossConfig) -> float:
    """One token by the formulas; 0 for a token that either side excludes."""
    if not (math.isfinite(lp) and math.isfinite(previous)):
        return 0.0
    rho = math.exp(lp - previous)
    clipped = min(max(rho, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
    loss = max(-advantage * rho, -advantage * clipped)
    if config.ratio_clip_c is not None and advantage < 0:
        loss = min(loss, -advantage * config.ratio_clip_c)
    loss *= correction
    if config.reference_policy_kl_penalty:
        d = reference - lp
        inner = min(max(d, -20), 20)
        kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(inner) - 1 - inner}
        value = kl[config.reference_policy_kl_type]
        loss += config.reference_policy_kl_penalty * min(max(value, -10), 10)
    return loss


token = st.tuples(
    logprob,
    logprob,
    st.floats(-3, 3, width=32),
    st.floats(0, 2, width=32),
    finite,
    st.sampled_from([0.0, 1.0]),
)


@pytest.mark.requirement("G15", "XL12")
@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(token, min_size=1, max_size=12),
    clip=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    dual=st.one_of(st.none(), st.floats(1.1, 5)),
    kl=st.sampled_from([(0.0, "k3"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3")]),
)
def test_loss_is_the_sum_of_the_tokens(tokens, clip, dual, kl):
    config = LossConfig(
        ratio_clip_min=clip[0],
        ratio_clip_max=clip[1],
        ratio_clip_c=dual,
        reference_policy_kl_penalty=kl[0],
        reference_policy_kl_type=kl[1],
    )
    lp, previous, advantage, correction, reference, weight = (
        np.asarray(column, np.float32) for column in zip(*tokens, strict=True)
    )
    edges = make_edges(
        previous, advantage, weight=weight, reference=reference, correction=correction
    )
    logprobs = torch.from_numpy(lp).requires_grad_()
    result = policy_loss(logprobs, torch.zeros(len(lp)), edges.tensors("cpu"), config)
    expected = [
        w * token_loss(float(p), float(q), float(a), float(c), float(r), config)
        for p, q, a, c, r, w in zip(
            lp, previous, advantage, correction, reference, weight, strict=True
        )
    ]
    assert result.loss.item() == pytest.approx(math.fsum(expected), rel=1e-4, abs=1e-4)
    assert result.tokens.item() == np.count_nonzero(weight)
    assert result.tokens.dtype == torch.int32
    result.loss.backward()
    assert torch.isfinite(logprobs.grad).all()
    excluded = ~(np.isfinite(lp) & np.isfinite(previous))
    assert np.all(logprobs.grad.numpy()[excluded | (weight == 0)] == 0)
    assert result.sums["excluded"].item() == np.count_nonzero(excluded & (weight != 0))


@pytest.mark.requirement("G15")
def test_gradient_of_a_clipped_token_is_zero_and_of_a_free_one_is_the_ratio():
    config = LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.3)
    log_ratio = torch.tensor([0.5, 0.1, -0.5, -0.1, 0.5, -0.5]).requires_grad_()
    advantage = [1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    edges = make_edges(np.zeros(6), advantage)
    policy_loss(log_ratio, torch.zeros(6), edges.tensors("cpu"), config).loss.backward()
    free = [0, 1, 0, 1, 1, 1]
    expected = [
        -a * math.exp(x) * f for a, x, f in zip(advantage, log_ratio.tolist(), free, strict=True)
    ]
    assert log_ratio.grad.tolist() == pytest.approx(expected)


@pytest.mark.requirement("G15", "H4")
def test_sums_do_not_depend_on_the_split_into_microbatches():
    generator = np.random.default_rng(0)
    config = LossConfig(reference_policy_kl_penalty=0.1)
    edges = make_edges(
        generator.normal(-2, 1, 40),
        generator.normal(0, 1, 40),
        reference=generator.normal(-2, 1, 40),
    )
    logprobs = torch.from_numpy(generator.normal(-2, 1, 40)).float()
    whole = policy_loss(logprobs, torch.ones(40), edges.tensors("cpu"), config)
    parts = []
    for index in np.split(np.arange(40), [3, 3, 17, 40]):
        part = concatenate([edges.take(index)])
        values = logprobs[index] if len(index) else torch.zeros(1)
        parts.append(policy_loss(values, torch.ones(len(part)), part.tensors("cpu"), config))
    assert sum(part.tokens.item() for part in parts) == whole.tokens.item() == 40
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-6)
    for name, value in whole.sums.items():
        total = sum(part.sums[name].item() for part in parts)
        assert total == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


@pytest.mark.requirement("H4")
def test_placeholder_edge_contributes_nothing():
    logprobs = torch.tensor([-math.inf]).requires_grad_()
    result = policy_loss(
        logprobs, torch.zeros(1), placeholder().tensors("cpu"), LossConfig(ratio_clip_c=3.0)
    )
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.tokens.item() == 0
    assert all(value.item() == 0 for value in result.sums.values())
    assert logprobs.grad.tolist() == [0]


def correction(previous, generated, **settings):
    config = LossConfig(use_importance_sampling_correction=True, **settings)
    return importance_weights(
        np.asarray(previous, np.float32), np.asarray(generated, np.float32), config
    ).tolist()


@pytest.mark.requirement("G15")
def test_importance_correction_and_its_truncations():
    previous = [-1.0, -1.0, -1.0, -math.inf, -1.0]
    generated = [-1.0, -2.0, 0.0, -1.0, -math.inf]
    up, down = math.e, 1 / math.e
    limits = {"truncated_importance_sampling_ratio": 2.0}
    assert correction(previous, generated) == pytest.approx([1, up, down, 0, 0])
    assert correction(previous, generated, **limits) == pytest.approx([1, 2, down, 0, 0])
    both = limits | {"truncated_importance_sampling_ratio_min": 0.5}
    assert correction(previous, generated, **both) == pytest.approx([1, 2, 0.5, 0.5, 0.5])
    icepop = both | {"truncated_importance_sampling_type": "icepop"}
    assert correction(previous, generated, **icepop) == pytest.approx([1, 0, 0, 0, 0])
    sequence = both | {"truncated_importance_sampling_type": "seq-mask-tis"}
    # Mean log-ratio of the finite tokens is 0: the row stays, with its plain weights.
    assert correction(previous, generated, **sequence) == pytest.approx([1, up, down, 0, 0])
    assert correction([-1.0, -1.0], [-3.0, -1.5], **sequence) == [0, 0]
    assert importance_weights(
        np.zeros(2, np.float32), np.ones(2, np.float32), LossConfig()
    ).tolist() == [1, 1]
