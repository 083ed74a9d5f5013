"""Two processes that copy at once as clients of one MPS server, as engines that share a card do. A row of `busy`.

The server is this row's own, with a pipe in a temporary folder: it is started, and ended with the row. Nothing of the
device's settings is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from gpu.rows import Skip

CONTROL = "nvidia-cuda-mps-control"
_ORDER_S, _CLIENT_S = 20.0, 40.0

CLIENT = """
import os, sys, time
import torch
from kvtier.kernels.copy import Moves, Outcome
from kvtier.kernels.engine import open_pool_engine
device, blocks, block_bytes, rounds = sys.argv[1], *map(int, sys.argv[2:])
pool = torch.empty((blocks, block_bytes), dtype=torch.uint8, device=device)
engine = open_pool_engine(pool, [memoryview(bytearray(blocks * block_bytes))], block_bytes, method="dma")
wrong, moved, began = 0, 0, time.perf_counter()
for number in range(rounds):
    wanted = (torch.arange(blocks, device=device) * 7 + number + os.getpid()).to(torch.uint8)[:, None]
    pool[:] = wanted
    for give in (engine.store, engine.load):
        ticket = give(Moves.of((i, blocks - 1 - i, number) for i in range(blocks)))
        assert engine.wait([ticket], 20.0), "a copy does not end"
        assert all(ack.outcome is Outcome.DONE for ack in engine.poll())
        wrong += give == engine.load and not bool((pool == wanted).all())
        moved += blocks * block_bytes
        if give == engine.store:
            pool.zero_()
assert engine.close(20.0)
print("wrong", wrong, "gb_s", moved / (time.perf_counter() - began) / 1e9, flush=True)
"""


def two_clients(device: str, *, blocks: int = 64, block_bytes: int = 1 << 20, rounds: int = 20) -> Mapping[str, Any]:
    """GB/s of both together, all their work included. Raises RuntimeError for a wrong byte, a client that fails, and
    where they were no clients of the server; Skip where no server can be had."""
    if (control := shutil.which(CONTROL)) is None:
        raise Skip(f"no {CONTROL} here")
    with tempfile.TemporaryDirectory(prefix="kvtier-mps-") as folder:
        environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}

        def order(*arguments: str, say: str = "") -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [control, *arguments], input=say, env=environ, capture_output=True, text=True, timeout=_ORDER_S
            )

        started = order("-d")
        if started.returncode:
            raise Skip(f"MPS does not start: {(started.stdout + started.stderr).strip()[:200]}")
        clients: list[subprocess.Popen[str]] = []
        try:
            words = [sys.executable, "-c", CLIENT, device, str(blocks), str(block_bytes), str(rounds)]
            clients += [
                subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                for _ in range(2)
            ]
            said = [client.communicate(timeout=_CLIENT_S)[0].strip() for client in clients]
            if not order(say="get_server_list\n").stdout.strip():
                raise RuntimeError("the processes were no clients of the server")
        finally:
            for client in clients:
                client.kill()
                client.wait()
            order(say="quit\n")
    figures = [line.splitlines()[-1].split() if line else [] for line in said]
    for client, words, line in zip(clients, figures, said, strict=True):
        if client.returncode or words[:2] != ["wrong", "0"]:
            raise RuntimeError(f"a client of the server: {line[-500:]}")
    return {"passed": True, "gb_s": sum(float(words[3]) for words in figures)}
