"""Rows that a process writes one by one, and the supervision that makes them outlive it.

A part of `make gpu-check` runs in a process of its own and appends to a file of JSON lines: that a row has begun, then
what came of it. Whatever happens to the process, the rows before are kept; an error, a crash or a row that does not end
costs that row, and the rest goes on in a new process (a CUDA context does not survive an error).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""`name`, and one of: figures, `skipped` (why), `error` (one line, with `detail`), `begun` alone."""

ROW_LIMIT_S = 150.0
AGAIN = 3
"""Exit code of a process that ended with a row's error: another shall do the rest."""

_LEAST_S = 5.0
_TAIL_CHARS = 6000


class Skip(Exception):
    """This row cannot be measured here; the message gives the reason."""


class Rows:
    """The rows of one file, for the process that makes them. What is there already is not made again."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self._path, self._deadline = path, time.monotonic() + budget_s
        self.folder = path.parent  # scratch space on the disk that results are written to; its maker removes it
        self.done = {name for name, row in read(path).items() if "begun" not in row}
        self._begun = 0.0

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def begin(self, name: str) -> None:
        self._begun = time.monotonic()
        append(self._path, {"name": name, "begun": True})

    def end(self, name: str, figures: Mapping[str, Any]) -> None:
        self.done.add(name)
        append(self._path, {"name": name, **figures, "seconds": round(time.monotonic() - self._begun, 2)})

    def run(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """One row. An error is written down and ends the process: its device may be in any state."""
        if name in self.done:
            return
        self.begin(name)
        if self.left_s <= 0:
            self.end(name, {"skipped": "no time left"})
            return
        try:
            self.end(name, work())
        except Skip as reason:
            self.end(name, {"skipped": str(reason)})
        except Exception as error:
            self.end(name, {"error": f"{type(error).__name__}: {error}"[:500], "detail": traceback.format_exc()})
            sys.exit(AGAIN)


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> dict[str, Row]:
    """The latest state of every row, in order of their beginning. A line cut short by a crash is left out."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["name"]] = row
    return rows


def supervise(command: Sequence[str], path: Path, seconds: float, seen: Callable[[], None] = lambda: None) -> None:
    """Run `command --rows PATH --budget S` until its rows are done or the time is over. `seen` is called with every
    change of the file. Leaves no process behind and no row begun."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > _LEAST_S:
        before = _ended(read(path))
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                [*command, "--rows", str(path), "--budget", f"{left - _LEAST_S:.1f}"],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                why = _watch(process, path, deadline, seen)
            finally:
                _end(process)
            log.seek(0)
            output = log.read()[-_TAIL_CHARS:]
        code = process.returncode
        if code == 0 and not why:
            return
        reason = why or f"the process ended with code {code}"
        rows = read(path)
        broken = [name for name, row in rows.items() if "begun" in row]
        ended = _ended(rows) - before
        again = bool(broken) or (code == AGAIN and bool(ended))
        for name in (name for name in ended if "error" in rows[name]):  # an engine's process tells why in its output
            append(path, rows[name] | {"detail": f"{rows[name].get('detail', '')}\n{output}"})
        for name in broken or ([] if again else ["the process"]):
            append(path, {"name": name, "error": reason, "detail": output})
        seen()
        if not again or time.monotonic() > deadline:
            return


def _ended(rows: Mapping[str, Row]) -> set[str]:
    return {name for name, row in rows.items() if "begun" not in row}


def _watch(process: subprocess.Popen[bytes], path: Path, deadline: float, seen: Callable[[], None]) -> str:
    """Wait for the process; why it must be ended before that, else ""."""
    size, changed = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        now, was = time.monotonic(), size
        size = path.stat().st_size if path.exists() else 0
        if size != was:
            changed = now
            seen()
        if now > deadline:
            return "the time of this part was over"
        if now - changed > ROW_LIMIT_S:
            return f"it did not end within {ROW_LIMIT_S:.0f} s"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
