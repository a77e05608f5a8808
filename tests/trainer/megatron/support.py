"""Tiny checkpoints, synthetic captured forests, and the oracles of the Megatron tests."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from forest_schema import (
    CallRecord,
    CompletionStatus,
    OutputEvidence,
    ReplaySummary,
    SamplingRecord,
    TensorRef,
    WeightSpan,
)
from forest_schema.digests import EMPTY_CHAIN, chain_digest, delta_digest
from forest_schema.shards import LOGPROBS, TOKENS
from megatron_forest_trainer.config.load import config_from_mapping
from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.core.forest import build_rows
from megatron_forest_trainer.core.padding import pad_groups
from megatron_forest_trainer.core.plan import (
    BatchShape,
    ForestShape,
    PlannedRow,
    StepPlan,
    plan_step,
)
from megatron_forest_trainer.core.tree import shared_prefixes
from numpy.typing import NDArray

VOCAB = 61

_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "dtype": "float32",
}
"""Two layers with grouped queries."""


def tiny_checkpoint(directory: Path, *, tied: bool = False, vocab: int = VOCAB) -> Path:
    """A random two-layer Qwen3 with grouped queries, saved as transformers saves it."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=vocab, tie_word_embeddings=tied, attention_bias=False, **_TINY
    )
    return _save_random(transformers.Qwen3ForCausalLM(config), directory)


def _save_random(model: Any, directory: Path) -> Path:
    generator = torch.Generator().manual_seed(11)
    model = model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"made": "for tests"}), encoding="utf-8")
    return directory


def tiny_mixture(directory: Path) -> Path:
    """A random two-layer Qwen3 mixture of four experts, saved as transformers saves it."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **_TINY,
    )
    return _save_random(transformers.Qwen3MoeForCausalLM(config), directory)


def make_config(**overrides: Any) -> Config:
    """A small float32 configuration; `overrides` are dotted keys with `__` for the dots."""
    raw: dict[str, Any] = {}
    defaults = {
        "policy.device": "cpu",
        "policy.precision": "float32",
        "policy.max_grad_norm": None,
        "policy.megatron_cfg.optimizer.lr": 1e-3,
        "policy.megatron_cfg.optimizer.use_distributed_optimizer": False,
    }
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in (defaults | dotted).items():
        *parents, leaf = key.split(".")
        section = raw
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return config_from_mapping(raw)


@dataclass(frozen=True)
class MemoryReader:
    """Deltas by key."""

    deltas: Mapping[str, Mapping[str, NDArray[Any]]]

    def read(self, ref: TensorRef) -> Mapping[str, NDArray[Any]]:
        return self.deltas[ref.key]


@dataclass
class Rollout:
    """Captured calls of one rollout with their tokens."""

    rollout_id: str
    group_id: str = "g0"
    records: list[CallRecord] = field(default_factory=list)
    deltas: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)

    def call(
        self,
        call_id: str,
        parent: str | None,
        prompt: Sequence[int] | NDArray[Any],
        generated: Sequence[int] | NDArray[Any],
        logprobs: Sequence[float] | NDArray[Any],
        **sampling: Any,
    ) -> None:
        """Capture one call: its new prompt tokens and its generation."""
        by_id = {record.call_id: record for record in self.records}
        before = by_id[parent] if parent is not None else None
        tokens = np.concatenate([prompt, generated]).astype(np.int32)
        delta = {TOKENS: tokens, LOGPROBS: np.asarray(logprobs, np.float32)}
        key = f"{self.group_id}.{self.rollout_id}.{call_id}"
        prev_len = before.cum_len if before is not None else 0
        self.deltas[key] = delta
        self.records.append(
            CallRecord(
                attempt_id=f"att_{self.rollout_id}",
                call_id=call_id,
                capture_key=f"att_{self.rollout_id}",
                order=len(self.records),
                api="chat",
                model="tiny",
                parent_call_id=parent,
                root_reason=None if parent is not None else "no_match",
                prev_len=prev_len,
                delta_len=len(tokens),
                cum_len=prev_len + len(tokens),
                generated_len=len(generated),
                chain_digest=chain_digest(
                    before.chain_digest if before is not None else EMPTY_CHAIN, tokens
                ),
                delta=TensorRef(
                    store="s", partition="p", shard="0", key=key, digest=delta_digest(delta)
                ),
                status=CompletionStatus.COMPLETED,
                finish_reason="stop",
                replay=ReplaySummary(
                    source_item_count=1,
                    source_digest=EMPTY_CHAIN,
                    equivalence_digest=EMPTY_CHAIN,
                    render_option_digest=EMPTY_CHAIN,
                ),
                output=OutputEvidence(response_id=f"resp_{call_id}", fingerprint=EMPTY_CHAIN),
                sampling=SamplingRecord(**({"temperature": 1.0} | sampling)),
                weight_spans=(WeightSpan(start=0, end=len(generated), version="0"),),
                started_at=0.0,
                committed_at=0.0,
            )
        )

    def context(self, call_id: str) -> NDArray[np.int32]:
        """All tokens of a call, its ancestors' included, by following the parents."""
        record = {record.call_id: record for record in self.records}[call_id]
        own = self.deltas[record.delta.key][TOKENS]
        if record.parent_call_id is None:
            return own
        return np.concatenate([self.context(record.parent_call_id), own])


