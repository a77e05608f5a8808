"""Core attention of Megatron's local layers over separate causal contexts.

Guarantees: a token attends to earlier tokens of its own segment only; a segment's result does not
depend on what shares its batch or bin; padding positions give zeros and receive no gradient.

Megatron-Core's own local attention refuses packed sequences and context parallelism. This module
takes its place in the layer spec. Axes: `s` tokens, `b` batch, `h` heads, `d` head dimension;
packed (THD) inputs are `[t, h, d]`.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule


class SDPAVarlenAttention(MegatronModule):
    """Causal scaled-dot-product attention for `[s, b, h, d]` and for packed `[t, h, d]` inputs.

    Its constructor takes what `DotProductAttention` takes.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend. Returns `[s, b, h * d]`, or `[t, h * d]` for packed inputs.

        The mask is always causal within a segment; `attention_mask` is not read.
        """
        if packed_seq_params is None:
            return self._batched(query, key, value)
        return self._packed(query, key, value, packed_seq_params)

    def _batched(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        s, b, h, d = query.shape
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return self._attend(q, k, v).permute(2, 0, 1, 3).reshape(s, b, h * d)

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: PackedSeqParams,
    ) -> torch.Tensor:
        lengths = (params.cu_seqlens_q[1:] - params.cu_seqlens_q[:-1]).tolist()
        padded = params.cu_seqlens_q_padded
        slots = (padded if padded is not None else params.cu_seqlens_q).tolist()
        outputs = []
        for start, end, length in zip(slots[:-1], slots[1:], lengths, strict=True):
            q, k, v = (
                tensor[start : start + length].transpose(0, 1).unsqueeze(0)
                for tensor in (query, key, value)
            )
            outputs.append(self._attend(q, k, v)[0].transpose(0, 1))
            if end - start > length:
                outputs.append(query.new_zeros(end - start - length, *query.shape[1:]))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of `[b, h, s, d]` queries over `[b, g, s, d]` keys and values."""
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=k.shape[1] != q.shape[1]
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Nothing: the module has no parameters."""
        return {}
