"""Saving and restoring the learner's state with Megatron's distributed checkpoints.

Guarantees: a checkpoint directory appears at once and complete; a resumed run on the same layout
continues bit for bit like an uninterrupted one; weights and optimizer state can be read back under
another tensor-, pipeline- or data-parallel layout; hyperparameters are those of the resumed run's
configuration, and the schedule goes on from the checkpoint's step. A checkpoint of another schema
version, or of another kind of optimizer, is refused.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forest_schema.version import SNAPSHOT_SCHEMA, check_version
from megatron.core import dist_checkpointing, parallel_state

from megatron_forest_trainer.durable import publish_folder
from megatron_forest_trainer.optimization import Trainable

_FORMAT = ("torch_dist", 1)
_GROUP_STATE = ("params", "step")
"""What an optimizer's parameter group holds beside hyperparameters."""
_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells the parameter groups of one optimizer apart, whatever the learning rate."""


def save_checkpoint(trainable: Trainable, directory: Path, *, step: int) -> None:
    """Write the state after `step` optimizer steps into the new `directory`; collective.

    Raises `FileExistsError`, on every rank, where `directory` exists, and `ValueError` before the
    first step: the optimizer has no state, and the run can start from its model again.
    """
    if step == 0:
        raise ValueError(f"{directory}: nothing to save before the first optimizer step")
    if _from_rank_0(directory.exists()):
        raise FileExistsError(f"{directory}: exists; a checkpoint is never overwritten")
    partial = directory.with_name(f".{directory.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(trainable, step=step, loading=False)
    dist_checkpointing.save(state, str(partial), _FORMAT)
    dist.barrier()
    if dist.get_rank() == 0:
        publish_folder(partial, directory)
    dist.barrier()


def load_checkpoint(trainable: Trainable, directory: Path) -> int:
    """Restore the state that `save_checkpoint` wrote; collective. Returns its step.

    Raises `FileNotFoundError`, `forest_schema.SchemaError`, and `ValueError` where the checkpoint
    is of the distributed optimizer and this run's is not, or has an optimizer of its own for
    experts and this run has none, or the other way round.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no checkpoint directory")
    common = dist_checkpointing.load_common_state_dict(str(directory))
    check_version(
        common.get("forest_schema", 0), (), what=f"checkpoint {directory}", expected=SNAPSHOT_SCHEMA
    )
    saved, wanted = common["distributed_optimizer"], _distributed(trainable.optimizer)
    if saved != wanted:
        raise ValueError(
            f"checkpoint {directory}: written with policy.megatron_cfg.optimizer."
            f"use_distributed_optimizer: {str(saved).lower()}; resume with the same value"
        )
    parts = len(_parts(trainable.optimizer))
    if common.get("optimizer_parts", 1) != parts:
        raise ValueError(
            f"checkpoint {directory}: policy.megatron_cfg.expert_model_parallel_size was "
            f"{'1' if parts > 1 else 'above 1'} (the optimizer keeps experts apart where it is "
            "above 1); resume with such a value"
        )
    with _repaired_torch_adam(trainable.optimizer):
        state = dist_checkpointing.load(
            _sharded_state(trainable, step=0, loading=True), str(directory)
        )
        trainable.model.module.load_state_dict(state["model"], strict=True)
        _replace_hyperparameters(state["optimizer"], trainable.optimizer.param_groups)
        # The distributed optimizer's float32 weights are views of parameters that need gradients.
        with torch.no_grad():
            trainable.optimizer.load_state_dict(state["optimizer"])
    trainable.scheduler.num_steps = 0
    # Counts on to the checkpoint's step and sets the learning rate that follows from it.
    trainable.scheduler.step(increment=state["scheduler"]["num_steps"])
    step: int = state["step"]
    return step


def _sharded_state(trainable: Trainable, *, step: int, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = trainable.model.module.sharded_state_dict(metadata=metadata)
    return {
        "forest_schema": SNAPSHOT_SCHEMA,
        "distributed_optimizer": _distributed(trainable.optimizer),
        "optimizer_parts": len(_parts(trainable.optimizer)),
        "step": step,
        "model": model,
        "optimizer": trainable.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        ),
        "scheduler": trainable.scheduler.state_dict(),
    }


def _replace_hyperparameters(saved: Any, own_groups: Sequence[dict[str, Any]]) -> None:
    """Put this run's hyperparameters into every parameter group of a loaded optimizer state.

    Megatron takes them from the checkpoint, and from 0.19 on does not even find a group whose
    learning rate has changed.
    """
    if isinstance(saved, dict):
        for group in saved.get("param_groups", ()):
            identity = [group.get(key) for key in _GROUP_IDENTITY]
            for own in own_groups:
                if identity == [own.get(key) for key in _GROUP_IDENTITY]:
                    group.update({k: v for k, v in own.items() if k not in _GROUP_STATE})
        for value in saved.values():
            _replace_hyperparameters(value, own_groups)


def _from_rank_0(value: bool) -> bool:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def _repaired_torch_adam(optimizer: Any) -> Iterator[None]:
    """Load torch's own Adam into Megatron's distributed optimizer correctly.

    It is what Megatron uses without Transformer Engine and Apex. Megatron 0.16 to 0.19 expect its
    state, which it makes only in its first step; they demand a per-parameter step that the
    reshardable format does not hold; and they give every parameter the same step tensor, which then
    advances once per parameter and changes the training silently.
    """
    affected = [
        part
        for part in _parts(optimizer)
        if _distributed(part) and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]
    for part in affected:
        _create_state(part)
        set_states = part._set_main_param_and_optimizer_states
        part._set_main_param_and_optimizer_states = _keeping_step(part, set_states)
    try:
        yield
    finally:
        for part in affected:
            del part._set_main_param_and_optimizer_states
            for state in part.optimizer.state.values():
                state["step"] = state["step"].clone()


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _distributed(optimizer: Any) -> bool:
    return all(hasattr(part, "gbuf_ranges") for part in _parts(optimizer))


def _create_state(part: Any) -> None:
    """The state that Adam itself makes in its first step."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def _keeping_step(part: Any, set_states: Any) -> Any:
    def set_with_step(model_parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = part.model_param_group_index_map[model_parameter]
        parameter = part.optimizer.param_groups[group]["params"][order]
        step = part.optimizer.state[parameter]["step"]
        set_states(model_parameter, {"step": step.clone(), **tensors})

    return set_with_step
