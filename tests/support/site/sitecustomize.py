"""On PYTHONPATH of server processes that tests start beside a CPU torch.

PyPI's torchvision is the CUDA build, whose operators a CPU torch does not know: their schemas are
declared right before torchvision is imported (see `tests/support/transformers_cpu.py`).
"""

import contextlib
import importlib.abc
import sys
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for operator in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):
                    torch.library.define(f"torchvision::{operator}", schema)


sys.meta_path.insert(0, _DeclareOperators())
