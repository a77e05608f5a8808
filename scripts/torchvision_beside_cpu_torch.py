"""Lets PyPI's torchvision (a CUDA build) be imported beside a CPU torch.

Run as a script, it puts itself and a .pth file that imports it into the interpreter's
site-packages. torchvision describes two operators at import that a CPU torch does not have; their
schemas are declared first. Nothing runs them: image processors need only torchvision's pure
Python. Beside a CUDA torch it does nothing.
"""

import contextlib
import importlib.abc
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

MODULE = "_torchvision_beside_cpu_torch"


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


def install() -> None:
    """Put this module and its .pth file into site-packages."""
    site = Path(sysconfig.get_path("purelib"))
    shutil.copyfile(__file__, site / f"{MODULE}.py")
    (site / f"{MODULE}.pth").write_text(f"import {MODULE}\n")


if __name__ == "__main__":
    install()
else:
    sys.meta_path.insert(0, _BeforeTorchvision())
