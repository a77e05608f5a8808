"""Captured forests as a Megatron dataset.

Guarantees: one item is one prompt group, whole: all rows of all of its rollouts, which is the unit
that splits, blends and shards may not cut; tensors are read, and their digests checked, when an
item is asked for. Built by `BlendedMegatronDatasetBuilder` like any Megatron dataset:

    builder = BlendedMegatronDatasetBuilder(ForestDataset, sizes, is_built_on_rank, config)

A forest file holds one prompt group per line, token-free (JSON Lines of `ForestGroup`); the tensors
stay in the delta store that the rows address.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from forest_schema.version import SNAPSHOT_SCHEMA, check_message_version
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from megatron_forest_trainer.core.plan import PlannedRow, StepPlan
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.types import DeltaReader
from megatron_forest_trainer.data.collate import RowInput
from megatron_forest_trainer.store import open_reader


class ForestGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt group with its rows and their advantages."""

    schema: int = SNAPSHOT_SCHEMA
    group_id: str
    rows: tuple[PlannedRow, ...]


def groups_of(plan: StepPlan) -> tuple[ForestGroup, ...]:
    """The prompt groups of a step, in its order, without padding rows."""
    groups: dict[str, list[PlannedRow]] = {}
    for row in plan.rows:
        if row.plan is not None:
            groups.setdefault(row.plan.group_id, []).append(row)
    return tuple(
        ForestGroup(group_id=group_id, rows=tuple(rows)) for group_id, rows in groups.items()
    )


def write_forest_file(path: Path, groups: Iterable[ForestGroup]) -> None:
    """Write a forest file."""
    path.write_bytes(b"".join(msgspec.json.encode(group) + b"\n" for group in groups))


class ForestFile(Sequence[ForestGroup]):
    """Prompt groups of a forest file, decoded when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            lengths = [len(line) for line in file]
        self._offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)]).astype(
            np.int64
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        """The group at `index`. Raises `SchemaError` for another version."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self._offsets[index], self._offsets[index + 1]
        with self._path.open("rb") as file:
            file.seek(int(start))
            line = file.read(int(end - start))
        check_message_version(line, what=f"{self._path}, group {index}", expected=SNAPSHOT_SCHEMA)
        return msgspec.json.decode(line, type=ForestGroup)


@dataclass
class ForestDatasetConfig(BlendedMegatronDatasetConfig):
    """Megatron's dataset configuration with the place of the tensors."""

    store_path: str = ""
    """Root folder of the delta store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.store_path:
            raise ValueError("store_path is needed: the root folder of the delta store")


class ForestDataset(MegatronDataset):
    """Prompt groups of a forest file with their tensors."""

    def __init__(
        self,
        dataset: ForestFile,
        dataset_path: str | None,
        indices: NDArray[np.integer[Any]],
        num_samples: int | None,
        index_split: Split,
        config: ForestDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._reader: DeltaReader | None = None

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: ForestFile) -> int:
        """Prompt groups of the file."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: ForestDatasetConfig) -> ForestFile:
        """Open the forest file at `dataset_path`."""
        return ForestFile(Path(dataset_path))

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MegatronDataset._key_config_attributes(), "store_path"]

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`{"group_id": str, "rows": tuple[RowInput, ...]}` of one prompt group.

        The log-probabilities before the step are the captured ones: offline, the policy to improve
        on is the one that generated.
        """
        group: ForestGroup = self.dataset[int(self.indices[index % len(self.indices)])]
        return {
            "group_id": group.group_id,
            "rows": tuple(self._input(row) for row in group.rows),
        }

    def _input(self, planned: PlannedRow) -> RowInput:
        if planned.plan is None:
            return RowInput(None)
        if self._reader is None:
            # Opened by the process that reads: a data loader's worker, not its parent.
            self._reader = open_reader(store_path=self.config.store_path)
        row = assemble(planned.plan, self._reader)
        return RowInput(
            row,
            trains=planned.train,
            advantage=planned.advantage,
            previous_N=row.logprobs_T[row.loss_mask_T],
        )
