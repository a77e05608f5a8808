"""The patches that let Megatron-Core run on a machine without CUDA.

Guarantees: `enable` does nothing where CUDA exists; it is the only place that patches torch or
Megatron; it changes where tensors are placed, never what is computed. It patches the process once,
and rewrites tensor creation in every thread that calls it.

Megatron-Core spells "my device" as `torch.cuda.current_device()` or `device="cuda"`, reads CUDA's
random state around recomputation, and asserts CUDA tensor types. Each of those is redirected to the
CPU; gloo does the rest.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class CudaToCpu(torch.overrides.TorchFunctionMode):
    """Rewrites `device="cuda"`, `pin_memory`, `Tensor.cuda()` and `Tensor.type()` to the CPU's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with CUDA placements replaced."""
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's gradient clipping asserts 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.")
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _NoStream:
    """Stands for a CUDA stream or event: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        return lambda *args, **kwargs: _NoStream()

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None


_patched = threading.Lock()
"""Held for good once the process is patched."""
_thread = threading.local()


def enable() -> bool:
    """Let Megatron-Core run on the CPU in the calling thread.

    Call it in the thread that will own the learner. Returns False, and changes nothing, where CUDA
    is available. Calling it again is harmless.
    """
    if torch.cuda.is_available():
        return False
    if _patched.acquire(blocking=False):
        _patch_torch()
        _patch_megatron()
        logger.info("CUDA is not available: Megatron-Core runs on the CPU through %s", __name__)
    if not hasattr(_thread, "mode"):
        _thread.mode = CudaToCpu()
        _thread.mode.__enter__()
    return True


def _patch_torch() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    # A device object is accepted wherever Megatron passes a device index.
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *args, **kwargs: None
    stream = _NoStream()
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.Stream = cuda.Event = cuda.stream = _NoStream
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *args, **kwargs: None


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 names it without importing it where Transformer Engine is missing.
        moe_utils.te_general_gemm = None
    # Expert-parallel split sizes must leave tensors for lists; upstream converts CUDA ones only.
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_to_host


def _split_sizes_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor
