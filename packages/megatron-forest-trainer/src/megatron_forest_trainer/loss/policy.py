"""The token-level clipped policy gradient.

Guarantees: returns a *sum* over edges and the integer number of edges that count, never a mean, so
that any split into microbatches and ranks gives the same loss and gradient once the sums are
divided by the global count; an edge of weight 0 contributes nothing, whatever its other values; an
edge that the trainer's own distribution excludes (log-probability -inf) contributes 0 and still
counts in the normaliser.

With lp the log-probability now, lp' before the step, A the advantage and rho = exp(lp - lp'):
    l = max(-A rho, -A clip(rho, 1 - e_min, 1 + e_max));  where A < 0 and c is set: l = min(l, -A c)
    loss = sum(w l + b kl), w the importance correction, b the weight of the KL divergence.
"""

from dataclasses import dataclass

import torch

from megatron_forest_trainer.config.schema import LossConfig
from megatron_forest_trainer.loss.edges import EdgeTensors


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Sums over the edges of one microbatch on one rank."""

    loss: torch.Tensor
    """Differentiable sum, scalar."""
    tokens: torch.Tensor
    """Edges that count, int32 scalar."""
    sums: dict[str, torch.Tensor]
    """Sums of metrics over the edges that count; divide by `tokens` after reduction."""


def policy_loss(
    logprob_E: torch.Tensor, entropy_E: torch.Tensor, edges: EdgeTensors, config: LossConfig
) -> PolicyLoss:
    """The loss of one microbatch from the edges' log-probabilities `[E]` and entropies `[E]`."""
    counts_E = edges.weight_E != 0
    usable_E = counts_E & logprob_E.isfinite() & edges.previous_E.isfinite()
    # Values that do not count are replaced before any arithmetic: inf * 0 is NaN.
    log_ratio_E = torch.where(usable_E, logprob_E - edges.previous_E, 0.0)
    ratio_E = log_ratio_E.exp()
    clipped_E = ratio_E.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    advantage_E = edges.advantage_E
    surrogate_E = torch.maximum(-advantage_E * ratio_E, -advantage_E * clipped_E)
    if config.ratio_clip_c is not None:
        bounded_E = torch.minimum(surrogate_E, -advantage_E * config.ratio_clip_c)
        surrogate_E = torch.where(advantage_E < 0, bounded_E, surrogate_E)
    loss_E = edges.correction_E * surrogate_E
    kl_E = torch.zeros_like(loss_E)
    if config.reference_policy_kl_penalty:
        kl_E = kl_divergence(torch.where(usable_E, logprob_E, edges.reference_E), edges, config)
        loss_E = loss_E + config.reference_policy_kl_penalty * kl_E
    loss_E = torch.where(usable_E, edges.weight_E * loss_E, 0.0)

    def total(values_E: torch.Tensor) -> torch.Tensor:
        return torch.where(usable_E, values_E.detach(), 0.0).sum(dtype=torch.float64)

    return PolicyLoss(
        loss=loss_E.sum(),
        tokens=counts_E.sum().int(),
        sums={
            "loss": total(loss_E),
            "kl": total(kl_E),
            "entropy": total(entropy_E),
            "ratio": total(ratio_E),
            "clipped": total((clipped_E != ratio_E).float()),
            "correction": total(edges.correction_E),
            "excluded": (counts_E & ~usable_E).sum(dtype=torch.float64),
        },
    )


def kl_divergence(logprob_E: torch.Tensor, edges: EdgeTensors, config: LossConfig) -> torch.Tensor:
    """Per-edge estimate `[E]` of the divergence from the reference model, d = lp_ref - lp.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d with d clamped.
    """
    d_E = edges.reference_E - logprob_E
    if config.reference_policy_kl_type == "k1":
        kl_E = -d_E
    elif config.reference_policy_kl_type == "k2":
        kl_E = d_E.square() / 2
    else:
        if config.kl_input_clamp_value is not None:
            d_E = d_E.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
        kl_E = d_E.exp() - 1 - d_E
    if config.kl_output_clamp_value is not None:
        kl_E = kl_E.clamp(-config.kl_output_clamp_value, config.kl_output_clamp_value)
    return kl_E
