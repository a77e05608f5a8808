"""A Qwen3 decoder in plain torch, for making the example's checkpoint.

Guarantees: parameter names, shapes and arithmetic are those of Hugging Face's
`Qwen3ForCausalLM`, so `save` writes a directory that vLLM and the trainer load as they load any
Qwen3 model. Only pre-training uses this class.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 4096

    def hugging_face(self, eos: int, pad: int) -> dict[str, Any]:
        """Content of the checkpoint's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


def rope_tables(config: TinyConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, head_dim]` of the half-rotation form."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` `[batch, heads, length, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any = None) -> Tensor:
        batch, length, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.config.head_dim)

        q = rotate(self.q_norm(split(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(split(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = split(self.v_proj(x)).transpose(1, 2)
        if cache is not None:
            y = cache(self, q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class TinyQwen3(nn.Module):
    """Decoder with its output layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rope_tables(config, config.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: Any = None) -> Tensor:
        """Final hidden states `[batch, length, hidden]` of `tokens` `[batch, length]`."""
        if positions is None:
            cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        else:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, cache)
        return self.model.norm(x)

    def save(self, directory: Path, eos: int, pad: int) -> None:
        """Write config.json, generation_config.json and model.safetensors."""
        state = {name: value.detach().contiguous() for name, value in self.state_dict().items()}
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        config = self.config.hugging_face(eos, pad)
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        generation = {"eos_token_id": [eos, pad], "pad_token_id": pad, "temperature": 1.0}
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
