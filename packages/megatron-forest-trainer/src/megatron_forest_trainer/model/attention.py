"""Core attention of Megatron's local layers over separate causal contexts.

Guarantees: a token attends to earlier tokens of its own segment only; a segment's result does not
depend on what shares its batch or bin, nor on the split over context-parallel ranks.

Megatron-Core's own local attention refuses packed sequences and context parallelism. This module
takes its place in the layer spec. Axes: `s` tokens, `b` batch, `h` heads, `d` head dimension;
packed (THD) inputs are `[t, h, d]`.

Under context parallelism over n ranks a segment is cut into 2n chunks and rank r holds chunks r and
2n - 1 - r (Megatron's layout). Keys and values are gathered from all ranks and put back into the
segment's order; the queries of a chunk then see the keys up to its end.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
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

        The mask is always causal within a segment; `attention_mask` is not read. Packed segments
        are `cu_seqlens_q` (of the whole sequence, under context parallelism too).
        """
        if self.cp_group is not None:
            key, value = gather(key, self.cp_group), gather(value, self.cp_group)
        if packed_seq_params is None:
            return self._segment(query, key, value).flatten(2)
        segments = packed_seq_params.cu_seqlens_q.tolist()
        ranks = 1 if self.cp_group is None else self.cp_group.size()
        outputs = []
        for start, end in pairwise(segments):
            q = query[start // ranks : end // ranks, None]
            k, v = (_rank_parts(tensor, start, end, ranks) for tensor in (key, value))
            outputs.append(self._segment(q, k, v)[:, 0])
        return torch.cat(outputs).flatten(1)

    def _segment(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one segment: queries `[s, b, h, d]`, rank-major keys `[n * s, b, g, d]`."""
        if self.cp_group is None:
            return self._attend(query, key, value)
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        chunk = query.shape[0] // 2
        key, value = (natural_order(tensor, ranks) for tensor in (key, value))
        outputs = []
        for number, part in ((rank, query[:chunk]), (2 * ranks - 1 - rank, query[chunk:])):
            seen = (number + 1) * chunk
            outputs.append(self._attend(part, key[:seen], value[:seen]))
        return torch.cat(outputs)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last `s` positions over all of `key`'s, `[s, b, h, d]`."""
        queries, keys = query.shape[0], key.shape[0]
        mask = None
        if queries != keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(keys - queries)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != query.shape[2],
        )
        return output.permute(2, 0, 1, 3)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Nothing: the module has no parameters."""
        return {}


def _rank_parts(tensor: torch.Tensor, start: int, end: int, ranks: int) -> torch.Tensor:
    """Every rank's part of the packed segment `[start, end)`, rank-major, with a batch axis."""
    whole = tensor.reshape(ranks, -1, *tensor.shape[1:])
    return whole[:, start // ranks : end // ranks].flatten(0, 1)[:, None]


def natural_order(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """A segment's positions in order, from the ranks' pairs of chunks."""
    chunks = tensor.chunk(2 * ranks)
    held_by = {rank: 2 * rank for rank in range(ranks)}
    held_by |= {2 * ranks - 1 - rank: 2 * rank + 1 for rank in range(ranks)}
    return torch.cat([chunks[held_by[number]] for number in range(2 * ranks)])


class _AllGather(torch.autograd.Function):
    """Concatenates over ranks; the gradient of a rank's part is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """`[s, ...]` -> `[n * s, ...]`, rank-major."""
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """This rank's part of the summed gradient."""
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[s, ...]` of every rank -> `[n * s, ...]`, rank-major, with gradient."""
    gathered: torch.Tensor = _AllGather.apply(tensor, group)
    return gathered
