"""What a step has begun: which task each prompt group took, and which attempts it opened.

Guarantees: a group's task is written down before its first attempt opens, an attempt right after it
opened; a torn last line is ignored, and gone before the next entry. After a kill the journal and
the archive together say what was begun and what was finished, so that no prompt is used twice and
no attempt is forgotten. A prompt is skipped in one case: it had replaced a group before the kill,
and the resumed step needs no replacement.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

JOURNAL_FILE = "journal.jsonl"
CLEANED_FILE = "cleaned"


class GroupBegun(msgspec.Struct, frozen=True, tag="group"):
    """A prompt group took a task."""

    group_id: str
    position: int


class AttemptOpened(msgspec.Struct, frozen=True, tag="attempt"):
    """A rollout opened an attempt."""

    rollout_id: str
    attempt_id: str


Entry = GroupBegun | AttemptOpened

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def append(folder: Path, entry: Entry) -> None:
    """Add an entry to the journal of the step in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / JOURNAL_FILE).open("a+b") as file:
        _drop_torn_line(file)
        file.write(_ENCODER.encode(entry) + b"\n")


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut what follows the last line's end, which would spoil the next line."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def read(folder: Path) -> Iterator[Entry]:
    """Entries of the step in `folder`, oldest first."""
    path = folder / JOURNAL_FILE
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield _DECODER.decode(line)


def positions(folder: Path) -> dict[str, int]:
    """Group id -> position of its task."""
    return {e.group_id: e.position for e in read(folder) if isinstance(e, GroupBegun)}


def attempts(folder: Path) -> dict[str, str]:
    """Attempt id -> rollout id, for every attempt that the step opened."""
    return {e.attempt_id: e.rollout_id for e in read(folder) if isinstance(e, AttemptOpened)}


def mark_cleaned(folder: Path) -> None:
    """The step's captures are gone from the server."""
    if folder.is_dir():
        (folder / CLEANED_FILE).touch()


def is_cleaned(folder: Path) -> bool:
    """The step's captures are gone from the server."""
    return (folder / CLEANED_FILE).exists()