Shape = Sequence[tuple[str, str | None, int, int]]
"""(call id, parent, new prompt tokens, generated tokens) of each call."""

BRANCHES: Shape = (
    ("a", None, 6, 5),
    ("b", "a", 3, 4),
    ("c", "a", 2, 7),
    ("d", "a", 4, 3),
    ("e", "c", 2, 2),
    ("r", None, 9, 6),
)
"""One root with three children, one of them continued, and a second root (a rewrite)."""

CHAIN: Shape = (("a", None, 5, 4), ("b", "a", 3, 6), ("c", "b", 2, 3))


def random_rollout(
    rollout_id: str,
    shape: Shape,
    *,
    seed: int,
    group_id: str = "g0",
    sampling: Mapping[str, Mapping[str, Any]] | None = None,
) -> Rollout:
    """A rollout of the given shape with random tokens; `sampling` is per call id."""
    generator = np.random.default_rng(seed)
    rollout = Rollout(rollout_id, group_id)
    for call_id, parent, prompt, generated in shape:
        rollout.call(
            call_id,
            parent,
            generator.integers(0, VOCAB, prompt),
            generator.integers(0, VOCAB, generated),
            generator.normal(-4, 0.3, generated),
            **(sampling or {}).get(call_id, {}),
        )
    return rollout


@dataclass(frozen=True)
class Step:
    """A step's plan (encoded, as it is broadcast) and where its tensors come from."""

    plan: bytes
    reader: MemoryReader

    @property
    def decoded(self) -> StepPlan:
        return StepPlan.decode(self.plan)


def make_step(
    rollouts: Sequence[Rollout],
    advantages: Mapping[str, float],
    shape: BatchShape,
    *,
    extra_padding: int = 0,
    untrained: Sequence[str] = (),
) -> Step:
    """The plan of one step; `extra_padding` adds that many multiples of padding rows."""
    groups: dict[str, list[PlannedRow]] = {}
    deltas: dict[str, Mapping[str, NDArray[Any]]] = {}
    for rollout in rollouts:
        deltas |= rollout.deltas
        groups.setdefault(rollout.group_id, []).extend(
            PlannedRow(
                row_id=row.row_id,
                plan=row,
                advantage=advantages[rollout.rollout_id],
                train=rollout.rollout_id not in untrained,
            )
            for row in build_rows(
                rollout.records, group_id=rollout.group_id, rollout_id=rollout.rollout_id
            )
        )
    rows = list(pad_groups(list(groups.items()), shape.row_multiple))
    rows += [
        PlannedRow(row_id=f"extra/pad{n}", plan=None)
        for n in range(extra_padding * shape.row_multiple)
    ]
    reader = MemoryReader(deltas)
    shared = None
    if isinstance(shape, ForestShape):
        plans = [row.plan for row in rows if row.plan is not None]
        shared = shared_prefixes(
            plans, reader, across_rollouts=shape.across_rollouts, routed=shape.routed
        )
    return Step(plan_step(0, rows, shape, shared).encode(), reader)


def full_gradients(learner: Any) -> dict[str, NDArray[np.float32]]:
    """This rank's gradients of the step under Hugging Face names, joined over tensor-parallel
    ranks.
    """
    from megatron.core import parallel_state
    from megatron_forest_trainer.model import hf_io, weight_map

    gradients: dict[str, NDArray[np.float32]] = {}
    for name, parameter in hf_io.canonical_parameters(learner.module, learner.shape):
        if name.startswith("embedding") and not parallel_state.is_pipeline_first_stage():
            continue
        if not parameter.requires_grad:
            continue
        full = hf_io.join_parameter(name, parameter, parameter.main_grad.detach().clone())
        for key, value in weight_map.to_hugging_face(name, full, learner.shape).items():
            gradients[key] = value.numpy().copy()
    return gradients


