"""Hugging Face checkpoint directories in and out.

Guarantees: every parameter of the model is loaded or the load fails; an export is a directory that
appears at once and complete (written beside its final name, synced, renamed), bit-equal to what was
loaded when nothing was trained, with the source's configuration and tokenizer files beside the
weights.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_forest_trainer.durable import publish_folder
from megatron_forest_trainer.model import weight_map
from megatron_forest_trainer.model.hf_config import ModelShape
from megatron_forest_trainer.model.transformer import padded_vocab_size

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class HFCheckpoint:
    """Tensors of a Hugging Face directory by name, from one file or from an index's shards."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index, single = directory / INDEX_FILE, directory / SINGLE_FILE
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif single.is_file():
            with safe_open(single, framework="pt") as handle:
                files = dict.fromkeys(handle.keys(), SINGLE_FILE)
        else:
            raise FileNotFoundError(
                f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors "
                "checkpoints are read"
            )
        self.files = files
        self._handles: dict[str, Any] = {}

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU."""
        file = self.files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self.directory / file, framework="pt")
        return self._handles[file].get_tensor(name)


def load_weights(model: Any, shape: ModelShape, directory: Path) -> None:
    """Fill every parameter of this rank's `model` from the checkpoint in `directory`.

    Raises `ValueError` for missing, unknown or misshapen tensors.
    """
    checkpoint = HFCheckpoint(directory)
    weight_map.check_checkpoint_names(
        frozenset(checkpoint.files), shape, where=str(checkpoint.directory)
    )
    _check_tower_names(model, shape, checkpoint)
    vocab_rows = padded_vocab_size(
        shape.vocab_size, parallel_state.get_tensor_model_parallel_world_size()
    )
    with torch.no_grad():
        for name, parameter in canonical_parameters(model, shape):
            full = weight_map.merge_parameter(name, checkpoint.read, shape, vocab_rows=vocab_rows)
            group = _division(parameter)
            if group is not None:
                full = weight_map.slice_for_rank(
                    name,
                    full,
                    partition_dim=parameter.partition_dim,
                    rank=group.rank(),
                    ranks=group.size(),
                )
            if full.shape != parameter.shape:
                raise ValueError(
                    f"{directory}: {' + '.join(weight_map.hugging_face_names(name))} gives shape "
                    f"{tuple(full.shape)} where config.json implies {tuple(parameter.shape)}"
                )
            parameter.copy_(full)


def export_weights(
    model: Any, shape: ModelShape, source: Path, target: Path, *, dtype: torch.dtype
) -> None:
    """Write the model as the Hugging Face directory `target`; collective over all ranks.

    `source` is the directory that the model came from: its other files are copied. A tensor is
    written by the first of the ranks that hold the same part of the model. Raises
    `FileExistsError` where `target` exists, on every rank.
    """
    if _any_rank(target.exists()):
        raise FileExistsError(f"{target}: exists; an export never overwrites a checkpoint")
    partial = target.with_name(f".{target.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    written: dict[str, str] = {}
    size = 0
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _export_tensors(model, shape, dtype):
        nbytes = tensor.numel() * tensor.element_size()
        if tensors and size + nbytes > MAX_SHARD_BYTES:
            _write_shard(partial, tensors, written)
            tensors, size = {}, 0
        tensors[name] = tensor
        size += nbytes
    if tensors:
        _write_shard(partial, tensors, written)
    gathered: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, written)
    if dist.get_rank() == 0:
        files = {name: file for part in gathered if part for name, file in part.items()}
        _write_index(partial, files)
        _copy_other_files(source, partial)
        publish_folder(partial, target)
    dist.barrier()


def _check_tower_names(model: Any, shape: ModelShape, checkpoint: HFCheckpoint) -> None:
    """The checkpoint has exactly the tensors of the tower, on the stage that holds it."""
    if shape.vision is None or not parallel_state.is_pipeline_first_stage():
        return
    prefix = weight_map.TOWER_PREFIX
    found = {name for name in checkpoint.files if name.startswith(prefix)}
    wanted = {prefix + name for name, _ in model.vision_model.named_parameters()}
    if found != wanted:
        listed = ", ".join(sorted(found ^ wanted)[:5])
        raise ValueError(
            f"{checkpoint.directory}: the vision tower's tensors are not those of config.json; "
            f"missing or unknown: {listed}"
        )


def _any_rank(flag: bool) -> bool:
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def _is_expert(parameter: torch.Tensor) -> bool:
    """Megatron marks what it does not reduce over all data-parallel ranks."""
    return not getattr(parameter, "allreduce", True)


def _division(parameter: torch.Tensor) -> Any:
    """The group over which `parameter` is divided; None where each rank holds all of it."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if _is_expert(parameter)
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group if group.size() > 1 else None


def _writes(parameter: torch.Tensor) -> bool:
    """Whether this rank exports `parameter` for all that hold the same part of the model."""
    if _is_expert(parameter):
        return (
            parallel_state.get_expert_tensor_parallel_rank() == 0
            and parallel_state.get_expert_data_parallel_rank() == 0
        )
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def canonical_parameters(model: Any, shape: ModelShape) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters under their names in the whole model."""
    first_layer = get_transformer_layer_offset(model.config)
    experts = shape.mixture.experts if shape.mixture is not None else 0
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * (experts // ranks)
    for local_name, parameter in model.named_parameters():
        name = weight_map.canonical_name(
            local_name, first_layer=first_layer, first_expert=first_expert
        )
        if shape.tied_embeddings and name == "output_layer.weight":
            # A last pipeline stage holds its own copy of the tied embedding.
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def _export_tensors(
    model: Any, shape: ModelShape, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Undivided Hugging Face tensors that this rank writes; collective over all ranks."""
    first_stage = parallel_state.is_pipeline_first_stage()
    for name, parameter in canonical_parameters(model, shape):
        if name == "embedding.word_embeddings.weight" and not first_stage:
            continue
        full = join_parameter(name, parameter, parameter.detach())
        if not _writes(parameter):
            continue
        for hugging_face, tensor in weight_map.to_hugging_face(name, full, shape).items():
            yield hugging_face, tensor.to(device="cpu", dtype=dtype).contiguous()


def join_parameter(name: str, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """`values`, divided over ranks as `parameter` is, in one; collective over these ranks."""
    group = _division(parameter)
    if group is None:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return weight_map.join_ranks(name, parts, partition_dim=parameter.partition_dim)


def _write_shard(
    directory: Path, tensors: dict[str, torch.Tensor], written: dict[str, str]
) -> None:
    number = len(set(written.values()))
    file = f"model-rank{dist.get_rank():05d}-{number:05d}.safetensors"
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        directory / file,
        metadata={"format": "pt"},
    )
    written |= dict.fromkeys(tensors, file)


def _write_index(directory: Path, files: dict[str, str]) -> None:
    if len(set(files.values())) == 1:
        (directory / next(iter(files.values()))).rename(directory / SINGLE_FILE)
        return
    total = sum((directory / file).stat().st_size for file in set(files.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_other_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)
