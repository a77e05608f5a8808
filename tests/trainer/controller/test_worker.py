"""The thread that holds the learner, when its run is interrupted."""

import asyncio
import gc
import threading

import pytest
from megatron_forest_trainer.controller.channel import Channel
from megatron_forest_trainer.controller.worker import LearnerThread, Worker


def test_what_an_interruption_breaks_is_not_reported_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupted = threading.Event()

    def make() -> tuple[Worker, Channel]:
        interrupted.wait(60)
        raise RuntimeError("connection closed by peer")

    async def run() -> None:
        learner = LearnerThread()
        starting = asyncio.create_task(learner.start(make))
        await asyncio.sleep(0)
        starting.cancel()
        interrupted.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await learner.stop()

    asyncio.run(run())
    gc.collect()
    assert not caplog.records
