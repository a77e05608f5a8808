"""Batches: layouts of rows, collators, and a Megatron-style dataset of captured forests.

Guarantees: see the modules. `layout` is pure numpy.
"""
