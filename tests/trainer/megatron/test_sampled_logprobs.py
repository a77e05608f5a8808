"""Log-probabilities are those of the distribution that the engine sampled from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_forest_trainer.loss import vocab_parallel
from megatron_forest_trainer.loss.vocab_parallel import edge_logprobs

from tests.support.distributed import run_ranks

EDGES, VOCAB = 12, 37


def inputs(seed: int, vocab: int = VOCAB, *, distinct: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(EDGES, vocab, generator=generator)
    if not distinct:
        logits = logits.round()
    pick = torch.randint(0, 4, (EDGES,), generator=generator)
    return {
        "logits": logits,
        "target": torch.randint(0, vocab, (EDGES,), generator=generator),
        "temperature_E": torch.tensor([0.0, 0.6, 1.0, 1.7])[pick],
        "top_p_E": torch.tensor([1.0, 0.9, 0.5, 1.0])[pick.flip(0)],
        "top_k_E": torch.tensor([0, 5, 0, 60])[torch.roll(pick, 3)],
    }


def processed(logits, temperature, top_p, top_k) -> np.ndarray:
    """One row of the sampled distribution's log-probabilities, slowly and in float64."""
    z = np.asarray(logits, np.float64) / (temperature or 1.0)
    order = sorted(range(len(z)), key=lambda i: z[i])
    if top_k:
        smallest = z[order[-min(top_k, len(z))]]
        order = [i for i in order if z[i] >= smallest]
    p = np.exp(z[order] - z.max())
    p /= p.sum()
    below = np.cumsum(p)
    keep = [i for i, mass in zip(order[:-1], below[:-1], strict=True) if mass > 1 - top_p]
    keep.append(order[-1])
    result = np.full(len(z), -np.inf)
    result[keep] = z[keep] - z.max()
    result[keep] -= np.log(np.exp(result[keep]).sum())
    return result


def call(values, *, group=None, vocab=VOCAB):
    return edge_logprobs(
        values["logits"],
        values["target"],
        temperature_E=values["temperature_E"],
        top_p_E=values["top_p_E"],
        top_k_E=values["top_k_E"],
        vocab_size=vocab,
        group=group,
    )


@pytest.mark.requirement("XL12", "C22", "G9")
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_equals_the_sampled_distribution_written_out(seed):
    values = inputs(seed)
    logprob, entropy = call(values)
    for edge in range(EDGES):
        expected = processed(
            values["logits"][edge],
            float(values["temperature_E"][edge]),
            float(values["top_p_E"][edge]),
            int(values["top_k_E"][edge]),
        )
        assert logprob[edge].item() == pytest.approx(expected[values["target"][edge]], abs=1e-5)
        kept = expected[np.isfinite(expected)]
        assert entropy[edge].item() == pytest.approx(-(np.exp(kept) * kept).sum(), abs=1e-5)


@pytest.mark.requirement("XL12", "C22")
def test_keeps_the_tokens_that_vllm_keeps():
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    for seed in range(40):
        values = inputs(seed, distinct=seed % 2 == 0)
        scale = values["temperature_E"].clone()
        scale[scale == 0] = 1.0
        z = values["logits"] / scale[:, None]
        top_k = torch.where(values["top_k_E"] == 0, VOCAB, values["top_k_E"]).clamp(max=VOCAB)
        top_p = values["top_p_E"] if seed % 2 == 0 else torch.ones(EDGES)
        theirs = sampler.apply_top_k_top_p_pytorch(z.clone(), top_k, top_p, allow_cpu_sync=True)
        threshold = vocab_parallel.smallest_kept(z, top_p, values["top_k_E"])
        assert torch.equal(theirs.isfinite(), z >= threshold[:, None]), seed


@pytest.mark.requirement("XL12")
def test_excluded_targets_are_minus_infinity_without_gradient():
    values = inputs(0)
    values["top_k_E"][:] = 1
    values["target"] = torch.where(
        torch.arange(EDGES) % 2 == 0, values["logits"].argmax(1), values["logits"].argmin(1)
    )
    values["logits"].requires_grad_()
    logprob, entropy = call(values)
    assert logprob[::2].abs().max() == 0
    assert torch.all(logprob[1::2] == -torch.inf)
    assert entropy.abs().max() == 0
    logprob.sum().backward()
    assert torch.all(values["logits"].grad == 0)


@pytest.mark.requirement("XL12")
@pytest.mark.parametrize("chunk", [1 << 24, 3 * VOCAB])
def test_gradient_equals_autograd_through_a_dense_log_softmax(monkeypatch, chunk):
    monkeypatch.setattr(vocab_parallel, "_CHUNK_ELEMENTS", chunk)
    for seed in range(5):
        values, weight = inputs(seed), torch.randn(EDGES)
        ours = values["logits"].clone().requires_grad_()
        logprob, _ = call(values | {"logits": ours})
        usable = logprob.isfinite()
        (logprob[usable] * weight[usable]).sum().backward()

        dense = values["logits"].clone().requires_grad_()
        scale = torch.where(values["temperature_E"] == 0, 1.0, values["temperature_E"])
        z = dense / scale[:, None]
        threshold = vocab_parallel.smallest_kept(z.detach(), values["top_p_E"], values["top_k_E"])
        z = z.masked_fill(z < threshold[:, None], -torch.inf)
        expected = z.log_softmax(1).gather(1, values["target"][:, None])[:, 0]
        (expected[usable] * weight[usable]).sum().backward()
        assert torch.allclose(logprob[usable], expected[usable], atol=1e-6)
        assert torch.allclose(ours.grad, dense.grad, atol=1e-6)
        assert torch.equal(ours.detach(), values["logits"])


@pytest.mark.requirement("XL12", "K4")
def test_split_vocabulary_gives_the_whole_vocabularys_result():
    results = run_ranks(split_vocabulary, ranks=2)
    whole, whole_grad = split_vocabulary_reference()
    for logprob, entropy, _ in results:
        assert np.allclose(logprob, whole[0], atol=1e-6)
        assert np.allclose(entropy, whole[1], atol=1e-6)
    joined = np.concatenate([grad for *_, grad in results], axis=1)
    assert np.allclose(joined[:, :VOCAB], whole_grad, atol=1e-6)
    assert np.all(joined[:, VOCAB:] == 0)


def split_vocabulary_reference():
    values = inputs(3)
    values["logits"].requires_grad_()
    logprob, entropy = call(values)
    logprob[logprob.isfinite()].sum().backward()
    return (logprob.detach().numpy(), entropy.numpy()), values["logits"].grad.numpy()


def split_vocabulary():
    """Two ranks with 19 columns each, of which the last is padding with a tempting logit."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    values = inputs(3)
    padded = torch.cat([values["logits"], torch.full((EDGES, 1), 50.0)], dim=1)
    values["logits"] = padded.chunk(2, dim=1)[dist.get_rank()].clone().requires_grad_()
    logprob, entropy = call(values, group=dist.group.WORLD)
    logprob[logprob.isfinite()].sum().backward()
    return logprob.detach().numpy(), entropy.numpy(), values["logits"].grad.numpy()
