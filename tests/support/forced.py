"""Scripted generations, and what the engine process was really given.

A logits processor of the engine (`--logits-processors tests.support.forced:Forced`): a request
with `vllm_xargs={"force": [ids]}` generates exactly these ids, and every request's prompt ids, as
the worker sees them, are appended to the file that `FORCED_PROMPTS_FILE` names.
"""

import json
import os
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

PROMPTS_FILE_VARIABLE = "FORCED_PROMPTS_FILE"


class Forced(LogitsProcessor):
    """Leaves requests without `force` alone."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._scripts: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._scripts.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._scripts.pop(index, None)
            script = (params.extra_args or {}).get("force")
            if script:
                self._scripts[index] = ([int(token) for token in script], output)
            path = os.environ.get(PROMPTS_FILE_VARIABLE)
            if path:
                with open(path, "a") as file:
                    file.write(json.dumps({"pid": os.getpid(), "prompt": list(prompt)}) + "\n")
        for source, target, direction in batch_update.moved:
            moved, replaced = self._scripts.pop(source, None), self._scripts.pop(target, None)
            if moved is not None:
                self._scripts[target] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._scripts[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (script, output) in self._scripts.items():
            if len(output) < len(script):
                token = script[len(output)]
                value = logits[index, token].clone()
                logits[index] = float("-inf")
                logits[index, token] = value
        return logits
