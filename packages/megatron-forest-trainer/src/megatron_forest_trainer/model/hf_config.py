"""Reading a Hugging Face `config.json` of a Qwen3, Qwen3-MoE or Qwen2.5-VL model.

Guarantees: every field that changes what the model computes is either represented in `ModelShape`
or refused by name with the value that would be accepted. Nothing here imports torch or Megatron.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_VISION_MODEL = "qwen2_5_vl"
_MIXTURE_MODEL = "qwen3_moe"


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something that this trainer does not compute."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """What a Qwen2.5-VL model has beside its decoder."""

    image_token_id: int
    """The token that stands for one embedding of the tower in a prompt."""
    merge_size: int
    """Patches along each side of the square that becomes one embedding."""
    patch_values: int
    """Numbers in one flattened patch: channels x frames x height x width."""
    mrope_section: tuple[int, ...]
    """Rotary frequencies that turn with the temporal, the vertical and the horizontal position."""
    tower: dict[str, Any]
    """`vision_config`: what transformers builds the tower from."""


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The experts that stand in for the MLP of every layer."""

    experts: int
    top_k: int
    """Experts per token."""
    ffn_hidden_size: int
    """Inner size of one expert."""
    normalized: bool
    """The chosen experts' weights are scaled to sum to 1."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What defines the computation of a decoder, and of the vision tower in front of it."""

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
    qk_norm: bool = True
    """Queries and keys are normalised per head (Qwen3)."""
    qkv_bias: bool = False
    """Query, key and value projections have a bias (Qwen2.5)."""
    vision: VisionShape | None = None
    """None for a model that reads text only."""
    mixture: MixtureShape | None = None
    """None for a dense model."""


def read_model_shape(hf_dir: Path) -> ModelShape:
    """The shape of the model in `hf_dir`.

    Raises `UnsupportedModelError`, naming the field, for anything but these models.
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
    check.value("model_type", ("qwen3", _MIXTURE_MODEL, _VISION_MODEL), required=True)
    sees = config["model_type"] == _VISION_MODEL
    check.absent("quantization_config")
    if sees:
        # Published checkpoints keep the decoder's fields at the top, transformers 5 in a section.
        config = {**config, **(config.get("text_config") or {})}
        check = _Checker(config, where)
    check.value("hidden_act", ("silu",))
    check.value("attention_bias", (False,))
    check.value("attention_dropout", (0, 0.0))
    check.value("use_sliding_window", (False,))
    layer_types = set(config.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        check.refuse("layer_types", sorted(layer_types), "full_attention in every layer")
    heads = check.integer("num_attention_heads")
    groups = check.integer("num_key_value_heads", default=heads)
    if heads % groups:
        check.refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads ({heads})")
    hidden = check.integer("hidden_size")
    head_dim = check.integer("head_dim", default=hidden // heads)
    return ModelShape(
        num_layers=check.integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=check.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=check.integer("vocab_size"),
        max_position_embeddings=check.integer("max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(check, ("default", "mrope") if sees else ("default",)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        qk_norm=not sees,
        qkv_bias=sees,
        vision=_vision_shape(check, hidden, head_dim) if sees else None,
        mixture=_mixture_shape(check) if config["model_type"] == _MIXTURE_MODEL else None,
    )


def _mixture_shape(check: "_Checker") -> MixtureShape:
    check.value("decoder_sparse_step", (1,))
    if check.config.get("mlp_only_layers"):
        check.refuse("mlp_only_layers", check.config["mlp_only_layers"], "experts in every layer")
    # transformers 5 writes the other name.
    field = "num_experts" if "num_experts" in check.config else "num_local_experts"
    experts, top_k = check.integer(field), check.integer("num_experts_per_tok")
    if top_k > experts:
        check.refuse("num_experts_per_tok", top_k, f"at most {field} ({experts})")
    return MixtureShape(
        experts=experts,
        top_k=top_k,
        ffn_hidden_size=check.integer("moe_intermediate_size"),
        normalized=bool(check.config.get("norm_topk_prob", False)),
    )


def _vision_shape(check: "_Checker", hidden_size: int, head_dim: int) -> VisionShape:
    config = check.config
    if not isinstance(config.get("vision_config"), dict):
        check.refuse("vision_config", config.get("vision_config"), "the section of the tower")
    vision = _Checker(config["vision_config"], f"{check.where}: vision_config")
    vision.value("out_hidden_size", (hidden_size,), required=True)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    section = rope.get("mrope_section")
    if not isinstance(section, list) or len(section) != 3 or 2 * sum(section) != head_dim:
        check.refuse("mrope_section", section, f"three numbers with the sum {head_dim // 2}")
    patch = vision.integer("patch_size", default=14)
    return VisionShape(
        image_token_id=check.integer("image_token_id"),
        merge_size=vision.integer("spatial_merge_size", default=2),
        patch_values=patch
        * patch
        * vision.integer("in_channels", default=3)
        * vision.integer("temporal_patch_size", default=2),
        mrope_section=tuple(section),
        tower=dict(config["vision_config"]),
    )


def _rope_theta(check: "_Checker", kinds: tuple[str, ...]) -> float:
    """Base of the rotary embedding; `rope_parameters` is how transformers 5 writes it."""
    config = check.config
    parameters = config.get("rope_parameters") or {}
    for key, source in (("rope_scaling", config.get("rope_scaling") or {}),
                        ("rope_parameters", parameters)):  # fmt: skip
        kind = source.get("rope_type", source.get("type", "default"))
        if kind not in kinds:
            check.refuse(f"{key}.rope_type", kind, " or ".join(kinds))
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
