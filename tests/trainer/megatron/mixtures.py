"""Small mixture-of-experts models, built with Megatron's own layers."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_forest_trainer.model import parallel
from megatron_forest_trainer.model.hf_config import ModelShape
from megatron_forest_trainer.model.parallel import Parallelism
from megatron_forest_trainer.model.transformer import transformer_config
from megatron_forest_trainer.model.tree import TreeAttention

from tests.trainer.megatron.support import VOCAB

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tied_embeddings=False,
    dtype="float32",
)
EXPERTS, TOP_K = 4, 2


def make_mixture(**overrides: Any) -> GPTModel:
    """A dropless mixture with random weights, the same every time."""
    parallel.initialize(Parallelism(), seed=0)
    config = transformer_config(
        SHAPE,
        Parallelism(),
        overrides={
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_ffn_hidden_size": 24,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
        }
        | overrides,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TreeAttention
    torch.manual_seed(5)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=256,
        position_embedding_type="rope",
    )


BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
}


def make_biased_mixture() -> GPTModel:
    """A mixture whose expert bias follows the load, and which keeps the counts it saw."""
    from megatron.core.distributed import finalize_model_grads
    from megatron_forest_trainer import optimization

    model = make_mixture(**BIASED)
    model.counts = []

    def finalize(*args: Any, **kwargs: Any) -> None:
        model.counts = [
            part.local_tokens_per_expert.clone().numpy()
            for part in model.modules()
            if hasattr(part, "local_tokens_per_expert")
        ]
        finalize_model_grads(*args, **kwargs)

    optimization.finalize_model_grads = finalize
    return model
