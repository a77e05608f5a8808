"""Token histories of captured calls, hot in memory, rebuilt from the store when cold.

Guarantees: what comes out is the call's whole history, proven by its chain digest when it was read
from the store; missing or damaged evidence is an error, never a shorter history. Lists are shared:
callers must not change them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.reasons import Reason
from forest_schema.records import CallRecord
from forest_schema.shards import TOKENS, ShardError

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.store.protocol import DeltaSink


class PrefixCache:
    """Least recently used histories, bounded by their number of tokens."""

    def __init__(self, sink: DeltaSink, *, capacity_tokens: int) -> None:
        self._sink = sink
        self._capacity = capacity_tokens
        self._held = 0
        self._histories: OrderedDict[str, list[int]] = OrderedDict()

    def put(self, call_id: str, tokens: list[int]) -> None:
        """Keep the history of a committed call."""
        previous = self._histories.pop(call_id, None)
        self._held += len(tokens) - (len(previous) if previous is not None else 0)
        self._histories[call_id] = tokens
        while self._held > self._capacity and self._histories:
            _, dropped = self._histories.popitem(last=False)
            self._held -= len(dropped)

    async def history(self, call: CallRecord, calls: Sequence[CallRecord]) -> list[int]:
        """Tokens `[call.cum_len]` of `call`, whose ancestors are among `calls`.

        Raises `ForestError` (`missing_parent_evidence`).
        """
        by_id = {record.call_id: record for record in calls}
        cold: list[CallRecord] = []
        tokens: list[int] = []
        digest = EMPTY_CHAIN
        current = call
        while True:
            held = self._histories.get(current.call_id)
            if held is not None:
                self._histories.move_to_end(current.call_id)
                tokens, digest = held, current.chain_digest
                break
            cold.append(current)
            if current.parent_call_id is None:
                break
            if current.parent_call_id not in by_id:
                raise _missing(current, "its parent is not in the ledger")
            current = by_id[current.parent_call_id]
        if not cold:
            return tokens
        tokens = list(tokens)
        for record in reversed(cold):
            try:
                delta = (await self._sink.get(record.delta))[TOKENS]
            except (ShardError, KeyError) as error:
                raise _missing(record, str(error)) from error
            digest = chain_digest(digest, delta)
            tokens.extend(delta.tolist())
            if digest != record.chain_digest or len(tokens) != record.cum_len:
                raise _missing(record, "its tokens are not the committed ones")
        self.put(call.call_id, tokens)
        return tokens


def _missing(call: CallRecord, what: str) -> ForestError:
    return ForestError(
        Reason.MISSING_PARENT_EVIDENCE, f"call {call.call_id} cannot be continued: {what}"
    )
