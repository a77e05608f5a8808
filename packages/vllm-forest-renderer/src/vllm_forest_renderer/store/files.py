"""Durable files: the only place of the store that writes to the disk.

Guarantees: a shard file appears under its name complete and flushed, or not at all; a name that
was returned as written survives a power cut (file and folder are flushed). A temporary file names
the process that writes it, so that only the leftovers of dead processes are removed.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from forest_schema.shards import SHARD_SUFFIX

from vllm_forest_renderer.errors import StoreUnavailable
from vllm_forest_renderer.process import ProcessIdentity

_TEMPORARY_SUFFIX = ".tmp"
_TRASH_PREFIX = ".trash-"


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn the disk's refusal (full, read-only, failing, absent) into `StoreUnavailable`."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable(f"{what}: it was never prepared, or was dropped") from error
    except OSError as error:
        raise StoreUnavailable(
            f"{what}: {error.strerror or type(error).__name__}; check that the store directory is "
            "writable and has space, then try again"
        ) from error


def create_once(path: Path, data: bytes, owner: ProcessIdentity, *, mode: int = 0o666) -> None:
    """Create the file `path` durably with `data`. Does nothing where it exists.

    Of several processes that create it together one wins, and no one sees a part of it. Raises
    `OSError`.
    """
    temporary = path.with_name(f".{new_shard_name(owner)}{_TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Flush the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_shard_name(owner: ProcessIdentity) -> str:
    """A shard id that no other write ever uses."""
    return f"{owner.token}-{secrets.token_hex(8)}"


def shard_file(folder: Path, shard: str) -> Path:
    """File of the shard `shard` in the partition folder `folder`."""
    return folder / f"{shard}{SHARD_SUFFIX}"


def write_shard(folder: Path, shard: str, parts: Sequence[bytes | memoryview]) -> None:
    """Write a shard durably from consecutive byte ranges.

    Raises `OSError`; then no file of this shard is left where the disk still allows removal, and
    a leftover temporary file goes at the next start.
    """
    temporary = folder / f".{shard}{_TEMPORARY_SUFFIX}"
    final = shard_file(folder, shard)
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, final)
        fsync_folder(folder)
    except OSError:
        for leftover in (temporary, final):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise


def make_folder(folder: Path) -> None:
    """Create `folder` durably. Does nothing where it exists."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)


def remove_folder(folder: Path) -> int:
    """Remove a partition folder; returns the number of shards in it, 0 where it is absent.

    The folder loses its name first: no later write can land in it, and a removal that a crash
    interrupts goes on at the next start.
    """
    trash = folder.parent / f"{_TRASH_PREFIX}{secrets.token_hex(8)}"
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return 0
    fsync_folder(folder.parent)
    shards = sum(1 for name in os.listdir(trash) if name.endswith(SHARD_SUFFIX))
    # A process that starts may be removing it too.
    shutil.rmtree(trash, ignore_errors=True)
    return shards


def remove_leftovers(root: Path) -> int:
    """Remove what dead processes left half-written; returns how many files and folders."""
    removed = 0
    for folder in [root, *(entry for entry in root.iterdir() if entry.is_dir())]:
        if folder.name.startswith(_TRASH_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
            continue
        with contextlib.suppress(FileNotFoundError):  # another process drops the partition
            for name in os.listdir(folder):
                if name.endswith(_TEMPORARY_SUFFIX) and not _writer_lives(name):
                    (folder / name).unlink(missing_ok=True)
                    removed += 1
    return removed


def _writer_lives(temporary_name: str) -> bool:
    shard = temporary_name.removeprefix(".").removesuffix(_TEMPORARY_SUFFIX)
    try:
        return ProcessIdentity.from_token(shard.rpartition("-")[0]).is_alive()
    except ValueError:
        return False
