r"""Train on captured forests inside a plain Megatron-Core loop.

The parts of `megatron_forest_trainer` are taken one by one: the dataset, the collator, and the
forward step with its loss function. Model, optimizer, schedule and loop are Megatron's own, and any
GPT-like model can stand in the place of the one that is built here.

    torchrun --nproc-per-node 2 examples/megatron_lm/train.py \
        --model MODEL_DIR --forests groups.jsonl --store STORE_DIR --export OUT_DIR

`groups.jsonl` is written by `megatron_forest_trainer.data.dataset.write_forest_file`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_forest_trainer.config.schema import LossConfig
from megatron_forest_trainer.data.collate import Collator, Microbatch, RowInput
from megatron_forest_trainer.data.dataset import ForestDataset, ForestDatasetConfig
from megatron_forest_trainer.execution import METRIC_SUMS, Passes
from megatron_forest_trainer.model import parallel
from megatron_forest_trainer.model.hf_config import read_model_shape
from megatron_forest_trainer.model.hf_io import export_weights, load_weights
from megatron_forest_trainer.model.transformer import build_model, transformer_config


class NoTokenizer:
    """Tokens come captured; Megatron asks a dataset's tokenizer for its identity only."""

    unique_identifiers = {"class": "NoTokenizer"}  # noqa: RUF012 - the attribute Megatron reads


def main() -> None:
    args = parse_args()
    if args.cpu:
        from megatron_forest_trainer.testing import cpu

        cpu.enable()
        print("running Megatron-Core on the CPU through megatron_forest_trainer.testing.cpu")
    layout = parallel.Parallelism(tensor=args.tensor_parallel)
    parallel.initialize(layout, seed=0)

    shape = read_model_shape(args.model)
    config = transformer_config(shape, layout)
    module = build_model(shape, config)
    load_weights(module, shape, args.model)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=args.lr, clip_grad=1.0), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss

    dataset_config = ForestDatasetConfig(
        random_seed=0,
        sequence_length=shape.max_position_embeddings,
        blend=([str(args.forests)], None),
        split="1,0,0",
        tokenizer=NoTokenizer(),
        path_to_cache=str(args.cache),
        store_path=str(args.store),
    )
    groups, _, _ = BlendedMegatronDatasetBuilder(
        ForestDataset, [args.steps * args.groups_per_step, 0, 0], lambda: True, dataset_config
    ).build()

    forward = Passes(module, vocab_size=shape.vocab_size, loss=LossConfig())
    collate = Collator(packed=True, device="cpu" if args.cpu else "cuda")
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    for step in range(args.steps):
        chosen = range(step * args.groups_per_step, (step + 1) * args.groups_per_step)
        rows = [row for index in chosen[rank::ranks] for row in groups[index]["rows"]]
        batches = microbatches(rows, collate)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward.forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        sums = torch.stack([result["sums"] for result in results]).sum(dim=0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        loss = sums[METRIC_SUMS.index("loss")] / sums[-1]
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.4f}, grad norm {grad_norm:.4f}, "
                  f"{int(sums[-1])} tokens", flush=True)  # fmt: skip
    if args.export is not None:
        export_weights(module, shape, args.model, args.export, dtype=torch.float32)
    parallel.shutdown()


def microbatches(rows: Sequence[RowInput], collate: Collator) -> list[Microbatch]:
    """One row per microbatch, and padding so that every data-parallel rank has as many."""
    count = torch.tensor(max(1, len(rows)), device=collate.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    padding = [RowInput(None)] * (int(count) - len(rows))
    return [collate([row], training=True) for row in [*rows, *padding]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--forests", type=Path, required=True, help="forest file")
    parser.add_argument("--store", type=Path, required=True, help="folder of the delta store")
    parser.add_argument("--cache", type=Path, required=True, help="folder for dataset indices")
    parser.add_argument("--export", type=Path, help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups-per-step", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="run without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
