"""Control routes: open, close, read and delete attempts; steer the engine."""

from vllm_forest_renderer.control.access import ControlToken, load_token
from vllm_forest_renderer.control.router import ControlServices, EngineControls, control_router

__all__ = ["ControlServices", "ControlToken", "EngineControls", "control_router", "load_token"]
