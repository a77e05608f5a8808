"""Importance weights between the engine that sampled and the trainer that learns.

Guarantees: pure numpy over one row's owned tokens; weights are finite and carry no gradient; a
row's weights depend on that row only, so they do not change with packing or the split over ranks.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_forest_trainer.config.schema import LossConfig


def importance_weights(
    previous_N: NDArray[np.float32], generated_N: NDArray[np.float32], config: LossConfig
) -> NDArray[np.float32]:
    """Weights `[N]` of one row's owned tokens.

    w = exp(lp' - lp_gen), 0 where not finite. `tis` clamps w to [min, max]; `icepop` zeroes w
    outside; `seq-mask-tis` zeroes the whole row where exp(mean(lp' - lp_gen)) is outside. Without
    `use_importance_sampling_correction` every weight is 1.
    """
    if not config.use_importance_sampling_correction:
        return np.ones_like(previous_N)
    with np.errstate(over="ignore", invalid="ignore"):
        difference_N = previous_N.astype(np.float64) - generated_N
        weight_N = np.exp(difference_N)
    finite_N = np.isfinite(weight_N) & np.isfinite(difference_N)
    weight_N = np.where(finite_N, weight_N, 0.0)
    high = config.truncated_importance_sampling_ratio
    if high is None:
        return weight_N.astype(np.float32)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    kind = config.truncated_importance_sampling_type
    if kind == "tis":
        weight_N = np.clip(weight_N, low, high)
    elif kind == "icepop":
        weight_N = np.where((weight_N >= low) & (weight_N <= high), weight_N, 0.0)
    elif finite_N.any():
        mean_ratio = np.exp(difference_N[finite_N].mean())
        weight_N = weight_N * (low <= mean_ratio <= high)
    return weight_N.astype(np.float32)
