"""Log-probabilities under the sampled distribution, from vocabulary-parallel logits.

Guarantees: the result is the log-softmax of logits / temperature over the tokens that top-k and
top-p keep, as vLLM reports them (`processed_logprobs`): -inf where the target was not kept, with
gradient 0. Equal for any number of tensor-parallel ranks; the logits are not changed; computed in
float32 whatever their type.

Axes: `E` edges, `V` this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_forest_trainer.loss.edges import NO_TOP_K

_CHUNK_ELEMENTS = 1 << 24
"""Elements of a float32 temporary; bounds the memory beyond the logits themselves."""


def edge_logprobs(
    logits_EV: torch.Tensor,
    target_E: torch.Tensor,
    *,
    temperature_E: torch.Tensor,
    top_p_E: torch.Tensor,
    top_k_E: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability `[E]` of each target, differentiable, and the entropy `[E]`, not.

    `group` is the tensor-parallel group whose rank r holds columns `[r * V, (r + 1) * V)` of the
    vocabulary, None for whole logits. Columns from `vocab_size` on are padding.
    """
    scale_E = torch.where(temperature_E == 0, torch.ones_like(temperature_E), temperature_E)
    filtered_E = (top_p_E < 1) | (top_k_E != NO_TOP_K)
    threshold_E = None
    if bool(filtered_E.any()):
        threshold_E = _thresholds(
            logits_EV.detach(), scale_E, top_p_E, top_k_E, filtered_E, vocab_size, group
        )
    return _EdgeLogprob.apply(logits_EV, target_E, scale_E, threshold_E, vocab_size, group)


