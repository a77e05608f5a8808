"""vLLM plugin for exact-token capture."""

__version__ = "0.1.0"
