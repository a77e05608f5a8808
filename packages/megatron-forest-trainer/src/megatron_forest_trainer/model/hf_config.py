"""Reading a Hugging Face `config.json` of a dense Qwen3 model.

Guarantees: every field that changes what the model computes is either represented in `ModelShape`
or refused by name with the value that would be accepted. Nothing here imports torch or Megatron.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something that this trainer does not compute."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What defines the computation of a dense Qwen3 decoder."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads."""
    head_dim: int
    vocab_size: int
    """Rows of the embedding in the checkpoint; the engine samples over all of them."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    dtype: str
    """`float32`, `bfloat16` or `float16`: how the checkpoint stores its weights."""


def read_model_shape(hf_dir: Path) -> ModelShape:
    """The shape of the model in `hf_dir`.

    Raises `UnsupportedModelError`, naming the field, for anything but a dense Qwen3 decoder.
    """
    path = hf_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(
            f"{path}: not readable ({error.strerror}); the model directory needs a Hugging Face "
            "config.json"
        ) from error
    except json.JSONDecodeError as error:
        raise UnsupportedModelError(f"{path}: not JSON ({error})") from error
    return parse_model_shape(config, where=str(path))


def parse_model_shape(config: dict[str, Any], *, where: str) -> ModelShape:
    """The shape that the parsed `config.json` describes; `where` names it in errors."""
    check = _Checker(config, where)
    check.value("model_type", ("qwen3",), required=True)
    check.value("hidden_act", ("silu",))
    check.value("attention_bias", (False,))
    check.value("attention_dropout", (0, 0.0))
    check.value("use_sliding_window", (False,))
    check.absent("quantization_config")
    layer_types = set(config.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        check.refuse("layer_types", sorted(layer_types), "full_attention in every layer")
    heads = check.integer("num_attention_heads")
    groups = check.integer("num_key_value_heads", default=heads)
    if heads % groups:
        check.refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads ({heads})")
    hidden = check.integer("hidden_size")
    return ModelShape(
        num_layers=check.integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=check.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=check.integer("head_dim", default=hidden // heads),
        vocab_size=check.integer("vocab_size"),
        max_position_embeddings=check.integer("max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(check),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _rope_theta(check: "_Checker") -> float:
    """Base of the rotary embedding; `rope_parameters` is how transformers 5 writes it."""
    config = check.config
    parameters = config.get("rope_parameters") or {}
    for key, source in (("rope_scaling", config.get("rope_scaling") or {}),
                        ("rope_parameters", parameters)):  # fmt: skip
        kind = source.get("rope_type", source.get("type", "default"))
        if kind != "default":
            check.refuse(f"{key}.rope_type", kind, "default")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float):
        check.refuse("rope_theta", theta, "a number")
    return float(theta)


@dataclass(frozen=True)
class _Checker:
    config: dict[str, Any]
    where: str

    def refuse(self, field: str, found: object, accepted: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.where}: {field} is {found!r}; this trainer supports {accepted}"
        )

    def value(self, field: str, accepted: tuple[object, ...], *, required: bool = False) -> None:
        found = self.config.get(field, None if required else accepted[0])
        if found not in accepted:
            self.refuse(field, found, " or ".join(repr(item) for item in accepted))

    def absent(self, field: str) -> None:
        if self.config.get(field) is not None:
            self.refuse(field, self.config[field], "models without it")

    def integer(self, field: str, *, default: int | None = None) -> int:
        found = self.config.get(field)
        if found is None:
            found = default
        if not isinstance(found, int) or found < 1:
            self.refuse(field, found, "a positive integer")
        return found
