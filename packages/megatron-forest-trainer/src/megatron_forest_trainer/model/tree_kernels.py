"""Attention over a trie: by parts on the CPU, by one masked kernel with CUDA.

Guarantees: both compute softmax attention of each query over the keys that `visible` allows, with
gradient (flex attention only with CUDA); the memory beside inputs and output is linear in the
tokens, however deep the trie is.

Axes: `s` queries of this rank, `t` keys of the whole microbatch, `h` heads in `g` groups, `d` head
dimension.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class Part(NamedTuple):
    """Queries and keys that attend without a mask, or that are the same tokens in causal order."""

    queries: slice
    """Of this rank's tokens."""
    keys: slice
    """Of the whole microbatch's."""
    causal: bool


def attend_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[Part],
    scale: float | None,
) -> torch.Tensor:
    """`[1, h, s, d]` from queries `[1, h, s, d]` and keys and values `[1, g, t, d]`, on the CPU.

    The causal parts come first and hold each query once; every further part adds keys to the
    softmax of its queries. Queries come in g groups of heads.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    output: torch.Tensor = _Parts.apply(query, key, value, parts, scale)
    return output


class _Parts(torch.autograd.Function):
    """Partial softmaxes, merged by the logarithms of their normalisers.

    With o_i and l_i the output and log-normaliser of part i, l = log(sum exp l_i) and
    o = sum exp(l_i - l) o_i. The flash backward pass of one part with the merged o and l gives that
    part's gradients of the whole softmax, since it recomputes probabilities as exp(score - l).
    torch's own attention runs these kernels; only by them does it give the normalisers.
    (Blockwise attention: Liu and Abbeel 2023, arXiv 2305.19370.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        parts: Sequence[Part],
        scale: float | None,
    ) -> torch.Tensor:
        """See `attend_parts`; partial results are merged in float32."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        merged, normalizer = _empty(query, torch.float32), _empty(query[..., 0], torch.float32)
        for queries, keys, causal in parts:
            q, k, v = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            output, own = flash(q, k, v, is_causal=causal, scale=scale)
            if causal:
                merged[:, :, queries], normalizer[:, :, queries] = output, own
                continue
            before = normalizer[:, :, queries]
            weight = torch.sigmoid(own - before)
            merged[:, :, queries].lerp_(output.float(), weight[..., None])
            normalizer[:, :, queries] = torch.logaddexp(own, before)
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normalizer)
        ctx.parts, ctx.scale = parts, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the parts, summed."""
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        query, key, value, output, normalizer = ctx.saved_tensors
        totals = [_empty(tensor, torch.float32).zero_() for tensor in (query, key, value)]
        for queries, keys, causal in ctx.parts:
            found = flash_backward(
                grads[0][:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                normalizer[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            for total, part, grad in zip(totals, (queries, keys, keys), found, strict=True):
                total[:, :, part] += grad
        return *(total.to(query.dtype) for total in totals), None, None


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[1, h, s, ...]` with the tokens outermost in memory, as Megatron keeps them."""
    batch, heads, tokens, *rest = like.shape
    return torch.empty(batch, tokens, heads, *rest, dtype=dtype).transpose(1, 2)


def visible(query_index: torch.Tensor, last: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The trie's mask as flex attention asks for it: may query `q` attend to key `k`?"""

    def mask(
        batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        position = query_index[q]
        return (k <= position) & (position < last[k])

    return mask


def block_mask(query_index: torch.Tensor, last: torch.Tensor) -> BlockMask:
    """The blocks of queries and keys that `visible` leaves, for all heads."""
    mask: BlockMask = _compiled(create_block_mask)(
        visible(query_index, last), None, None, len(query_index), len(last), query_index.device
    )
    return mask


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scale: float | None,
) -> torch.Tensor:
    """As `attend_parts`, by compiled flex attention; it has no backward pass on the CPU."""
    output: torch.Tensor = _compiled(flex_attention)(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
