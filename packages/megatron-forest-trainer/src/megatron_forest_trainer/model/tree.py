"""Megatron-Core's layers over a trie of rows: the forest in one pass.

Guarantees: token q attends to token k exactly where `k <= q < last[k]` (`core.tree`), at the rotary
positions that it has in its rows; nothing of Megatron-Core is patched. Three parts work together:
`TreeSeqParams` carries the trie through Megatron's forward signature to every layer, stage and
recomputation; `TreeAttention` stands in the layer spec; `enable_tree_execution` wraps the model's
rotary embedding and refuses layers that could not run a trie.

On the CPU attention runs by parts of the trie, without wasted work; with CUDA, compiled flex
attention takes the mask (`model.tree_kernels`).

Axes: `s` tokens of this rank, `t` tokens of the whole microbatch, `h` heads, `d` head dimension.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention.flex_attention import BlockMask

from megatron_forest_trainer.model.attention import SDPAVarlenAttention, gather, natural_order
from megatron_forest_trainer.model.hf_config import UnsupportedModelError
from megatron_forest_trainer.model.tree_kernels import (
    Part,
    attend_masked,
    attend_parts,
    block_mask,
)


@dataclass(kw_only=True)
class TreeSeqParams(PackedSeqParams):
    """The trie of one microbatch. `qkv_format` is `sbhd`: one line of tokens."""

    positions: torch.Tensor
    """`[s]` position of each token in its rows."""
    last: torch.Tensor
    """`[t]` end of each token's descendants."""
    query_index: torch.Tensor
    """`[s]` position of each token in the whole microbatch."""
    parts: tuple[Part, ...]
    """The trie without its mask, for the CPU."""

    @cached_property
    def block_mask(self) -> BlockMask:
        """The trie's mask, for flex attention; every layer takes the same one."""
        return block_mask(self.query_index, self.last)


class TreeAttention(SDPAVarlenAttention):
    """Core attention that runs tries too. Rows run as in `SDPAVarlenAttention`."""

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
        """Attend. A trie's query is `[s, 1, h, d]`; returns `[s, 1, h * d]`."""
        tree = packed_seq_params
        if not isinstance(tree, TreeSeqParams):
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, tree
            )
        if self.cp_group is not None:
            ranks = self.cp_group.size()
            key, value = (
                natural_order(gather(tensor, self.cp_group), ranks) for tensor in (key, value)
            )
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if query.is_cuda:
            output = attend_masked(q, k, v, tree.block_mask, self.softmax_scale)
        else:
            output = attend_parts(q, k, v, tree.parts, self.softmax_scale)
        return output.permute(2, 0, 1, 3).flatten(2)


class TreeRotary(torch.nn.Module):
    """A model's rotary embedding, at a trie's positions where the microbatch is one.

    Megatron hands what `get_rotary_seq_len` returns to `forward`: here the trie itself.
    """

    def __init__(self, inner: RotaryEmbedding) -> None:
        super().__init__()
        self.inner = inner

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: torch.Tensor,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> "int | TreeSeqParams":
        """The trie, or the length that the wrapped embedding finds."""
        if isinstance(packed_seq_params, TreeSeqParams):
            return packed_seq_params
        length: int = self.inner.get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )
        return length

    def forward(self, length: "int | TreeSeqParams", *args: Any, **kwargs: Any) -> torch.Tensor:
        """`[s, 1, 1, d]` at the trie's positions, or the wrapped embedding's result."""
        if not isinstance(length, TreeSeqParams):
            embedding: torch.Tensor = self.inner(length, *args, **kwargs)
            return embedding
        # Of a packed sequence the embedding makes the whole table, whatever the context ranks.
        table: torch.Tensor = self.inner(length.max_seqlen_kv, packed_seq=True)
        return table.index_select(0, length.positions)


def enable_tree_execution(module: Any) -> None:
    """Let `module` run tries.

    Raises `UnsupportedModelError` for a layer that does more than full attention, which a token
    that several rows share would have to do once per row, and for unknown position embeddings.
    """
    config = module.config
    for field, accepted in (
        ("window_size", None),
        ("softmax_type", "vanilla"),
        ("multi_latent_attention", False),
        ("mtp_num_layers", None),
    ):
        found = getattr(config, field, accepted)
        if found != accepted:
            _refuse(f"{field} {found!r}", repr(accepted))
    layers = getattr(getattr(module, "decoder", None), "layers", None)
    if layers is None:
        _refuse(f"no decoder layers ({type(module).__name__})", "a transformer decoder")
    for number, layer in enumerate(layers):
        attention = getattr(layer, "self_attention", layer)
        core = getattr(attention, "core_attention", attention)
        if not isinstance(core, TreeAttention):
            _refuse(
                f"{type(core).__name__} in layer {number}",
                "full attention with core_attention=TreeAttention (model.tree) in the layer spec",
            )
    positions = getattr(module, "position_embedding_type", None)
    if positions not in ("rope", "mrope"):
        _refuse(f"position_embedding_type {positions!r}", "'rope' or 'mrope'")
    # Multimodal rotary embeddings take the positions that the microbatch gives.
    if positions == "rope" and not isinstance(module.rotary_pos_emb, TreeRotary):
        module.rotary_pos_emb = TreeRotary(module.rotary_pos_emb)


def _refuse(found: str, accepted: str) -> NoReturn:
    raise UnsupportedModelError(
        f"policy.forest_execution.enabled: the loaded model has {found}; the forest in one pass "
        f"needs {accepted}. Set it to false to run rows"
    )
