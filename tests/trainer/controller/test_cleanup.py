"""When captures are deleted from the server, against the real ledger."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from forest_schema.control import OpenAttempt
from megatron_forest_trainer.controller.cleanup import Cleaner
from megatron_forest_trainer.controller.client import ControlClient
from megatron_forest_trainer.controller.journal import is_cleaned
from megatron_forest_trainer.controller.run_dir import RunDirectory
from megatron_forest_trainer.core.selection import select_responses
from megatron_forest_trainer.finalize import finalize_selection
from megatron_forest_trainer.store import open_reader
from vllm_forest_renderer.errors import AttemptError

from tests.support.scripted_server import ScriptedServer
from tests.trainer.controller.conftest import client_of


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.open(tmp_path / "run", resume=False)
    run.rollouts(1).mkdir(parents=True)
    return run


def with_client(server: ScriptedServer, body: Callable[[ControlClient], Awaitable[Any]]) -> Any:
    async def wrapped() -> Any:
        async with client_of(server) as client:
            return await body(client)

    return asyncio.run(wrapped())


async def attempt(
    server: ScriptedServer, client: ControlClient, run: RunDirectory, *, pending: bool = False
) -> str:
    """A closed attempt with a committed call, and one whose write may still arrive."""
    opened = await client.open_attempt(
        OpenAttempt(rollout_id="r", group_id="g", partition=run.partition(1))
    )
    capture = server.capture
    on_server = asyncio.run_coroutine_threadsafe(capture.call(opened.attempt_id), server._loop)
    await asyncio.wrap_future(on_server)
    if pending:
        admitted = asyncio.run_coroutine_threadsafe(capture.admit(opened.attempt_id), server._loop)
        await asyncio.wrap_future(admitted)
    await client.close_attempt(opened.attempt_id, wait_s=0)
    return opened.attempt_id


def is_gone(server: ScriptedServer, attempt_id: str) -> bool:
    try:
        server.run(server.capture.ledger.receipt(attempt_id))
    except AttemptError:
        return True
    return False


def shards(server: ScriptedServer) -> int:
    return len(list(server.store.glob("*/*.safetensors")))


@pytest.mark.requirement("I7")
def test_a_trained_step_leaves_nothing_on_the_server(
    server: ScriptedServer, run: RunDirectory
) -> None:
    async def body(client: ControlClient) -> list[str]:
        attempts = [await attempt(server, client, run) for _ in range(2)]
        assert shards(server) == 2
        cleaner = Cleaner(client, run, keep_captures=False, wait_for_checkpoint=False)
        await cleaner.step_done(1, attempts)
        return attempts

    attempts = with_client(server, body)
    assert all(is_gone(server, attempt_id) for attempt_id in attempts)
    assert shards(server) == 0
    assert is_cleaned(run.rollouts(1))


@pytest.mark.requirement("I6", "I17", "C18")
def test_a_call_whose_write_may_arrive_stays_until_the_run_ends(
    server: ScriptedServer, run: RunDirectory
) -> None:
    async def body(client: ControlClient) -> None:
        late = await attempt(server, client, run, pending=True)
        cleaner = Cleaner(client, run, keep_captures=False, wait_for_checkpoint=False)
        await cleaner.step_done(1, [late])
        assert not is_cleaned(run.rollouts(1))
        assert "DELETE /v1/forest/control/partitions" not in " ".join(server.requests)
        await cleaner.run_done()
        assert server.requests[-1].endswith(f"/partitions/{run.partition(1)}")
        assert is_cleaned(run.rollouts(1))

    with_client(server, body)


@pytest.mark.requirement("I8", "J1")
def test_captures_stay_until_a_checkpoint_covers_their_step(
    server: ScriptedServer, run: RunDirectory
) -> None:
    async def body(client: ControlClient) -> None:
        kept = await attempt(server, client, run)
        cleaner = Cleaner(client, run, keep_captures=False, wait_for_checkpoint=True)
        await cleaner.step_done(1, [kept])
        assert shards(server) == 1
        await cleaner.checkpoint_saved()
        assert shards(server) == 0

    with_client(server, body)


def test_captures_can_be_kept(server: ScriptedServer, run: RunDirectory) -> None:
    async def body(client: ControlClient) -> None:
        kept = await attempt(server, client, run)
        cleaner = Cleaner(client, run, keep_captures=True, wait_for_checkpoint=False)
        await cleaner.step_done(1, [kept])
        await cleaner.run_done()
        assert shards(server) == 1

    with_client(server, body)


@pytest.mark.requirement("I8")
def test_a_failed_deletion_is_repeated_and_does_not_stop_training(
    server: ScriptedServer, run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    # A vLLM server in the same process raises the root logger's level.
    caplog.set_level("WARNING", logger="megatron_forest_trainer")

    async def body(client: ControlClient) -> None:
        kept = await attempt(server, client, run)
        cleaner = Cleaner(client, run, keep_captures=False, wait_for_checkpoint=False)
        async with ControlClient("http://127.0.0.1:9", "t", attempts=1) as nowhere:
            cleaner.client = nowhere
            await cleaner.step_done(1, [kept])
        assert "was not deleted" in caplog.text
        cleaner.client = client
        await cleaner.run_done()
        assert shards(server) == 0

    with_client(server, body)


@pytest.mark.requirement("L6", "E34", "E35", "E33")
def test_an_adapter_without_a_gateway_drives_finalisation_and_cleanup(
    server: ScriptedServer, run: RunDirectory
) -> None:
    """An independent episode knows its actions by the response ids that it got, and a score."""

    async def body(client: ControlClient) -> None:
        opened = await client.open_attempt(
            OpenAttempt(rollout_id="episode-7", group_id="g", partition=run.partition(1))
        )
        capture = server.capture

        async def act(parent: Any = None) -> Any:
            call = asyncio.run_coroutine_threadsafe(
                capture.call(opened.attempt_id, parent), server._loop
            )
            return await asyncio.wrap_future(call)

        first = await act()
        rejected = await act(first)
        second = await act(first)
        actions, score = [first.output.response_id, second.output.response_id], 0.75

        receipt = await client.close_attempt(opened.attempt_id, wait_s=0)
        selection = select_responses(receipt.calls, actions, scored=actions[-1])
        with open_reader(store_path=server.store) as reader:
            finalized = finalize_selection(receipt, selection, reader)
        assert score == 0.75
        (row,) = finalized.rows
        assert [call.call_id for call in row.path] == [first.call_id, second.call_id]
        assert rejected.call_id not in finalized.selected
        # Cleanup starts from the whole receipt, rejected calls included.
        cleaner = Cleaner(client, run, keep_captures=False, wait_for_checkpoint=False)
        await cleaner.step_done(1, [receipt.attempt_id])
        assert is_gone(server, receipt.attempt_id)
        assert shards(server) == 0

    with_client(server, body)
