"""Where a captured turn ends in the rendered prompt, and what the template puts behind it.

Guarantees: the cut is proven from renderings, never guessed from strings that a user can write;
where it cannot be proven the caller gets `NotProvable`. No vLLM in here: a proof asks for its
renderings.
"""

from vllm_forest_renderer.splice.boundary import NotProvable, Tail
from vllm_forest_renderer.splice.prover import Proof, TailProver, answered, answered_async

__all__ = ["NotProvable", "Proof", "Tail", "TailProver", "answered", "answered_async"]
