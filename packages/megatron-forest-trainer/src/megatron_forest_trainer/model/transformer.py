"""Building a Megatron-Core GPTModel, or one that sees, from a `ModelShape`.

Guarantees: the same model and the same code above it on the CPU (Megatron's local layers) and on a
GPU with Transformer Engine; losses are sums over tokens, divided once by the global token count
(`calculate_per_token_loss`), whatever the split into microbatches and ranks.
"""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_forest_trainer.model.attention import SDPAVarlenAttention
from megatron_forest_trainer.model.hf_config import MixtureShape, ModelShape, UnsupportedModelError
from megatron_forest_trainer.model.norms import LocalRMSNorm
from megatron_forest_trainer.model.parallel import Parallelism
from megatron_forest_trainer.model.tree import TreeAttention
from megatron_forest_trainer.model.vision_language import VisionLanguageModel


def use_transformer_engine() -> bool:
    """Transformer Engine's layers run the model: CUDA and the package are both there."""
    if not torch.cuda.is_available():
        return False
    return importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    shape: ModelShape,
    parallelism: Parallelism,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    overrides: dict[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's configuration of the model.

    `recompute` trades time for memory: activations of every layer are computed again in the
    backward pass. `overrides` are `TransformerConfig` fields set last.
    Raises `ValueError` where the layers do not divide over the pipeline stages, the heads over the
    tensor-parallel ranks or the experts over the expert-parallel ones, or for a layout in which
    Megatron would not train the experts exactly.
    """
    if shape.num_layers % parallelism.pipeline:
        raise ValueError(
            f"the model's {shape.num_layers} layers do not divide over "
            f"pipeline_model_parallel_size {parallelism.pipeline}"
        )
    if shape.num_query_groups % parallelism.tensor:
        raise ValueError(
            f"the model's {shape.num_query_groups} key/value heads do not divide over "
            f"tensor_model_parallel_size {parallelism.tensor}"
        )
    experts = 1 if shape.mixture is None else shape.mixture.experts
    if experts % parallelism.expert:
        raise ValueError(
            f"the model's {experts} expert(s) do not divide over expert_model_parallel_size "
            f"{parallelism.expert}"
        )
    if shape.mixture is not None:
        _check_expert_layout(parallelism)
    fused = use_transformer_engine()
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "layernorm_epsilon": shape.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": parallelism.tensor,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "context_parallel_size": parallelism.context,
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": parallelism.expert_tensor,
        "sequence_parallel": parallelism.sequence_parallel,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Microbatches differ in length; Megatron ties that to a dispatcher even for dense models.
        "variable_seq_lengths": parallelism.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        # The fused packed kernel counts positions from each segment's start.
        "apply_rope_fusion": fused and shape.vision is None,
        "mrope_section": None if shape.vision is None else list(shape.vision.mrope_section),
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if shape.mixture is not None:
        fields |= _mixture_fields(shape.mixture)
    if recompute:
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(**(fields | (overrides or {})))


def _check_expert_layout(parallelism: Parallelism) -> None:
    if parallelism.tensor > 1 and not parallelism.sequence_parallel:
        raise ValueError(
            f"a mixture of experts with tensor_model_parallel_size {parallelism.tensor} needs "
            "sequence_parallel: true"
        )
    if parallelism.expert == 1 and parallelism.expert_tensor != parallelism.tensor:
        # Megatron reduces the gradients of such experts like those of undivided layers.
        raise ValueError(
            f"a mixture of experts with expert_model_parallel_size 1 needs "
            f"expert_tensor_parallel_size {parallelism.tensor}, as tensor_model_parallel_size"
        )


def _mixture_fields(mixture: MixtureShape) -> dict[str, Any]:
    return {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.top_k,
        "moe_ffn_hidden_size": mixture.ffn_hidden_size,
        # A softmax over the chosen logits is the whole softmax with the chosen scaled to sum to 1.
        "moe_router_pre_softmax": not mixture.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def layer_specs(config: TransformerConfig, *, trees: bool = False) -> Any:
    """What the transformer block is made of; with `trees` its attention runs tries too."""
    if use_transformer_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
        if trees:
            layer.submodules.self_attention.submodules.core_attention = TreeAttention
        return layer
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = LocalRMSNorm
    layer.submodules.pre_mlp_layernorm = LocalRMSNorm
    attention = layer.submodules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = LocalRMSNorm
        attention.k_layernorm = LocalRMSNorm
    attention.core_attention = TreeAttention if trees else SDPAVarlenAttention
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=LocalRMSNorm
    )


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Embedding rows in the model: the vocabulary, rounded up to the tensor-parallel ranks."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def build_model(
    shape: ModelShape,
    config: TransformerConfig,
    *,
    freeze_vision_model: bool = False,
    trees: bool = False,
) -> GPTModel:
    """This rank's part of the model, with arbitrary weights, on its device.

    `trees` gives it attention that runs tries. Needs `model.parallel.initialize`. Raises
    `UnsupportedModelError` where there is no vision model to freeze.
    """
    if freeze_vision_model and shape.vision is None:
        raise UnsupportedModelError(
            "policy.megatron_cfg.freeze_vision_model is true, but the model has no vision tower; "
            "remove it"
        )
    fields = {
        "config": config,
        "transformer_layer_spec": layer_specs(config, trees=trees),
        "vocab_size": padded_vocab_size(shape.vocab_size, config.tensor_model_parallel_size),
        "max_sequence_length": shape.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": shape.tied_embeddings,
        "rotary_base": shape.rope_theta,
    }
    model = (
        GPTModel(position_embedding_type="rope", **fields)
        if shape.vision is None
        else VisionLanguageModel(shape.vision, freeze_vision_model=freeze_vision_model, **fields)
    )
    return model.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else model
