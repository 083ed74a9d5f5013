"""One SGLang engine on the CPU in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 420.0
ANSWER_S = 240.0


class EngineHost:
    """An engine behind a pipe. `close` or `kill` ends it with all its processes."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_host.py"), json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.log: list[str] = []
        self._answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._answer(START_S) == "ready"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@ "):
                self._answers.put(json.loads(line[3:]))
            else:
                self.log.append(line)
        self._answers.put(EOFError)

    def _answer(self, timeout: float) -> Any:
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            answer = TimeoutError
        if answer in (EOFError, TimeoutError):
            self.kill()
            raise RuntimeError(f"the engine gave {answer.__name__}; its last words:\n" + "".join(self.log[-60:]))
        return answer

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer(ANSWER_S)

    def generate(self, *prompts: list[int], **order: Any) -> list[dict[str, Any]]:
        answers = self.ask(do="generate", prompts=list(prompts), **order)
        assert isinstance(answers, list), answers
        return answers

    def flush(self) -> None:
        assert self.ask(do="flush") == "flushed"

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask(do="end")
                self.process.wait(60)
            finally:
                self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the engine."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
