"""Training checkpoints in Megatron's distributed format.

Guarantees: see `distributed`.
"""
