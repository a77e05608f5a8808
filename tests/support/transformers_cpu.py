"""transformers' model classes beside a CPU torch.

PyPI's torchvision wheel is the CUDA build; beside a CPU torch its operators are missing, and
importing it fails while it describes them. Declaring their schemas first lets it import; nothing
here runs them.
"""

import contextlib
from typing import Any


def import_transformers() -> Any:
    """The `transformers` module, with its model classes importable."""
    import torch

    if torch.version.cuda is None:
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for operator in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                torch.library.define(f"torchvision::{operator}", schema)
    import transformers

    return transformers
