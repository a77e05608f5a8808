"""The pure core: from records and a harness's result to rows, advantages and a step plan.

Guarantees: no I/O, no torch, no Megatron; synchronous functions of their arguments.
"""
