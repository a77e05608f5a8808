"""The GRPO loop: rollouts against the running server, one optimizer step, new weights, again.

Guarantees: rank 0 runs one asyncio controller, all ranks execute the commands that it broadcasts;
tokens never pass through the controller. Every rejection happens before the first rollout.
"""
