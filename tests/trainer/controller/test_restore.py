"""A rollout goes on in the middle of its attempt, from a snapshot that its loop saved."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from forest_schema import CallRecord, Reason, Receipt, SchemaError
from forest_schema.control import OpenAttempt
from forest_schema.items import output_evidence
from megatron_forest_trainer.controller.archive import SnapshotRefused
from megatron_forest_trainer.controller.client import ControlClient, ControlError
from megatron_forest_trainer.controller.restore import (
    read_unfinished,
    restore_attempt,
    save_unfinished,
    saved_selection,
)
from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.rows import assemble
from megatron_forest_trainer.core.selection import Selection, returned_history
from megatron_forest_trainer.core.types import DeltaReader, Row
from megatron_forest_trainer.finalize import finalize_rollout, finalize_selection
from megatron_forest_trainer.store import open_reader

from tests.support.byte_model import make_byte_model
from tests.support.capture import make_delta
from tests.support.engine import CONTROL_TOKEN
from tests.support.scripted_server import ScriptedServer

OPEN = OpenAttempt(rollout_id="r0", group_id="g0", partition="run1-step0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("server")
    with ScriptedServer(folder, make_byte_model(folder / "model"), vocab=259) as running:
        yield running


@pytest.fixture(scope="module")
def reader(server: ScriptedServer) -> Iterator[DeltaReader]:
    with open_reader(store_path=server.store) as reader:
        yield reader


def response(number: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"answer {number}"}
    return {"id": f"resp{number}", "choices": [{"message": message}]}


def capture(
    server: ScriptedServer, attempt: str, number: int, parent: CallRecord | None = None
) -> CallRecord:
    """Call `number`: the same tokens in every attempt."""
    message = {"role": "assistant", "content": f"answer {number}"}
    record: CallRecord = server.run(
        server.capture.call(
            attempt,
            parent,
            delta=make_delta(9 + number, 4 + number, seed=number),
            output=output_evidence(f"resp{number}", [message], api="chat"),
        )
    )
    return record


async def _open(server: ScriptedServer) -> str:
    async with ControlClient(server.url, CONTROL_TOKEN) as client:
        return (await client.open_attempt(OPEN)).attempt_id


async def _receipt(server: ScriptedServer, attempt: str, *, close: bool) -> Receipt:
    async with ControlClient(server.url, CONTROL_TOKEN) as client:
        if close:
            return await client.close_attempt(attempt, wait_s=1.0)
        return await client.receipt(attempt)


async def _restore(server: ScriptedServer, path: Path, *, forest_training: bool = True) -> str:
    async with ControlClient(server.url, CONTROL_TOKEN) as client:
        snapshot = read_unfinished(path)
        opened = await restore_attempt(client, snapshot, forest_training=forest_training)
        assert opened.base_path == f"/v1/forest/{opened.attempt_id}"
        return opened.attempt_id


def interrupted(server: ScriptedServer, path: Path, *, close: bool = False) -> str:
    """An attempt with a branch, saved after two accepted calls; a third call came later."""
    attempt = asyncio.run(_open(server))
    root = capture(server, attempt, 0)
    capture(server, attempt, 1, root)
    receipt = asyncio.run(_receipt(server, attempt, close=close))
    accepted = returned_history(receipt.calls, {"responses": [response(0), response(1)]})
    save_unfinished(path, receipt, accepted, forest_training=True)
    if not close:
        capture(server, attempt, 2, root)
    return attempt


def finish(server: ScriptedServer, attempt: str) -> Receipt:
    """Calls 2 and 3 branch from the root."""
    receipt = asyncio.run(_receipt(server, attempt, close=False))
    root = receipt.calls[0]
    capture(server, attempt, 2, root)
    capture(server, attempt, 3, root)
    return asyncio.run(_receipt(server, attempt, close=True))


def rows_of(receipt: Receipt, reader: DeltaReader) -> list[Row]:
    result = {"responses": [response(number) for number in range(4)]}
    final = finalize_rollout(receipt, result, reader)
    assert final.verified
    return [assemble(row, reader) for row in final.rows]


def spans(row: Row, receipt: Receipt) -> list[tuple[int, int, int, bool]]:
    position = {call.call_id: n for n, call in enumerate(receipt.calls)}
    return [(position[s.call_id], s.start, s.end, s.owned) for s in row.plan.spans]


@pytest.mark.requirement("I20", "C12", "J1", "J6", "E35")
@pytest.mark.parametrize("close", [False, True])
def test_a_restored_rollout_gives_the_rows_of_an_uninterrupted_one(
    server: ScriptedServer, reader: DeltaReader, tmp_path: Path, close: bool
) -> None:
    path = tmp_path / "r0.json"
    whole_attempt = asyncio.run(_open(server))
    root = capture(server, whole_attempt, 0)
    capture(server, whole_attempt, 1, root)
    whole = finish(server, whole_attempt)

    old = interrupted(server, path, close=close)
    new = asyncio.run(_restore(server, path))
    receipt = finish(server, new)
    assert receipt.closed
    assert [call.source_capture_key for call in receipt.calls] == [old, old, None, None]
    assert {call.capture_key for call in receipt.calls} == {new}

    rows, expected = rows_of(receipt, reader), rows_of(whole, reader)
    assert len(rows) == 3
    for row, same in zip(rows, expected, strict=True):
        assert row.plan.row_id == same.plan.row_id
        np.testing.assert_array_equal(row.tokens_T, same.tokens_T)
        np.testing.assert_array_equal(row.loss_mask_T, same.loss_mask_T)
        np.testing.assert_array_equal(row.logprobs_T, same.logprobs_T)
        assert spans(row, receipt) == spans(same, whole)


@pytest.mark.requirement("I20", "J6", "E35", "F14")
def test_the_saved_selection_is_that_of_the_restored_attempt(
    server: ScriptedServer, reader: DeltaReader, tmp_path: Path
) -> None:
    path = tmp_path / "r0.json"
    interrupted(server, path)
    snapshot = read_unfinished(path)
    receipt = asyncio.run(_receipt(server, asyncio.run(_restore(server, path)), close=True))
    selection = saved_selection(snapshot, receipt)
    # What was captured behind the snapshot did not go on: the harness will ask for it again.
    assert [call.output.response_id for call in receipt.calls] == ["resp0", "resp1"]
    assert selection == Selection(receipt.calls, "resp1")
    assert finalize_selection(receipt, selection, reader).selected == snapshot.selected
    other = asyncio.run(_open(server))
    capture(server, other, 0)
    foreign = asyncio.run(_receipt(server, other, close=True))
    changed = msgspec.structs.replace(
        receipt,
        calls=(msgspec.structs.replace(receipt.calls[0], chain_digest="0" * 32), receipt.calls[1]),
    )
    stranger = msgspec.structs.replace(
        receipt,
        calls=tuple(msgspec.structs.replace(c, source_capture_key=other) for c in receipt.calls),
    )
    for wrong in (foreign, changed, stranger):
        with pytest.raises(IntegrityError, match="not among the restored calls") as raised:
            saved_selection(snapshot, wrong)
        assert raised.value.reason is Reason.FOREIGN_SHARD


@pytest.mark.requirement("I20", "J4", "J2", "J3")
def test_a_snapshot_restores_once_and_in_its_mode(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "r0.json"
    old = interrupted(server, path)
    with pytest.raises(SnapshotRefused, match="forest_training: true"):
        asyncio.run(_restore(server, path, forest_training=False))
    new = asyncio.run(_restore(server, path))
    with pytest.raises(ControlError, match=f"restored already, as {new}") as refused:
        asyncio.run(_restore(server, path))
    assert refused.value.reason == Reason.ATTEMPT_CLOSED
    with pytest.raises(ControlError, match="restored into another attempt"):
        asyncio.run(_receipt(server, old, close=True))
    older = msgspec.json.decode(path.read_bytes()) | {"schema": 4}
    path.write_bytes(msgspec.json.encode(older))
    with pytest.raises(SchemaError, match="4"):
        read_unfinished(path)


@pytest.mark.requirement("I20", "I10")
def test_a_rollout_whose_capture_had_failed_is_not_restored(
    server: ScriptedServer, tmp_path: Path
) -> None:
    async def run() -> None:
        attempt = await _open(server)
        intent = await asyncio.to_thread(server.run, _failed_call(server, attempt))
        receipt = await _receipt(server, attempt, close=False)
        assert [failure.call_id for failure in receipt.failures] == [intent]
        path = tmp_path / "unfinished.json"
        save_unfinished(path, receipt, Selection((), None), forest_training=True)
        async with ControlClient(server.url, CONTROL_TOKEN) as client:
            with pytest.raises(SnapshotRefused, match="engine_error"):
                await restore_attempt(client, read_unfinished(path), forest_training=True)

    asyncio.run(run())


async def _failed_call(server: ScriptedServer, attempt: str) -> str:
    ledger = server.capture.ledger
    intent = await ledger.record_intent(attempt, api="chat", model="tiny")
    await ledger.record_failure(attempt, intent.call_id, Reason.ENGINE_ERROR, "scripted")
    return str(intent.call_id)
