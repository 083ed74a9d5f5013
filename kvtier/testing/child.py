"""A program in a process of its own that answers in JSON lines, for engines that tests and benchmarks start once and
use often.

    child = Child([sys.executable, "host.py"], start_s=60)     its first line: it is ready
    answer = child.ask({"do": "generate"}, 10)

The program has two more arguments: descriptors to read orders from and to write answers to, so that its own output and
that of its libraries goes to a log.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

_READ_BYTES = 65536
_WORDS_BYTES = 20_000


class Process(Protocol):
    """What a Child needs of a `subprocess.Popen`: it leads a session, and its group has its number."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Spawn = Callable[[Sequence[str], Sequence[int], IO[bytes]], Process]
"""Starts a command that inherits descriptors, whose numbers are its last arguments, and writes its output to a log."""


def _new_process(command: Sequence[str], descriptors: Sequence[int], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class ChildFailed(AssertionError):
    """It ended, or did not answer in time; the message has the end of its output."""


class Child:
    """The process and all that it starts are a group, which `kill` ends. Used from one thread at a time."""

    def __init__(self, command: Sequence[str], start_s: float, spawn: Spawn | None = None) -> None:
        """Starts it and waits for its first line, which is `ready` then; `spawn` starts it another way than as a new
        process. Raises ChildFailed."""
        orders_out, orders_in = os.pipe()
        answers_out, answers_in = os.pipe()
        # Appended to by the child, and read beside it; closed by `kill`.
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        try:
            self.process = (spawn or _new_process)(command, (orders_out, answers_in), self._log)
        finally:
            os.close(orders_out)
            os.close(answers_in)
        self._orders = os.fdopen(orders_in, "w")
        self._answers = os.fdopen(answers_out, "rb", buffering=0)
        self._buffer = b""
        try:
            self.ready = self._answer(start_s)
        except BaseException:
            self.kill()
            raise

    def ask(self, order: Any, timeout: float) -> Any:
        """The answer to one order. A late child is killed, or its answer would be taken for the next one's. Raises
        ChildFailed."""
        if self._orders.closed:
            raise ChildFailed("the child was ended before")
        try:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
            return self._answer(timeout)
        except ChildFailed:
            self.kill()
            raise
        except OSError as error:
            failure = self._failed("is gone")
            self.kill()
            raise failure from error

    def _answer(self, timeout: float) -> Any:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], timeout)
            chunk = self._answers.read(_READ_BYTES) if ready else b""
            if not chunk:
                raise self._failed("died" if ready else f"did not answer for {timeout:.0f} s")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _failed(self, how: str) -> ChildFailed:
        return ChildFailed(f"the child {how}; its last words:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self._log.fileno()).st_size
        words = os.pread(self._log.fileno(), _WORDS_BYTES, max(0, size - _WORDS_BYTES))
        return words.decode(errors="replace")

    def end(self, timeout: float) -> int:
        """No more orders: it ends in good order, or is killed when the time is over. Returns its exit code."""
        try:
            self._orders.close()
            return self.process.wait(timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to all of its processes, also those that outlived it. Idempotent."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for stream in (self._orders, self._answers, self._log):
            try:
                stream.close()
            except BrokenPipeError:
                pass
