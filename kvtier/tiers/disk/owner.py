"""The owner of a reservation in a shared store, and whether it is alive.

Age says nothing about a process that was stopped or swapped out; so a reservation is taken away only when its
owner cannot write any more. Process ids repeat: the start time, the boot and the pid namespace distinguish two
processes with the same id.
"""

from __future__ import annotations

import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<IQQ16sQ")
OWNER_BYTES = _RECORD.size
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Owner:
    """One incarnation of one process: `epoch`, random per opening, distinguishes two openings by one process."""

    pid: int
    started: int  # clock ticks after boot, /proc/PID/stat field 22, as the initial time namespace counts them
    pid_namespace: int  # inode of /proc/self/ns/pid
    boot: bytes  # 16 bytes, /proc/sys/kernel/random/boot_id
    epoch: int

    @classmethod
    def current(cls) -> Owner:
        """This process, with a new epoch. Raises OSError where /proc is not mounted."""
        started = _started(os.getpid())
        if started is None:
            raise OSError("cannot read /proc/self/stat")
        boot = bytes.fromhex((_PROC / "sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        return cls(os.getpid(), started, (_PROC / "self/ns/pid").stat().st_ino, boot, secrets.randbits(63))

    def encode(self) -> bytes:
        return _RECORD.pack(self.pid, self.started, self.pid_namespace, self.boot, self.epoch)

    @classmethod
    def decode(cls, raw: bytes) -> Owner:
        return cls(*_RECORD.unpack(raw))

    def alive(self, seen_by: Owner) -> bool:
        """Whether this owner may still write. `seen_by` is the asking process.

        All live users of a store share one pid namespace (kvtier.tiers.disk.directory ensures it), so an owner of
        another namespace or boot is dead, and so is an earlier incarnation of the asking process.
        """
        if self.boot != seen_by.boot or self.pid_namespace != seen_by.pid_namespace:
            return False
        if self.pid == seen_by.pid:
            return self == seen_by
        return _started(self.pid) == self.started


def boot_offset_ns() -> int:
    """How far CLOCK_BOOTTIME is ahead in this process's time namespace; 0 where the kernel has none."""
    try:
        for line in (_PROC / "self/timens_offsets").read_text().splitlines():
            clock, seconds, nanoseconds = line.split()
            if clock == "boottime":
                return int(seconds) * 1_000_000_000 + int(nanoseconds)
    except (OSError, ValueError):
        pass
    return 0


def _started(pid: int) -> int | None:
    """Start time of a process that can still write, else None.

    A killed process is a zombie until its last thread has left the kernel; while one is still inside a write,
    /proc/PID/task lists more than the leader.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
        # The command name, in parentheses, may contain spaces and parentheses itself.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] in (b"Z", b"X") and len(list((_PROC / str(pid) / "task").iterdir())) <= 1:
            return None
        return int(fields[19]) - boot_offset_ns() * os.sysconf("SC_CLK_TCK") // 1_000_000_000
    except (FileNotFoundError, ProcessLookupError):
        return None
