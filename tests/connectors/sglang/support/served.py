"""SGLang's HTTP server on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 240.0


@contextmanager
def served(model: Path, port: int, *options: str, linker: dict[str, Any]) -> Iterator[Callable[..., str]]:
    """A server with this linker. Gives `ask(path, body)`, which returns the answer's text and raises HTTPError; a body
    is JSON, or bytes."""
    command = [
        sys.executable, str(Path(__file__).parent / "server_host.py"), "--model-path", str(model),
        "--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic",
        "--unified-cache-external-linker-config", json.dumps(linker),
        "--port", str(port), "--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--disable-overlap-schedule", "--disable-cuda-graph", "--mem-fraction-static", "0.1",
        "--max-total-tokens", "4096", "--log-level", "warning", "--enable-metrics", "--skip-server-warmup", *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def ask(path: str, body: Any = None) -> str:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                ask("/health")
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(1)
        yield ask
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
