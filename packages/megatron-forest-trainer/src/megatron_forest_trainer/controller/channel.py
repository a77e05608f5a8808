"""How rank 0 tells the other ranks what to do.

Guarantees: all ranks execute the same commands in the same order; a command holds no tensors; the
channel has its own gloo group that waits for days, so that long rollouts are no timeout and no
command mixes with the learner's collectives. A rank that fails ends its process, which makes
torchrun end all of them; rank 0 that fails between commands tells the others to stop first.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from megatron_forest_trainer.core.plan import StepPlan
from megatron_forest_trainer.model.parallel import shutdown

_LONGEST_WAIT = timedelta(days=30)


class ComputeLogprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Log-probabilities of the step's rows under the weights as they are."""

    plan: StepPlan


class TrainStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One optimizer step on a plan whose rows are those of the last `ComputeLogprobs`."""

    plan: StepPlan


class ExportWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a Hugging Face checkpoint."""

    directory: str


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the learner's state."""

    directory: str


class LoadCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the learner's state."""

    directory: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run is over."""

    error: str | None = None
    """Why, where rank 0 failed."""


Command = ComputeLogprobs | TrainStep | ExportWeights | SaveCheckpoint | LoadCheckpoint | Stop

_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class Channel:
    """Commands from rank 0 to all ranks, and their small answers back."""

    def __init__(self) -> None:
        """Collective: call it on every rank after the process group exists."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group: Any = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)

    def send(self, command: Command) -> None:
        """Rank 0: hand `command` to every other rank."""
        if self.world_size > 1:
            dist.broadcast_object_list([msgspec.msgpack.encode(command)], src=0, group=self._group)

    def receive(self) -> Command:
        """Other ranks: wait for rank 0's next command."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return _DECODER.decode(box[0])

    def gather(self, answer: Any) -> Sequence[Any] | None:
        """Every rank's token-free `answer` in rank order on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [answer]
        answers: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(answer, answers, dst=0, group=self._group)
        return answers

    def leave(self) -> None:
        """Collective, at the orderly end: destroy the process groups once every rank is here.

        A process that exits with live groups, or whose peer did, can abort in gloo's threads.
        """
        if self.world_size > 1:
            dist.barrier(group=self._group)
        shutdown()


class Stopped(RuntimeError):
    """Rank 0 ended the run with an error."""


def serve(channel: Channel, execute: Callable[[Command], Any]) -> None:
    """Other ranks: execute commands until `Stop`. Raises `Stopped` where rank 0 failed."""
    while True:
        command = channel.receive()
        if isinstance(command, Stop):
            if command.error is not None:
                raise Stopped(f"rank 0 stopped the run: {command.error}")
            return
        execute(command)
