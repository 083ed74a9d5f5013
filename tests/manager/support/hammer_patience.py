"""Whether something came too late, or the machine had no time for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

STARVED = 4.0  # times as long as it ran, its main thread has waited for a processor


class TooLate(AssertionError):
    """Something did not happen in time."""


def in_time(deadline: float, told: object) -> None:
    """Raises TooLate behind a monotonic time."""
    if time.monotonic() >= deadline:
        raise TooLate(told)


@dataclass(frozen=True)
class Share:
    """What this thread has had of the machine: seconds on a processor, and seconds that it waited for one."""

    ran_s: float
    waited_s: float

    @classmethod
    def now(cls) -> Share:
        """Since the thread began. Where the kernel does not tell, it never waits."""
        try:
            ran, waited = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[:2]
        except OSError:
            return cls(time.thread_time(), 0.0)
        return cls(int(ran) / 1e9, int(waited) / 1e9)

    def since(self, before: Share) -> Share:
        """From an earlier time on."""
        return Share(self.ran_s - before.ran_s, self.waited_s - before.waited_s)

    @property
    def starved(self) -> bool:
        """Whether deadlines in seconds tell nothing of the program here."""
        return self.waited_s > STARVED * self.ran_s
