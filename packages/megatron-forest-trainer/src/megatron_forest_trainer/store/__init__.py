"""Reading captured tensors by the addresses that a receipt holds."""

from megatron_forest_trainer.store.reader import (
    FolderReader,
    HttpReader,
    StoreReader,
    open_reader,
)

__all__ = ["FolderReader", "HttpReader", "StoreReader", "open_reader"]
