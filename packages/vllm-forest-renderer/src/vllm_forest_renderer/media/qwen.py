"""Images of the Qwen2-VL, Qwen2.5-VL and Qwen3-VL processors.

Guarantees: an image is one pad token in the rendered prompt and `t * h * w / merge**2` of them in
the served one; its patches are the rows of `pixel_values`, its grid is `image_grid_thw`. A prompt
or a tensor of another form is refused. Videos are not captured (see docs/limits.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from vllm_forest_renderer.media.protocol import Geometry


class QwenImages:
    """The `MediaRemapper` of these families."""

    modalities = ("image",)

    def placeholder(self, processor: Any, modality: str) -> Sequence[int]:
        """See `MediaRemapper`."""
        token: int = processor.info.get_hf_config().image_token_id
        return [token]

    def geometry(
        self, processor: Any, modality: str, tensors: Mapping[str, NDArray[Any]]
    ) -> Geometry:
        """See `MediaRemapper`."""
        grid, patches = tensors.get("image_grid_thw"), tensors.get("pixel_values")
        if grid is None or grid.shape != (3,) or patches is None or patches.ndim != 2:
            raise ValueError("expected image_grid_thw [3] and pixel_values [patches, values]")
        frames, height, width = (int(count) for count in grid)
        if frames * height * width != len(patches):
            raise ValueError(f"a grid of {frames}x{height}x{width} with {len(patches)} patches")
        size = processor.info.get_hf_config().vision_config.patch_size
        return Geometry(grid=(frames, height, width), height=height * size, width=width * size)
