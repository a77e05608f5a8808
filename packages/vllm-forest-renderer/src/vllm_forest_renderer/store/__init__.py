"""Delta store: where the tensors of captured calls live."""

from vllm_forest_renderer.store.protocol import Acknowledgement, DeltaSink, ShardFiles
from vllm_forest_renderer.store.safetensors_sink import SafetensorsSink

__all__ = ["Acknowledgement", "DeltaSink", "SafetensorsSink", "ShardFiles"]