def run_step(
    config: Config,
    hf_dir: Path,
    step: Step,
    previous_shift: float = 0.0,
    make_module: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """On every rank: log-probabilities, one training step, gradients.

    `previous_shift` is added to the log-probabilities before the step, so that ratios leave 1.
    `make_module` makes another model than the one in `hf_dir`.
    """
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir, module=make_module() if make_module else None)
    plan = step.decoded
    errors = learner.logprobs(plan, step.reader)
    previous = {key: value.copy() for key, value in learner._previous.items()}
    for value in learner._previous.values():
        value += previous_shift
    stats = learner.train_step(plan, step.reader)
    return {
        "errors": {key: msgspec.to_builtins(value) for key, value in errors.items()},
        "previous": previous,
        "stats": msgspec.to_builtins(stats),
        "gradients": (
            {name: p.main_grad.numpy().copy() for name, p in learner.module.named_parameters()}
            if make_module
            else full_gradients(learner)
        ),
    }


@dataclass(frozen=True)
class Oracle:
    """What training each call by itself, on its own full context, gives."""

    loss: float
    tokens: int
    gradients: dict[str, NDArray[np.float32]]
    logprobs: dict[tuple[str, str], NDArray[np.float32]]
    """(rollout id, call id) -> log-probabilities of the generation."""


def per_call_oracle(
    hf_dir: Path,
    rollouts: Sequence[Rollout],
    advantages: Mapping[str, float],
    *,
    previous_shift: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Oracle:
    """Hugging Face's own model, one forward pass per call, the loss written out per token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager").float()
    return oracle_of(
        model,
        lambda ids: model(ids[None]).logits[0],
        rollouts,
        advantages,
        previous_shift=previous_shift,
        clip=clip,
    )


def oracle_of(
    model: torch.nn.Module,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    rollouts: Sequence[Rollout],
    advantages: Mapping[str, float],
    *,
    previous_shift: float = 0.0,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Oracle:
    """The oracle of any model; `logits_of` maps one context `[T]` to logits `[T, V]`."""
    total, tokens = torch.zeros(()), 0
    logprobs = {}
    for rollout in rollouts:
        advantage = advantages[rollout.rollout_id]
        for record in rollout.records:
            ids = torch.from_numpy(rollout.context(record.call_id).astype(np.int64))
            logits = logits_of(ids)[record.prompt_len - 1 : -1]
            logits = logits / (record.sampling.temperature or 1.0)
            target = ids[record.prompt_len :]
            lp = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
            logprobs[rollout.rollout_id, record.call_id] = lp.detach().numpy()
            ratio = (lp - (lp.detach() + previous_shift)).exp()
            clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
            total = total + torch.maximum(-advantage * ratio, -advantage * clipped).sum()
            tokens += len(target)
    (total / tokens).backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Oracle(float(total.detach()) / tokens, tokens, _by_expert(gradients), logprobs)


def _by_expert(gradients: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """transformers computes with a layer's experts in two arrays, and saves them one by one."""
    found: dict[str, NDArray[Any]] = {}
    for name, values in gradients.items():
        prefix, dot, kind = name.partition(".experts.")
        if not dot:
            found[name] = values
            continue
        for number, expert in enumerate(values):
            path = f"{prefix}.experts.{number}"
            if kind == "down_proj":
                found[f"{path}.down_proj.weight"] = expert
            else:
                gate, up = np.split(expert, 2)
                found |= {f"{path}.gate_proj.weight": gate, f"{path}.up_proj.weight": up}
    return found


def assert_gradients_close(
    found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], atol: float
) -> None:
    """Every gradient within `atol`, with the worst one named."""
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: np.abs(found[name] - expected[name]).max())
    assert np.abs(found[worst] - expected[worst]).max() <= atol, worst


def train_and_save(
    config: Config, hf_dir: Path, step: Step, directory: Path, before: int, after: int
) -> list[dict[str, Any]]:
    """`before` steps, a checkpoint, `after` more steps; the statistics of the last ones."""
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    _steps(learner, step, before)
    learner.save(directory)
    return _steps(learner, step, after)


def resume(
    config: Config, hf_dir: Path, step: Step, directory: Path, after: int
) -> list[dict[str, Any]]:
    """A fresh learner continues from the checkpoint for `after` steps."""
    from megatron_forest_trainer.learner import Learner

    learner = Learner(config, hf_dir)
    learner.load(directory)
    return _steps(learner, step, after)


def _steps(learner: Any, step: Step, count: int) -> list[dict[str, Any]]:
    plan, stats = step.decoded, []
    for _ in range(count):
        learner.logprobs(plan, step.reader)
        stats.append(msgspec.to_builtins(learner.train_step(plan, step.reader)))
    return stats
