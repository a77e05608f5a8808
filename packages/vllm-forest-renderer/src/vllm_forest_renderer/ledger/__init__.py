"""Ledger: the durable, token-free account of attempts and calls."""

from vllm_forest_renderer.ledger.calls import Intent
from vllm_forest_renderer.ledger.ledger import Ledger

__all__ = ["Intent", "Ledger"]
