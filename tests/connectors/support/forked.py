"""Processes that are forked from one that has imported an engine already (`template.py`)."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from kvtier.testing import ChildFailed

IMPORT_S = 420.0
_READ = ("KVTIER_", "VLLM_", "SGLANG_", "PYTHON", "OMP_", "HF_")
"""Variables that are read as modules are imported begin so; libraries that a test imports set some others."""


class Forked:
    """A process that another one forked; what `kvtier.testing.Child` needs of a Popen."""

    def __init__(self, told: int) -> None:
        """`told`: the pipe that its pid is written to, and then its exit code. Raises ChildFailed."""
        self._told, self._said = told, b""
        self.returncode: int | None = None
        pid = self._next(IMPORT_S)
        if pid is None:
            raise ChildFailed("the process with the engine's modules forks none")
        self.pid = pid

    def _next(self, timeout_s: float) -> int | None:
        """The next number; None: it does not come in time."""
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._told], [], [], max(0.0, until_s - time.monotonic()))
            part = os.read(self._told, 64) if ready else b""
            if not part:
                return None
            self._said += part
        number, _, self._said = self._said.partition(b"\n")
        return int(number)

    def poll(self) -> int | None:
        """Its exit code, as `subprocess` has it; None: it runs."""
        if self.returncode is None and (code := self._next(0.0)) is not None:
            self.returncode = code
            os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            select.select([self._told], [], [], timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


class Template:
    """The process to fork from; it begins to import at once."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        """`modules` are imported in this order, those of `folder` too."""
        self._environment = _environment()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("template.py")), str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )

    def fits(self) -> bool:
        """Whether a process that began now would have imported the same: libraries read the environment as they are
        imported."""
        return self._environment == _environment() and self._process.poll() is None

    def start(self, command: Sequence[str], descriptors: Sequence[int], log: IO[bytes]) -> Forked:
        """Run `python -P program argument …`, as `kvtier.testing.Child` asks for it."""
        _, _, *words = command
        told, ours = os.pipe()
        message = json.dumps({"words": words, "environment": dict(os.environ)}).encode()
        try:
            socket.send_fds(self._orders, [message], [*descriptors, log.fileno(), ours])
        finally:
            os.close(ours)
        return Forked(told)

    def close(self) -> None:
        self._orders.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ)}
