"""Helpers that make the trainer runnable where no GPU is.

Guarantees: nothing here is imported by production code; only tests and the CPU demo's entry point
use it, and the entry point logs that it does.
"""
