"""Error between engine and trainer, and statistics per logical rollout.

Guarantees: every sum is kept with its token count, so that rows, ranks and rollouts can be pooled
in any order with every token weighted alike; rows without tokens are left out of min, mean and
max. `lp_gen` is the captured log-probability, `lp_prev` the trainer's before the step. Definitions
are in `docs/formulas.md`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from forest_schema import Reason
from numpy.typing import ArrayLike, NDArray

from megatron_forest_trainer.core.types import Finalized


class TokenErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the owned generated tokens of a row, or of several rows together."""

    tokens: int = 0
    """Tokens in the sums; -inf tokens of a filtered distribution are excluded."""
    mult: float = 0.0
    """Sum of exp(|lp_gen - lp_prev|)."""
    gen_kl: float = 0.0
    """Sum of k3(lp_prev - lp_gen)."""
    policy_kl: float = 0.0
    """Sum of k3(lp_gen - lp_prev)."""
    js: float = 0.0
    """Sum of the Jensen-Shannon terms."""
    ratio: float = 0.0
    """Sum of exp(lp_prev - lp_gen)."""

    def __add__(self, other: "TokenErrors") -> "TokenErrors":
        return TokenErrors(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )

    @property
    def mult_prob_error(self) -> float | None:
        """Mean multiplicative probability error, 1 is exact; None without tokens."""
        return self.mult / self.tokens if self.tokens else None


def pool(errors: Iterable[TokenErrors]) -> TokenErrors:
    """All tokens together, each with the same weight."""
    return sum(errors, TokenErrors())


def token_errors(lp_gen: ArrayLike, lp_prev: ArrayLike, mask: ArrayLike) -> TokenErrors:
    """Errors over the tokens `[n]` where `mask` is true and both log-probabilities are finite."""
    gen_n = np.asarray(lp_gen, dtype=np.float64)
    prev_n = np.asarray(lp_prev, dtype=np.float64)
    keep_n = np.asarray(mask, dtype=np.bool_) & ~(np.isneginf(gen_n) | np.isneginf(prev_n))
    gen_m, prev_m = gen_n[keep_n], prev_n[keep_n]
    mix_m = np.logaddexp(gen_m, prev_m) - np.log(2.0)
    return TokenErrors(
        tokens=int(keep_n.sum()),
        mult=float(np.exp(np.abs(gen_m - prev_m)).sum()),
        gen_kl=float(k3(prev_m - gen_m).sum()),
        policy_kl=float(k3(gen_m - prev_m).sum()),
        js=float((0.5 * k3(prev_m - mix_m) + 0.5 * k3(gen_m - mix_m)).sum()),
        ratio=float(np.exp(prev_m - gen_m).sum()),
    )


def k3(difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(d) - 1 - d, elementwise and never negative."""
    return np.expm1(difference) - difference


def error_metrics(rows: Sequence[TokenErrors]) -> dict[str, float]:
    """Step metrics of the error between engine and trainer from the errors of every row."""
    total = pool(rows)
    if total.tokens == 0:
        return {}
    per_row = [error.mult / error.tokens for error in rows if error.tokens]
    return {
        "token_mult_prob_error": total.mult / total.tokens,
        "gen_kl_error": total.gen_kl / total.tokens,
        "policy_kl_error": total.policy_kl / total.tokens,
        "js_divergence_error": total.js / total.tokens,
        "sampling_importance_ratio": total.ratio / total.tokens,
        "seq_logprob_error/min": min(per_row),
        "seq_logprob_error/mean": float(np.mean(per_row)),
        "seq_logprob_error/max": max(per_row),
    }


def rollout_metrics(
    finalized: Sequence[Finalized], rewards: Sequence[float | None], *, replayed: bool = False
) -> dict[str, float]:
    """Generation statistics of a step: one observation per logical rollout, before any filter.

    `rewards[i]` is the reward of `finalized[i]`; None (no reward) is left out of the mean. With
    `replayed`, where captured routes are replayed, the tokens that have none are counted.
    """
    metrics: dict[str, float] = {"logical_rollouts": float(len(finalized))}
    if finalized:
        metrics |= {
            "gen_tokens_per_sample": float(np.mean([r.generated_tokens for r in finalized])),
            "max_gen_tokens_per_turn": float(max(r.longest_generation for r in finalized)),
            "total_tokens_per_sample": float(np.mean([r.longest_row for r in finalized])),
            "truncated_rollouts": float(sum(r.truncated for r in finalized)),
            "unique_tokens": float(sum(r.unique_tokens for r in finalized)),
            "row_tokens": float(sum(r.row_tokens for r in finalized)),
        }
    if replayed:
        unrouted = sum(row.unrouted_tokens for rollout in finalized for row in rollout.rows)
        metrics["live_routed_tokens"] = float(unrouted)
    known = [reward for reward in rewards if reward is not None]
    if known:
        metrics |= {"reward/mean": float(np.mean(known)), "reward/std": float(np.std(known))}
    masked = Counter(rollout.reason for rollout in finalized if rollout.reason is not None)
    metrics["finalize/masked_rollouts"] = float(masked.total())
    metrics["finalize/selection_not_closed_rollouts"] = float(masked[Reason.SELECTION_NOT_CLOSED])
    return metrics | {
        f"finalize/masked_rollouts/{reason.value}": float(count)
        for reason, count in sorted(masked.items())
    }
