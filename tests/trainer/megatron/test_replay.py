"""Replayed routes: every token goes where the engine sent it, in every layout and every pass."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from forest_schema.routes import ROUTES
from megatron_forest_trainer.core.plan import FixedShape, ForestShape

from tests.support.distributed import run_ranks
from tests.trainer.megatron.routing import (
    EXPERTS,
    LAYERS,
    TOP_K,
    capture,
    capture_random,
    context_routes,
    sent_along,
)
from tests.trainer.megatron.support import (
    BRANCHES,
    CHAIN,
    Rollout,
    make_config,
    make_step,
    oracle_of,
    random_rollout,
    run_step,
)
from tests.trainer.megatron.test_mixture_parallel import CFG, EXPERT, PIPELINE, SEQUENCE
from tests.trainer.megatron.test_parallel import (
    ADVANTAGES,
    CONTEXT,
    SHIFT,
    assert_matches_oracle,
    shape_of,
)

REPLAY = {"policy__router_replay__enabled": True}
RECOMPUTE = {f"{CFG}activation_checkpointing": True}
FOREST = {"policy__forest_execution__enabled": True}
LAYOUTS = {
    "one": (1, 1, "fixed", {}),
    "data-fixed": (2, 2, "fixed", {}),
    "expert-recompute": (2, 2, "packed", EXPERT | RECOMPUTE),
    "pipeline-recompute": (2, 1, "packed", PIPELINE | RECOMPUTE),
    "sequence-expert": (2, 1, "fixed", SEQUENCE | EXPERT),
    "context": (2, 1, "packed", CONTEXT),
    "forest": (1, 1, "forest", FOREST),
    "forest-expert-recompute": (2, 2, "forest", FOREST | EXPERT | RECOMPUTE),
    "forest-sequence-expert-pipeline-recompute": (
        4,
        1,
        "forest",
        FOREST | SEQUENCE | EXPERT | PIPELINE | RECOMPUTE,
    ),
}
"""Name -> (ranks, data-parallel ranks, form, configuration)."""


def routed_rollouts() -> list[Rollout]:
    """Branches that share a parent, and a chain; two calls were captured without routes."""
    return [
        capture_random(random_rollout("x", BRANCHES, seed=1), seed=3, without=("d",)),
        capture_random(random_rollout("y", CHAIN, seed=2), seed=4, without=("b",)),
    ]


def load_mixture(directory, dtype=torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").to(dtype)


@pytest.fixture(scope="module")
def oracle(mixture):
    model, rollouts = load_mixture(mixture), routed_rollouts()
    routes = {
        rollout.context(record.call_id).tobytes(): context_routes(rollout, record.call_id)
        for rollout in rollouts
        for record in rollout.records
    }

    def logits_of(ids):
        with sent_along(model, routes[ids.numpy().astype(np.int32).tobytes()]):
            return model(ids[None]).logits[0]

    return oracle_of(model, logits_of, rollouts, ADVANTAGES, previous_shift=SHIFT)


@pytest.mark.requirement("F11", "K5")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_matches_the_per_call_oracle(mixture, oracle, layout):
    ranks, data_parallel, form, overrides = LAYOUTS[layout]
    shape = (
        ForestShape(data_parallel=data_parallel, max_tokens=48, across_rollouts=True, routed=True)
        if form == "forest"
        else shape_of(form, data_parallel)
    )
    step = make_step(routed_rollouts(), ADVANTAGES, shape)
    config = make_config(**overrides, **REPLAY)
    results = run_ranks(run_step, config, mixture, step, SHIFT, ranks=ranks)
    assert_matches_oracle(results, oracle)


ONE_BY_ONE = FixedShape(data_parallel=1, train_micro_batch=1, logprob_micro_batch=1)


@pytest.mark.requirement("F11")
def test_the_reference_model_goes_the_same_way(mixture):
    step = make_step(routed_rollouts(), ADVANTAGES, ONE_BY_ONE)
    config = make_config(loss_fn__reference_policy_kl_penalty=0.1, **REPLAY)
    (result,) = run_ranks(run_step, config, mixture, step)
    # Before the first step it has the same weights, so on the same routes it says the same.
    assert result["stats"]["kl"] == 0


def engine_rollout(model, seed: int, length: int = 40) -> Rollout:
    """One call, sampled from `model` with its routes and log-probabilities, as an engine does."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (8,), generator=generator).tolist()
    logprobs = []
    with torch.no_grad():
        for _ in range(length):
            distribution = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
            ids.append(int(torch.multinomial(distribution.exp(), 1, generator=generator)))
            logprobs.append(float(distribution[ids[-1]]))
        router_logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    routes = [layer.float().topk(TOP_K, dim=-1).indices.numpy() for layer in router_logits]
    rollout = Rollout(f"r{seed}")
    rollout.call("a", None, ids[:8], ids[8:], logprobs)
    capture(rollout, "a", np.stack(routes, axis=1))
    return rollout


@pytest.mark.requirement("F11")
def test_replay_brings_the_trainer_closer_to_an_engine_that_rounds(mixture, tmp_path):
    """A bfloat16 engine whose router hardly tells its experts apart sends tokens elsewhere."""
    model = load_mixture(mixture)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight *= 0.02
            layer.mlp.experts.down_proj *= 3
    model.save_pretrained(tmp_path / "near-ties")
    engine = load_mixture(tmp_path / "near-ties", torch.bfloat16)
    rollouts = [engine_rollout(engine, seed) for seed in range(4)]
    step = make_step(rollouts, {f"r{seed}": 1.0 for seed in range(4)}, ONE_BY_ONE)
    errors = []
    for overrides in ({}, REPLAY):
        config = make_config(**overrides)
        (result,) = run_ranks(run_step, config, tmp_path / "near-ties", step)
        sums = [error["mult"] / error["tokens"] - 1 for error in result["errors"].values()]
        errors.append(float(np.mean(sums)))
    live, replayed = errors
    assert replayed < 0.7 * live, errors


