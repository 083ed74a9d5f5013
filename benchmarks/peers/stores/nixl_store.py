"""NIXL's POSIX backend: a file per block, named by its caller, read and written by a NIXL agent.

NIXL moves bytes and keeps no index, so the caller's own `exists` decides what is there; identity, expiry and purges are
its caller's too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from serve import serve


class NIXLFiles:
    """One agent."""

    def __init__(self, folder: str, terms: dict[str, Any]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._folder = Path(folder)
        self._agent = nixl_agent("bench", nixl_agent_config(backends=["POSIX"]))

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        stored = 0
        for block, payload in zip(blocks, payloads, strict=True):
            memory = np.frombuffer(payload, dtype=np.uint8).copy()
            try:
                fd = os.open(self._folder / f"{block:08x}.bin", os.O_RDWR | os.O_CREAT, 0o600)
            except OSError:  # the file is its caller's: not stored
                continue
            try:
                stored += self._move("WRITE", memory, fd)
            finally:
                os.close(fd)
        return stored

    def get(self, blocks: Sequence[int], size: int) -> list[bytes | None]:
        out: list[bytes | None] = []
        for block in blocks:
            memory = np.zeros(size, dtype=np.uint8)
            try:
                fd = os.open(self._folder / f"{block:08x}.bin", os.O_RDONLY)
            except OSError:
                out.append(None)
                continue
            try:
                out.append(memory.tobytes() if self._move("READ", memory, fd) else None)
            finally:
                os.close(fd)
        return out

    def _move(self, verb: str, memory: Any, fd: int) -> bool:
        ours = [(memory.ctypes.data, memory.nbytes, 0, "")]
        theirs = [(0, memory.nbytes, fd, "")]
        memories, files = self._agent.register_memory(ours, "DRAM"), self._agent.register_memory(theirs, "FILE")
        handle = self._agent.initialize_xfer(verb, memories.trim(), files.trim(), "bench")
        try:
            state = self._agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                time.sleep(0.001)
                state = self._agent.check_xfer_state(handle)
            return state == "DONE"
        except Exception:  # what NIXL raises is a failed transfer
            return False
        finally:
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(files)
            self._agent.deregister_memory(memories)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(NIXLFiles, lambda: {"nixl-cu12": version("nixl-cu12")})
