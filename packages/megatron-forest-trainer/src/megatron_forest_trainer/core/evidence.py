"""Reading which generations a harness's result accepts.

Guarantees: pure; every form becomes the same `Evidence`: generated turns in the order in which the
result shows them, with the ids and content that identify each. Nothing is matched here and nothing
is guessed: content that cannot be read raises `EvidenceError` with the path of the field.

Forms (the result is an ordinary dictionary):

- `responses`: complete responses in order, Chat completions or Responses objects;
- `response.output`: the whole accepted output, Responses items or Chat messages, observations in
  between;
- `response.output` as a list of lists, or `transitions`: snapshots of the conversation after each
  transition;
- `ng_trajectory.turns[].model_calls[]`: references by `response_id` or `model_call_id`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from forest_schema.items import ItemError, SourceItem, generated_turn

from megatron_forest_trainer.core.errors import EvidenceError

Entry = Mapping[str, Any]

# The concrete types first: the check of an abstract one is some ten times slower.
_MAPPING = (dict, Mapping)
_SEQUENCE = (list, Sequence)


@dataclass(frozen=True, slots=True)
class Turn:
    """One generated turn as the result shows it."""

    where: str
    """Path in the result, for error messages."""
    native_ids: tuple[str, ...]
    """Every id that the turn carries, native or made up by an exporter."""
    response_id: str | None
    fingerprint: str
    reasoning_fingerprint: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """Assistant items without an observation in between: one generation or several.

    `turns[i, j]` is the turn made of the items `[i, j)`.
    """

    where: str
    size: int
    turns: Mapping[tuple[int, int], Turn]


@dataclass(frozen=True, slots=True)
class Reference:
    """A generation named by id only."""

    where: str
    response_id: str | None
    call_id: str | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a result says about accepted generations. None where a form is absent."""

    responses: tuple[Turn, ...] | None
    output: tuple[Run, ...] | None
    transitions: tuple[tuple[Run, ...], ...] | None
    references: tuple[Reference, ...] | None
    response_id: str | None
    """`response.id`, which names the last response."""
    terminal_response_id: str | None


def read_evidence(result: Mapping[str, Any]) -> Evidence:
    """The evidence in a harness's result. Raises `EvidenceError` for unreadable content."""
    response = result.get("response")
    response = response if isinstance(response, _MAPPING) else {}
    output = response.get("output")
    transitions = result.get("transitions")
    if transitions is None and _is_list(output) and output and _is_list(output[0]):
        transitions, output = output, None
    return Evidence(
        responses=_responses(result.get("responses")),
        output=tuple(_runs(output, "response.output")) if _is_list(output) else None,
        transitions=_transitions(transitions),
        references=_references(result.get("ng_trajectory")),
        response_id=_id(response.get("id")),
        terminal_response_id=_id(result.get("terminal_response_id")),
    )


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, _SEQUENCE) and not isinstance(value, str | bytes)


def _id(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _responses(responses: Any) -> tuple[Turn, ...] | None:
    if responses is None:
        return None
    if not _is_list(responses):
        raise EvidenceError("responses: must be a list of response objects")
    return tuple(_response(entry, f"responses[{i}]") for i, entry in enumerate(responses))


def _response(response: Any, where: str) -> Turn:
    if not isinstance(response, _MAPPING):
        raise EvidenceError(f"{where}: must be a response object")
    choices, output = response.get("choices"), response.get("output")
    if _is_list(choices):
        if len(choices) != 1 or not isinstance(choices[0], _MAPPING):
            raise EvidenceError(f"{where}.choices: must hold exactly one choice")
        return _turn([choices[0].get("message")], "chat", where, _id(response.get("id")))
    if _is_list(output):
        return _turn(output, "responses", where, _id(response.get("id")))
    raise EvidenceError(f"{where}: neither a Chat completion nor a Responses object")


def _turn(items: Sequence[Any], api: str, where: str, response_id: str | None = None) -> Turn:
    try:
        source: SourceItem = generated_turn(items, api=api)
    except (ItemError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{where}: not a readable generation: {error}") from error
    return Turn(
        where=where,
        native_ids=source.native_ids,
        response_id=response_id,
        fingerprint=source.equivalence_fingerprint,
        reasoning_fingerprint=source.reasoning_fingerprint,
    )


def _runs(items: Sequence[Any], where: str) -> Iterator[Run]:
    """Runs of assistant items; a Chat message is a generation, and a run, of its own."""
    pending: list[Entry] = []
    start = 0
    for index, item in enumerate(items):
        if not isinstance(item, _MAPPING):
            raise EvidenceError(f"{where}[{index}]: must be an item")
        kind = item.get("type")
        if item.get("role") == "assistant" and (kind is None or "tool_calls" in item):
            yield from _items_run(pending, f"{where}[{start}]")
            pending = []
            chat = _turn([item], "chat", f"{where}[{index}]")
            yield Run(chat.where, 1, {(0, 1): chat})
        elif kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            if not pending:
                start = index
            pending.append(item)
        else:
            yield from _items_run(pending, f"{where}[{start}]")
            pending = []
    yield from _items_run(pending, f"{where}[{start}]")


def _items_run(items: Sequence[Entry], where: str) -> Iterator[Run]:
    if items:
        size = len(items)
        turns = {
            (i, j): _turn(items[i:j], "responses", where)
            for i in range(size)
            for j in range(i + 1, size + 1)
        }
        yield Run(where, size, turns)


def _transitions(transitions: Any) -> tuple[tuple[Run, ...], ...] | None:
    if transitions is None:
        return None
    if not _is_list(transitions) or not all(_is_list(snapshot) for snapshot in transitions):
        raise EvidenceError("transitions: must be a list of conversations")
    return tuple(
        tuple(_runs(snapshot, f"transitions[{i}]")) for i, snapshot in enumerate(transitions)
    )


def _references(trajectory: Any) -> tuple[Reference, ...] | None:
    if not isinstance(trajectory, _MAPPING) or not _is_list(trajectory.get("turns")):
        return None
    found: list[Reference] = []
    stated = False
    for t, turn in enumerate(trajectory["turns"]):
        calls = turn.get("model_calls") if isinstance(turn, _MAPPING) else None
        if not _is_list(calls):
            continue
        stated = True
        for c, call in enumerate(calls):
            where = f"ng_trajectory.turns[{t}].model_calls[{c}]"
            if isinstance(call, str):
                found.append(Reference(where, call, call))
            elif isinstance(call, _MAPPING):
                response_id, call_id = _id(call.get("response_id")), _id(call.get("model_call_id"))
                if response_id is None and call_id is None:
                    raise EvidenceError(f"{where}: names neither response_id nor model_call_id")
                found.append(Reference(where, response_id, call_id))
            else:
                raise EvidenceError(f"{where}: must be a reference")
    return tuple(found) if stated else None
