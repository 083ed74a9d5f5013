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

from tests.connectors.support.health import wait_until_healthy


def forget_pages(ask: Callable[..., str]) -> None:
    """Empty the server's own tree."""
    for _ in range(100):
        try:
            ask("/flush_cache", {})
            return
        except OSError:  # refused while the server has a request, which it may have after it has answered it
            time.sleep(0.1)
    raise AssertionError("the server is never idle")


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
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def ask(path: str, body: Any = None) -> str:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    try:
        wait_until_healthy(process, url)
        yield ask
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
