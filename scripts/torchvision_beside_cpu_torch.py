"""Lets PyPI's torchvision (a CUDA build) be imported beside a CPU torch.

`scripts/setup_env.sh` puts this module and a .pth file that imports it into the virtual
environment's site-packages. torchvision describes two operators at import that a CPU torch does
not have; their schemas are declared first. Nothing runs them: image processors need only
torchvision's pure Python. Beside a CUDA torch it does nothing.
"""

import contextlib
import importlib.abc
import sys
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Declare the operators, once, and let the next finder find torchvision."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for operator in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):
                    torch.library.define(f"torchvision::{operator}", schema)


sys.meta_path.insert(0, _BeforeTorchvision())