class _Shard:
    """This rank's columns of the vocabulary."""

    def __init__(self, columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.start = columns * group.rank() if group is not None else 0
        self.valid = max(0, min(columns, vocab_size - self.start))

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """`tensor` summed (or `op`) over the tensor-parallel ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def processed(
        self, logits_EV: torch.Tensor, scale_E: torch.Tensor, threshold_E: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 logits over temperature; -inf for padding columns and for filtered tokens."""
        z_EV = logits_EV.float() / scale_E[:, None]
        if self.valid < z_EV.shape[1]:
            z_EV[:, self.valid :] = -torch.inf
        if threshold_E is not None:
            z_EV.masked_fill_(z_EV < threshold_E[:, None], -torch.inf)
        return z_EV

    def local(self, target_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether the target is one of this rank's columns, its column there or 0)."""
        column_E = target_E - self.start
        here_E = (column_E >= 0) & (column_E < self.valid)
        return here_E, column_E * here_E


class _EdgeLogprob(torch.autograd.Function):
    """Keeps the logits and recomputes the softmax in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_EV: torch.Tensor,
        target_E: torch.Tensor,
        scale_E: torch.Tensor,
        threshold_E: torch.Tensor | None,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `edge_logprobs`."""
        shard = _Shard(logits_EV.shape[1], vocab_size, group)
        normalizer_E = torch.empty_like(scale_E)
        target_logit_E = torch.empty_like(scale_E)
        mean_logit_E = torch.empty_like(scale_E)
        for part in _chunks(logits_EV):
            z_EV = shard.processed(
                logits_EV[part], scale_E[part], None if threshold_E is None else threshold_E[part]
            )
            highest_E = shard.reduce(z_EV.max(dim=1).values, dist.ReduceOp.MAX)
            exp_EV = (z_EV - highest_E[:, None]).exp_()
            sum_E = shard.reduce(exp_EV.sum(dim=1))
            normalizer_E[part] = highest_E + sum_E.log()
            here_E, column_E = shard.local(target_E[part])
            logit_E = z_EV.gather(1, column_E[:, None])[:, 0]
            target_logit_E[part] = shard.reduce(torch.where(here_E, logit_E, 0.0))
            if threshold_E is not None or shard.valid < z_EV.shape[1]:
                # -inf logits have probability 0 and must not turn the mean into NaN.
                z_EV.masked_fill_(z_EV == -torch.inf, 0)
            weighted_E = torch.linalg.vecdot(exp_EV, z_EV)
            mean_logit_E[part] = shard.reduce(weighted_E) / sum_E
        logprob_E = target_logit_E - normalizer_E
        entropy_E = normalizer_E - mean_logit_E
        ctx.shard = shard
        ctx.save_for_backward(logits_EV, target_E, scale_E, threshold_E, normalizer_E, logprob_E)
        ctx.mark_non_differentiable(entropy_E)
        return logprob_E, entropy_E

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d logprob / d logits = (1[target] - softmax) / temperature."""
        logits_EV, target_E, scale_E, threshold_E, normalizer_E, logprob_E = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad_E = torch.where(logprob_E == -torch.inf, 0.0, grads[0]) / scale_E
        grad_EV = torch.empty_like(logits_EV)
        for part in _chunks(logits_EV):
            z_EV = shard.processed(
                logits_EV[part], scale_E[part], None if threshold_E is None else threshold_E[part]
            )
            z_EV = (z_EV - normalizer_E[part][:, None]).exp_().mul_(-grad_E[part][:, None])
            here_E, column_E = shard.local(target_E[part])
            z_EV.scatter_add_(1, column_E[:, None], (grad_E[part] * here_E)[:, None])
            grad_EV[part] = z_EV
        return grad_EV, None, None, None, None, None


def _chunks(logits_EV: torch.Tensor) -> list[slice]:
    edges, columns = logits_EV.shape
    size = max(1, _CHUNK_ELEMENTS // columns)
    return [slice(start, min(edges, start + size)) for start in range(0, edges, size)]


def _thresholds(
    logits_EV: torch.Tensor,
    scale_E: torch.Tensor,
    top_p_E: torch.Tensor,
    top_k_E: torch.Tensor,
    filtered_E: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Smallest logit `[E]` that top-k and top-p keep; -inf where an edge is not filtered."""
    shard = _Shard(logits_EV.shape[1], vocab_size, group)
    threshold_E = torch.full_like(scale_E, -torch.inf)
    columns = logits_EV.shape[1] * (group.size() if group is not None else 1)
    rows = filtered_E.nonzero()[:, 0]
    for chosen in rows.split(max(1, _CHUNK_ELEMENTS // columns)):
        z_EV = shard.processed(logits_EV[chosen], scale_E[chosen], None)
        if shard.group is not None:
            parts = [torch.empty_like(z_EV) for _ in range(shard.group.size())]
            dist.all_gather(parts, z_EV.contiguous(), group=shard.group)
            z_EV = torch.cat(parts, dim=1)
        threshold_E[chosen] = smallest_kept(z_EV, top_p_E[chosen], top_k_E[chosen])
    return threshold_E


def smallest_kept(z_EV: torch.Tensor, top_p_E: torch.Tensor, top_k_E: torch.Tensor) -> torch.Tensor:
    """Smallest of the whole-vocabulary logits that top-k, then top-p keep.

    vLLM's order and comparisons: top-k keeps ties; top-p drops the least likely tokens while their
    summed probability is <= 1 - p, and always keeps the most likely token.
    """
    ascending_EV = z_EV.sort(dim=1).values
    vocabulary = z_EV.shape[1]
    kept_E = torch.where(top_k_E == NO_TOP_K, vocabulary, top_k_E.clamp(max=vocabulary))
    kth_E = ascending_EV.gather(1, (vocabulary - kept_E)[:, None])
    ascending_EV = ascending_EV.masked_fill(ascending_EV < kth_E, -torch.inf)
    dropped_EV = ascending_EV.softmax(dim=1).cumsum(dim=1) <= 1 - top_p_E[:, None]
    dropped_EV[:, -1] = False
    dropped_EV |= ascending_EV == -torch.inf
    return ascending_EV.masked_fill(dropped_EV, torch.inf).min(dim=1).values
