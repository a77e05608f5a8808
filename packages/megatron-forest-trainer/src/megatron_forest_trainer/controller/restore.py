"""Going on with a rollout in the middle of its attempt.

Guarantees: a snapshot holds the receipt and the selection of an unfinished rollout under the
snapshot schema and is written whole; what is restored are exactly the calls of that receipt, with
their ids, order and tokens, under a new attempt, and the old attempt admits nothing any more; the
saved selection is found again in the new attempt's receipt, or the data is refused.

For loops that hold the control token and whose harness saves its own state. The controller's own
recovery runs an interrupted rollout again.
"""

from pathlib import Path

import msgspec
from forest_schema import SNAPSHOT_SCHEMA, CallRecord, Reason, Receipt
from forest_schema.control import AttemptOpened, RestoreAttempt
from forest_schema.version import check_message_version

from megatron_forest_trainer.controller.archive import SnapshotRefused, check_mode
from megatron_forest_trainer.controller.client import ControlClient
from megatron_forest_trainer.core.errors import IntegrityError
from megatron_forest_trainer.core.selection import Selection
from megatron_forest_trainer.durable import write_whole
from megatron_forest_trainer.finalize import is_harmless


class UnfinishedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt and selection of a rollout that has no result yet."""

    schema: int = SNAPSHOT_SCHEMA
    forest_training: bool
    receipt: Receipt
    """As it stood when the harness saved its state; open or closed."""
    selected: tuple[str, ...]
    """Call ids in selection order; empty where nothing was accepted yet."""
    terminal_response_id: str | None


_DECODER = msgspec.json.Decoder(UnfinishedRollout)


def save_unfinished(
    path: Path, receipt: Receipt, selection: Selection, *, forest_training: bool
) -> None:
    """Write a snapshot of an unfinished rollout. Blocking."""
    snapshot = UnfinishedRollout(
        forest_training=forest_training,
        receipt=receipt,
        selected=tuple(record.call_id for record in selection.records),
        terminal_response_id=selection.terminal_response_id,
    )
    write_whole(path, msgspec.json.encode(snapshot))


def read_unfinished(path: Path) -> UnfinishedRollout:
    """A snapshot. Raises `SchemaError` for another schema, naming it."""
    data = path.read_bytes()
    check_message_version(data, what=f"rollout {path.name}", expected=SNAPSHOT_SCHEMA)
    return _DECODER.decode(data)


async def restore_attempt(
    client: ControlClient, snapshot: UnfinishedRollout, *, forest_training: bool
) -> AttemptOpened:
    """A new attempt with the calls of the snapshot; later calls of the old one are deleted.

    Raises `SnapshotRefused` for another forest mode or a capture that had failed before the
    snapshot, `ControlError` where the server refuses (the
    attempt was restored or deleted already), `TransportFailure`.
    """
    receipt = snapshot.receipt
    unharmed = {call.call_id for call in receipt.calls}
    harmful = [f for f in receipt.failures if not is_harmless(f, unharmed)]
    if harmful:
        raise SnapshotRefused(
            f"rollout {receipt.rollout_id}: call {harmful[0].call_id} had failed "
            f"({harmful[0].reason}), which masks the rollout; run it again instead"
        )
    check_mode(
        f"rollout {receipt.rollout_id}",
        saved_forest=snapshot.forest_training,
        forest_training=forest_training,
    )
    kept = tuple(call.call_id for call in receipt.calls)
    return await client.restore_attempt(receipt.attempt_id, RestoreAttempt(calls=kept))


def saved_selection(snapshot: UnfinishedRollout, receipt: Receipt) -> Selection:
    """The selection of the snapshot among the records of the restored attempt's `receipt`.

    Raises `IntegrityError` where a selected call is absent or is not the captured one.
    """
    saved = {call.call_id: call for call in snapshot.receipt.calls}
    found = {call.call_id: call for call in receipt.calls}
    records = []
    for call_id in snapshot.selected:
        record = found.get(call_id)
        if record is None or _identity(record) != _identity(saved[call_id]):
            raise IntegrityError(
                Reason.FOREIGN_SHARD,
                f"call {call_id} of attempt {snapshot.receipt.attempt_id} is not among the "
                f"restored calls of attempt {receipt.attempt_id}; finish the rollout with the "
                "attempt that restoring this snapshot opened",
            )
        records.append(record)
    return Selection(tuple(records), snapshot.terminal_response_id)


def _identity(record: CallRecord) -> tuple[str, str, int]:
    """What restoring leaves as it is: first owner, token chain, length."""
    return record.source_capture_key or record.capture_key, record.chain_digest, record.cum_len