def refusal(config, hf_dir) -> str:
    from megatron_forest_trainer.learner import Learner
    from megatron_forest_trainer.model.hf_config import UnsupportedModelError

    try:
        Learner(config, hf_dir)
    except UnsupportedModelError as error:
        return str(error)
    return "accepted"


@pytest.mark.requirement("K5", "K10")
def test_a_model_without_experts_is_refused(untied):
    (message,) = run_ranks(refusal, make_config(**REPLAY), untied)
    assert message == (
        "policy.router_replay.enabled is true, but the model has no experts; remove it"
    )


def misuse() -> dict[str, str]:
    """What malformed routes and forgotten passes are told; one fresh model."""
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron_forest_trainer.model.hf_config import UnsupportedModelError
    from megatron_forest_trainer.model.replay import RoutingReplay

    from tests.trainer.megatron.mixtures import make_mixture

    found = {}

    def told(name, act):
        try:
            act()
        except (ValueError, RuntimeError, UnsupportedModelError) as error:
            found[name] = str(error)
        else:
            found[name] = "accepted"

    module = make_mixture()
    module.eval()
    replay = RoutingReplay(module)
    found["instances"] = str(len(RouterReplay.global_router_replay_instances))
    tokens = torch.arange(6)[None]
    good = torch.tensor([1, 3]).expand(1, 6, LAYERS, TOP_K)

    def changed(row):
        routes = good.clone()
        routes[0, 2, 1] = torch.tensor(row)
        return routes

    def run(routes):
        with replay.passing(), torch.no_grad():
            if routes is not None:
                replay.load(routes)
            module(tokens, tokens, None)

    def unused():
        with replay.passing():
            replay.load(good)

    told("good", lambda: run(good))
    told("missing", lambda: run(changed([-1, -1])))
    for name, row in (("twice", [1, 1]), ("unknown", [0, EXPERTS]), ("partial", [-1, 2])):
        told(name, lambda row=row: run(changed(row)))
    told("too few", lambda: run(good[:, :5]))
    told("absent", lambda: run(None))
    told("unused", unused)
    module.config.moe_router_fusion = True
    told("fused", lambda: RoutingReplay(module))
    return found


@pytest.mark.requirement("XR2", "K5")
def test_malformed_and_forgotten_routes_are_told():
    (found,) = run_ranks(misuse)
    assert found == {
        "instances": "0",
        "good": "accepted",
        "missing": "accepted",
        "twice": "layer 2: the route [1, 1] of a token is no choice of different experts of 4",
        "unknown": "layer 2: the route [0, 4] of a token is no choice of different experts of 4",
        "partial": "layer 2: the route [-1, 2] of a token is no choice of different experts of 4",
        "too few": "layer 1: routes [5, 2] for 6 tokens with 2 experts each",
        "absent": "layer 1: a forward pass without routes; with policy.router_replay.enabled the "
        "model runs inside the learner's passes only",
        "unused": "routes for 2 runs of a layer were not used",
        "fused": "policy.router_replay.enabled is true, but the loaded model has "
        "moe_router_fusion True; replay needs False",
    }


class Dense(torch.nn.Module):
    """A layer without experts."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden, None


def behind_a_dense_layer() -> list[list[int]]:
    """Experts of each token in the only layer that has some."""
    from megatron_forest_trainer.model.replay import RoutingReplay

    from tests.trainer.megatron.mixtures import make_mixture

    module = make_mixture()
    module.eval()
    module.decoder.layers[0].mlp = Dense()
    replay = RoutingReplay(module)
    tokens = torch.arange(3)[None]
    routes = torch.zeros(1, 3, LAYERS, TOP_K, dtype=torch.int32)
    routes[0, :, 1] = torch.tensor([[1, 3], [3, 0], [2, 1]])
    chosen = []
    module.decoder.layers[1].mlp.router.register_forward_hook(
        lambda _, __, output: chosen.extend(row.nonzero().flatten().tolist() for row in output[1])
    )
    with replay.passing(), torch.no_grad():
        replay.load(routes)
        module(tokens, tokens, None)
    return chosen


@pytest.mark.requirement("F11", "K5")
def test_the_rows_of_a_dense_layer_are_not_routes():
    """An engine reports zeros for it: the same expert twice, if they were experts."""
    (chosen,) = run_ranks(behind_a_dense_layer)
    assert chosen == [[1, 3], [0, 3], [1, 2]]


def other_model(config, hf_dir, step) -> str:
    from megatron_forest_trainer.core.errors import IntegrityError
    from megatron_forest_trainer.learner import Learner

    try:
        Learner(config, hf_dir).logprobs(step.decoded, step.reader)
    except IntegrityError as error:
        return str(error)
    return "accepted"


@pytest.mark.requirement("XR2")
def test_routes_of_another_model_are_refused(mixture):
    rollout = capture_random(random_rollout("x", CHAIN, seed=1), seed=3)
    for index, record in enumerate(rollout.records):
        info = msgspec.structs.replace(record.routes, layers=1)
        rollout.records[index] = msgspec.structs.replace(record, routes=info)
        delta = rollout.deltas[record.delta.key]
        delta[ROUTES] = delta[ROUTES][:, :1]
    step = make_step([rollout], {"x": 1.0}, ONE_BY_ONE)
    (message,) = run_ranks(other_model, make_config(**REPLAY), mixture, step)
    assert "routes of (layers, experts per token) (1, 2); the trained model has (2, 2)" in message
