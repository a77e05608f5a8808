"""What a loaded model must and must not do to be trained on forest rows.

Guarantees: the checks look at the model that was built, not at the configuration that asked for it;
every refusal names the setting and the accepted value, and comes before the first rollout. A dense
decoder passes; a mixture of experts passes if every token is routed by itself: no capacity, no
dropped tokens, no auxiliary loss, no noise. An expert bias that follows the load is allowed.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_forest_trainer.model.hf_config import UnsupportedModelError


def check_model(module: Any) -> None:
    """Refuse a model whose rows would depend on each other or on chance.

    Raises `UnsupportedModelError`, naming the setting of the model's `TransformerConfig`.
    """
    config = module.config
    for field, accepted in (
        ("calculate_per_token_loss", True),
        ("virtual_pipeline_model_parallel_size", None),
        ("mtp_num_layers", None),
        ("hidden_dropout", 0),
        ("attention_dropout", 0),
    ):
        found = getattr(config, field)
        if found != accepted:
            _refuse(field, found, repr(accepted))
    for router in routers(module):
        _check_router(router)


def routers(module: Any) -> list[Any]:
    """The routers of a mixture of experts; none in a dense model."""
    return [part for part in module.modules() if hasattr(part, "routing_type")]


def _check_router(router: Any) -> None:
    config = router.config
    kinds = router.routing_type
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds):
        _refuse("moe_router_load_balancing_type", kinds, "'none' (routing of each token by itself)")
    if router.is_aux_loss_enabled():
        _refuse("moe_aux_loss_coeff", config.moe_aux_loss_coeff, "0 (no auxiliary loss)")
    for field in ("moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_input_jitter_eps"):
        if getattr(config, field):
            _refuse(field, getattr(config, field), "None")
    if config.moe_router_force_load_balancing:
        _refuse("moe_router_force_load_balancing", True, "False")
    if (
        router.enable_expert_bias
        and config.sequence_parallel
        and config.pipeline_model_parallel_size > 1
    ):
        _refuse(
            "moe_router_enable_expert_bias",
            True,
            "False together with sequence_parallel and pipeline_model_parallel_size > 1 "
            "(Megatron-Core does not split the padding mask on later stages)",
        )


def _refuse(field: str, found: object, accepted: str) -> None:
    raise UnsupportedModelError(
        f"the loaded model has {field} {found!r}; training on forest rows needs {accepted}"
    )


def mask_expert_load(module: Any) -> bool:
    """Let the routers' load counts leave out the positions of a `padding_mask`.

    Returns whether the model has a bias that follows the load, so that a mask matters.
    Megatron-Core below 0.20 combines the mask and the routes with shapes that do not fit; each
    router of this model gets a method of its own that fits.
    """
    biased = [router for router in routers(module) if router.enable_expert_bias]
    for router in biased:
        router._apply_expert_bias = types.MethodType(_count_real_tokens, router)
    return bool(biased)


@contextmanager
def kept_expert_biases(module: Any) -> Iterator[None]:
    """Put the biases that follow the load back if the step inside raises.

    Megatron-Core moves them when it has summed the gradients, before the optimizer steps.
    """
    biased = [router for router in routers(module) if router.enable_expert_bias]
    kept = [router.expert_bias.clone() for router in biased]
    try:
        yield
    except BaseException:
        for router, bias in zip(biased, kept, strict=True):
            router.expert_bias.copy_(bias)
            router.local_tokens_per_expert.zero_()
        raise


def _count_real_tokens(
    router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    """Add a microbatch's routes `[tokens, experts]` to the load; masked tokens are left out."""
    if not torch.is_grad_enabled():
        return
    with torch.no_grad():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        router.local_tokens_per_expert += routing_map.sum(dim=0)
