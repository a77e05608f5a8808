"""RMSNorm for Megatron's local layers.

Guarantees: the parameters of Hugging Face's Qwen3 norms (weight only, no bias), and a weight whose
gradient Megatron sums over tensor-parallel ranks under sequence parallelism.
"""

from typing import Any

import torch


class LocalRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with the constructor of Megatron's norm modules.

    Megatron-Core's own local norm refuses sequence parallelism; what it lacks is the mark on the
    weight by which Megatron finds gradients that each rank has computed from its tokens only.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
