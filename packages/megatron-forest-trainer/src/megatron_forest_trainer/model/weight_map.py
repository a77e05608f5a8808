"""Names and layouts of weights in Hugging Face's form and in Megatron's (Qwen3, Qwen2.5-VL).

Guarantees: `to_megatron` and `to_hugging_face` are exact inverses (they move values, they never
compute), for local and for Transformer Engine layers; `slice_for_rank` and `join_ranks` are exact
inverses too. Pure functions of tensors; no process group, no file.

Megatron keeps query, key and value in one matrix, grouped by key/value head, and the MLP's gate and
up projections in another, each half split over the tensor-parallel ranks by itself. An expert is
such an MLP. A vision tower is the transformers module; its tensors pass unchanged.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_forest_trainer.model.hf_config import ModelShape

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
}
_MLP = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
_ROUTER = {"mlp.router.weight": ("mlp.gate.weight",)}
_QKV_BIAS = {
    "self_attention.linear_qkv.bias": (
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    ),
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
_TRANSFORMER_ENGINE = {
    # Transformer Engine fuses a norm into the projection behind it.
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_EXPERT_NAME = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_LAYER_NAME = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_TOWER = "vision_model."
"""Prefix of the vision tower's parameters in the model."""
TOWER_PREFIX = "visual."
"""Their prefix in a checkpoint."""
_VOCAB_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


def canonical_name(name: str, *, first_layer: int, first_expert: int = 0) -> str:
    """A parameter's name in an undivided model of local layers.

    `first_layer` and `first_expert` are the numbers that this rank's first ones have in the whole
    model.
    """
    match = _LAYER_NAME.match(name)
    if match is None:
        return name
    number, rest = int(match[1]) + first_layer, match[2]
    expert = _EXPERT_NAME.match(rest)
    if expert is not None:
        rest = _expert(int(expert[1]) + first_expert, expert[2])
    return f"decoder.layers.{number}.{_TRANSFORMER_ENGINE.get(rest, rest)}"


def _expert(number: int, parameter: str) -> str:
    return f"mlp.experts.local_experts.{number}.{parameter}"


def hugging_face_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors behind the canonical Megatron parameter `name`.

    Raises `KeyError` for a parameter that these models do not have.
    """
    match = _LAYER_NAME.match(name)
    if match is not None:
        return tuple(f"model.layers.{match[1]}.{tail}" for tail in _layer_tails(match[2]))
    if name.startswith(_TOWER):
        return (TOWER_PREFIX + name.removeprefix(_TOWER),)
    return (_TOP[name],)


def _layer_tails(parameter: str) -> tuple[str, ...]:
    expert = _EXPERT_NAME.match(parameter)
    if expert is not None:
        return tuple(f"mlp.experts.{expert[1]}.{tail}" for tail in _MLP[expert[2]])
    if parameter.startswith("mlp.linear_"):
        return tuple(f"mlp.{tail}" for tail in _MLP[parameter.removeprefix("mlp.")])
    return (_LAYER | _QKV_BIAS | _QK_NORM | _ROUTER)[parameter]


def layer_parameters(shape: ModelShape) -> tuple[str, ...]:
    """Canonical names of one layer's parameters, behind `decoder.layers.N.`."""
    optional = (_QKV_BIAS if shape.qkv_bias else {}) | (_QK_NORM if shape.qk_norm else {})
    if shape.mixture is None:
        return (*_LAYER, *optional, *(f"mlp.{name}" for name in _MLP))
    experts = range(shape.mixture.experts)
    return (
        *_LAYER,
        *optional,
        *_ROUTER,
        *(_expert(number, name) for number in experts for name in _MLP),
    )


def checkpoint_names(shape: ModelShape) -> frozenset[str]:
    """Every tensor that a checkpoint of this shape must hold; a vision tower's are left out."""
    names = {
        hugging_face
        for layer in range(shape.num_layers)
        for tail in layer_parameters(shape)
        for hugging_face in hugging_face_names(f"decoder.layers.{layer}.{tail}")
    }
    tied = {"lm_head.weight"} if shape.tied_embeddings else set()
    return frozenset((names | set(_TOP.values())) - tied)


def to_megatron(
    name: str, tensors: Sequence[torch.Tensor], shape: ModelShape, *, vocab_rows: int
) -> torch.Tensor:
    """The undivided Megatron parameter `name` from its Hugging Face tensors, in their order.

    `vocab_rows` >= the vocabulary; rows beyond it are zero and never matter.
    """
    if name.startswith("decoder.") and "linear_qkv." in name:
        query, key, value = (
            tensor.reshape(shape.num_query_groups, -1, *tensor.shape[1:]) for tensor in tensors
        )
        return torch.cat([query, key, value], dim=1).flatten(0, 1)
    if name.endswith("linear_fc1.weight"):
        return torch.cat(list(tensors))
    (tensor,) = tensors
    if name in _VOCAB_PARAMETERS:
        return torch.cat([tensor, tensor.new_zeros(vocab_rows - shape.vocab_size, tensor.shape[1])])
    return tensor


def to_hugging_face(
    name: str, parameter: torch.Tensor, shape: ModelShape
) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of the undivided Megatron parameter `name`: inverse of `to_megatron`."""
    names = hugging_face_names(name)
    if name.startswith("decoder.") and "linear_qkv." in name:
        grouped = parameter.reshape(shape.num_query_groups, -1, *parameter.shape[1:])
        queries = grouped.shape[1] - 2 * shape.head_dim
        parts = grouped.split([queries, shape.head_dim, shape.head_dim], dim=1)
        tensors: Sequence[torch.Tensor] = [part.flatten(0, 1) for part in parts]
    elif name.endswith("linear_fc1.weight"):
        tensors = parameter.chunk(2)
    elif name in _VOCAB_PARAMETERS:
        tensors = (parameter[: shape.vocab_size],)
    else:
        tensors = (parameter,)
    return dict(zip(names, tensors, strict=True))


def slice_for_rank(
    name: str, full: torch.Tensor, *, partition_dim: int, rank: int, ranks: int
) -> torch.Tensor:
    """Tensor-parallel rank `rank`'s part of the undivided parameter `name`."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(ranks)[rank] for half in full.chunk(2)])
    return full.chunk(ranks, partition_dim)[rank]


def join_ranks(name: str, parts: Sequence[torch.Tensor], *, partition_dim: int) -> torch.Tensor:
    """The undivided parameter `name` from its parts in rank order."""
    if name.endswith("linear_fc1.weight"):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), dim=partition_dim)


def merge_parameter(
    name: str, read: Callable[[str], torch.Tensor], shape: ModelShape, *, vocab_rows: int
) -> torch.Tensor:
    """`to_megatron` with its tensors fetched by Hugging Face name through `read`."""
    tensors = [read(hugging_face) for hugging_face in hugging_face_names(name)]
    return to_megatron(name, tensors, shape, vocab_rows=vocab_rows)


def check_checkpoint_names(
    present: Mapping[str, object] | frozenset[str], shape: ModelShape, *, where: str
) -> None:
    """Refuse a checkpoint with missing or unknown tensors. Raises `ValueError`, naming them."""
    expected = checkpoint_names(shape)
    found = {name for name in present if not name.endswith("rotary_emb.inv_freq")}
    if shape.vision is not None:
        # The tower is built by transformers, whose module knows its own names.
        found = {name for name in found if not name.startswith(TOWER_PREFIX)}
    if shape.tied_embeddings:
        found.discard("lm_head.weight")
    for what, names in (("lacks", expected - found), ("has the unknown", found - expected)):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(f"{where}: the checkpoint {what} tensor(s) {listed}")
