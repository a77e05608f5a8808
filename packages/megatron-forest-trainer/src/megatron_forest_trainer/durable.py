"""Files and folders that survive a power cut, or are not there.

Guarantees: what is published is synced to the disk before its name appears, and the name is synced
before the call returns.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Sync one file or one folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(partial: Path, target: Path) -> None:
    """Give the finished folder `partial` its name `target`; both have one parent."""
    for folder, _, files in os.walk(partial):
        for file in files:
            sync(Path(folder, file))
        sync(Path(folder))
    partial.rename(target)
    sync(target.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears complete, or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
