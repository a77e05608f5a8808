"""Processor outputs as arrays, without copies, and their exact comparison.

Guarantees: an array shares the memory of the tensor that vLLM hands to the engine and keeps its
dtype; bfloat16, which numpy cannot name, is the uint16 of its bits. `same_bytes` reads each byte
at most once.
"""

import ctypes
from typing import Any

from forest_schema.media import BFLOAT16, MediaTensor
from numpy.typing import NDArray

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def to_array(name: str, value: Any) -> tuple[MediaTensor, NDArray[Any]]:
    """A tensor's description and its values. Raises `ValueError` for what is no tensor."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, expected one tensor per item")
    value = value.detach().cpu().contiguous()
    half = value.dtype is torch.bfloat16
    array: NDArray[Any] = (value.view(torch.uint16) if half else value).numpy()
    dtype = BFLOAT16 if half else array.dtype.name
    return MediaTensor(name=name, dtype=dtype, shape=tuple(array.shape)), array


def same_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two contiguous arrays of one dtype and shape hold the same bytes."""
    first, second = one.ctypes.data, other.ctypes.data
    # vLLM's processor cache hands out one tensor for one image as long as it remembers it.
    return first == second or _memcmp(first, second, one.nbytes) == 0
