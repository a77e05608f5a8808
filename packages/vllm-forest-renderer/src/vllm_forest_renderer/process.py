"""Identity of a process on this host, and whether it still runs.

Guarantees: a process id that the kernel gave to a later process, or that belongs to an earlier
boot, never passes for the process that is meant. Works within one PID namespace: processes that
share a store must share theirs.
"""

import functools
import os
from pathlib import Path
from typing import Self

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one boot of this host."""

    boot_id: str
    """The kernel's random id of this boot, 32 hex digits."""
    pid: int
    start_ticks: int
    """Clock ticks between boot and the process's start."""

    @classmethod
    def current(cls) -> Self:
        """The calling process."""
        pid = os.getpid()
        ticks = _start_ticks(pid)
        if ticks is None:
            raise RuntimeError("/proc is not readable: the capture ledger runs on Linux only")
        return cls(boot_id=_boot_id(), pid=pid, start_ticks=ticks)

    def is_alive(self) -> bool:
        """Whether exactly this process still runs."""
        return self.boot_id == _boot_id() and _start_ticks(self.pid) == self.start_ticks

    @property
    def token(self) -> str:
        """The identity as part of a file name: hex digits and dashes."""
        return f"{self.boot_id}-{self.pid:x}-{self.start_ticks:x}"

    @classmethod
    def from_token(cls, token: str) -> Self:
        """The identity that `token` spells. Raises `ValueError`."""
        boot_id, pid, ticks = token.split("-")
        return cls(boot_id=boot_id, pid=int(pid, 16), start_ticks=int(ticks, 16))


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that does not run or is only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name (field 2) may hold spaces and parentheses: count from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
