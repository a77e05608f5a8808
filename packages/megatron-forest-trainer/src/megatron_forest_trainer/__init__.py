"""Megatron-Core extension that trains on captured calls."""

__version__ = "0.1.0"
