"""Replay of captured routes in Megatron-Core's routers.

Guarantees: a token with a captured route goes to exactly these experts, weighted by the trained
router's own scores, so that the router keeps its gradient; a token without one (all -1) goes where
the trained router sends it. A layer that is computed again in the backward pass chooses as it did
the first time. Routes that are malformed, or left over after a pass, raise. Only the routers of
one model are changed, through Megatron's `router_replay` attribute.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from forest_schema import Reason
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.routes import MISSING
from megatron_forest_trainer.model.checks import routers
from megatron_forest_trainer.model.hf_config import UnsupportedModelError

_KEY = "policy.router_replay.enabled"

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The router's own choice: (scores, k, groups, groups kept) -> (chosen scores, experts)."""


class LayerReplay(RouterReplay):
    """The routes of one router, microbatch by microbatch in the order of the passes."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        # Megatron lists every instance of the process, which would mix several models.
        RouterReplay.global_router_replay_instances.remove(self)
        self._router = router
        self._ahead: deque[torch.Tensor] = deque()
        """Routes `[tokens, k]` of microbatches that the layer has not seen."""
        self._again: deque[torch.Tensor] = deque()
        """Experts that a checkpointed layer chose and will choose again."""

    def push(self, routes: torch.Tensor) -> None:
        """Add the next microbatch's routes, int64 `[tokens, k]`."""
        self._ahead.append(routes)

    def clear(self) -> int:
        """Forget everything; how many microbatches were left."""
        left = len(self._ahead) + len(self._again)
        self._ahead.clear()
        self._again.clear()
        return left

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Megatron's router in place of its top-k: chosen scores and experts `[t, k]`."""
        assert default_compute_topk is not None
        # Only a checkpointed layer has run before, without gradients, when it runs with them.
        if self._again and torch.is_grad_enabled():
            experts = self._again.popleft()
            return scores.gather(1, experts), experts
        if not self._ahead:
            raise RuntimeError(
                f"layer {self._router.layer_number}: a forward pass without routes; with {_KEY} "
                "the model runs inside the learner's passes only"
            )
        routes = self._ahead.popleft()
        if routes.shape != (len(scores), topk):
            raise RuntimeError(
                f"layer {self._router.layer_number}: routes {list(routes.shape)} for "
                f"{len(scores)} tokens with {topk} experts each"
            )
        own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        experts = torch.where(routes == MISSING, own, routes)
        if self._router.training and not torch.is_grad_enabled():
            self._again.append(experts)
        return scores.gather(1, experts), experts


class RoutingReplay:
    """Replay in all routers of this rank's part of a model."""

    def __init__(self, module: Any) -> None:
        """Raises `UnsupportedModelError` for a model without experts, or whose routers would not
        ask.
        """
        config = module.config
        if config.num_moe_experts is None:
            raise UnsupportedModelError(f"{_KEY} is true, but the model has no experts; remove it")
        for field, accepted in (("moe_router_fusion", False), ("cuda_graph_impl", "none")):
            found = getattr(config, field, accepted)
            if found != accepted:
                raise UnsupportedModelError(
                    f"{_KEY} is true, but the loaded model has {field} {found!r}; replay needs "
                    f"{accepted!r}"
                )
        self.shape: tuple[int, int] = (config.num_layers, config.moe_router_topk)
        """Layers of the whole model and experts per token: the last axes of `load`."""
        self._experts: int = config.num_moe_experts
        self._sequence_parallel: bool = config.sequence_parallel
        self._layers: list[tuple[int, LayerReplay]] = []
        for router in routers(module):
            router.router_replay = LayerReplay(router)
            self._layers.append((router.layer_number - 1, router.router_replay))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """One pass over microbatches; raises `RuntimeError` where a layer left routes unused."""
        self._clear()
        yield
        left = self._clear()
        if left:
            raise RuntimeError(f"routes for {left} runs of a layer were not used")

    def _clear(self) -> int:
        return sum(layer.clear() for _, layer in self._layers)

    def load(self, routes: torch.Tensor) -> None:
        """Routes of the next microbatch, int32 `[b, s, layers, k]`, all -1 for a token without.

        Raises `IntegrityError` for a row of a mixture's layer that names an expert twice, an expert
        that does not exist, or only some experts.
        """
        # Megatron's routers see [s, b] flattened, and under sequence parallelism a part of s.
        routes = routes.transpose(0, 1)
        if self._sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            routes = routes.chunk(ranks)[rank]
        routes = routes.flatten(0, 1)
        for number, layer in self._layers:
            self._check(number, routes[:, number])
            layer.push(routes[:, number].long())

    def _check(self, number: int, routes: torch.Tensor) -> None:
        """Check routes `[tokens, k]` of one layer; what an engine reports of a dense one is not."""
        missing = (routes == MISSING).all(dim=-1)
        ordered = routes.sort(dim=-1).values
        wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= self._experts)
        wrong |= (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
        wrong &= ~missing
        if bool(wrong.any()):
            raise IntegrityError(
                Reason.DIGEST_MISMATCH,
                f"layer {number + 1}: the route {routes[wrong][0].tolist()} of a token is no "
                f"choice of different experts of {self._experts}",
            )
