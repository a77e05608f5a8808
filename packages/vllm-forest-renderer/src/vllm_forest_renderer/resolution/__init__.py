"""Who the parent of a request is, decided from its messages alone.

Guarantees: resolvers are pure (no I/O, no vLLM); the built-in one is found through the same
entry-point group as a third party's; two packages with one name are refused.
"""

from vllm_forest_renderer.resolution.protocol import (
    AmbiguousParent,
    Candidate,
    MissingParentEvidence,
    PrefixResolver,
    Root,
    verify_candidate,
)

__all__ = [
    "AmbiguousParent",
    "Candidate",
    "MissingParentEvidence",
    "PrefixResolver",
    "Root",
    "verify_candidate",
]
