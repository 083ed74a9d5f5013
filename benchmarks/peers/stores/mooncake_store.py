"""Mooncake Store: a master of its own and one client that lends memory, on loopback, as its guide for Python has it.

Blocks lie in the client's memory. Names are its caller's.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serve import serve

_SEGMENT, _BUFFER = 64 << 20, 16 << 20


class Mooncake:
    """A master and a client."""

    def __init__(self, folder: str, terms: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        with socket.socket() as free, socket.socket() as second:
            free.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            port, metrics = free.getsockname()[1], second.getsockname()[1]
        master = Path(sys.executable).with_name("mooncake_master")
        self._master = subprocess.Popen(
            [str(master), f"--port={port}", f"--metrics_port={metrics}"], stdout=sys.stderr, stdin=subprocess.DEVNULL
        )
        self._store = MooncakeDistributedStore()
        until = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > until:
                raise TimeoutError("mooncake_master does not listen")
            time.sleep(0.1)
        failed = self._store.setup("localhost", "P2PHANDSHAKE", _SEGMENT, _BUFFER, "tcp", "", f"127.0.0.1:{port}")
        if failed:
            raise RuntimeError(f"setup returned {failed}")

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        return sum(self._store.put(str(block), payload) == 0 for block, payload in zip(blocks, payloads, strict=True))

    def get(self, blocks: Sequence[int], size: int) -> list[bytes | None]:
        return [self._store.get(str(block)) or None for block in blocks]

    def purge(self) -> None:
        self._store.remove_all(True)  # also what has a lease, which every read gives

    def kill_server(self) -> None:
        self._master.kill()

    def freeze_server(self) -> None:
        self._master.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._store.close()
        self._master.kill()


if __name__ == "__main__":
    serve(Mooncake, lambda: {"mooncake-transfer-engine-non-cuda": version("mooncake-transfer-engine-non-cuda")})
