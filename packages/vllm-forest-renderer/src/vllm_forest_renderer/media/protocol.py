"""The contract between the capture and a family of multi-modal processors.

Guarantees asked of every remapper: pure and without state, so that one object serves all requests.
An entry point of the group `vllm_forest_renderer.media_remappers` is named as the class of vLLM's
processor that it serves (`Qwen2_5_VLMultiModalProcessor`) and is a class or factory without
arguments. A processor without one is refused: nobody has shown that its prompts can be spliced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a processor cut one item into."""

    grid: tuple[int, int, int]
    """Patches as (time, height, width)."""
    height: int
    """Pixels that were cut into patches."""
    width: int
    frames: int = 1


@runtime_checkable
class MediaRemapper(Protocol):
    """Knows the prompts and the tensors of one processor family."""

    modalities: Sequence[str]
    """Modalities that are captured; any other is refused."""

    def placeholder(self, processor: Any, modality: str) -> Sequence[int]:
        """Token ids by which a rendered prompt stands for one item before vLLM's `processor`
        expands them. The expansion must depend on the item alone, and replace all of them.
        """
        ...

    def geometry(
        self, processor: Any, modality: str, tensors: Mapping[str, NDArray[Any]]
    ) -> Geometry:
        """Geometry of an item from its processor outputs. Raises `ValueError` where they have
        another form than the family's.
        """
        ...
