"""SIGTERM and SIGHUP end a command as Ctrl-C does: it leaves no process, no directory and no half a line behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding() -> Iterator[list[int]]:
    """Meanwhile the first of ENDING raises KeyboardInterrupt; one of the same kind after it ends the process at once.
    Gives those that came. One that is ignored, as under nohup, stays so. On another thread than the main one, which
    alone may set handlers, they do what they did."""
    came: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    on_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in ENDING if on_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def end_by(number: int) -> None:
    """End this process by a signal that came before: so whoever waits for it sees by which."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
