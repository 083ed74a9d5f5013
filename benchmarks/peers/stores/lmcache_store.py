"""LMCache's storage of its cache server: the L2 adapter `fs_native` with O_DIRECT, driven as its own benchmark does.

Names of blocks are its `ObjectKey`, with the fields that its server fills in: the hash of the tokens, the model's name
and the rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from serve import prompt, serve, size_of

SLOTS = 64
WAIT_S = 60.0


class LMCacheFiles:
    """One server's adapter."""

    def __init__(self, folder: str, terms: dict[str, Any]) -> None:
        import torch
        from lmcache.cli.commands.bench.l2_adapter_bench.data import create_l1_memory_desc, wait_eventfd
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

        self._size, self._terms, self._wait = size_of(terms), terms, wait_eventfd
        self._memory = torch.frombuffer(mmap.mmap(-1, SLOTS * self._size), dtype=torch.uint8)
        options = {"type": "fs_native", "base_path": folder, "num_workers": 4, "use_odirect": True}
        config = get_l2_adapter_config_class("fs_native").from_dict(options)
        self._adapter = create_l2_adapter(config, create_l1_memory_desc(self._memory, 4096))

    def _key(self, block: int) -> Any:
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        tokens = prompt(block)
        digest = TokenHasher(chunk_size=len(tokens), hash_algorithm="blake3").compute_chunk_hashes(tokens)[0]
        return ObjectKey(chunk_hash=digest, model_name=self._terms["model"], kv_rank=0)

    def _object(self, slot: int) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        start = slot * self._size
        meta = MemoryObjMetadata(
            shape=torch.Size([self._size]), dtype=torch.uint8, address=start, phy_size=self._size, ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
        )  # fmt: skip
        return TensorMemoryObj(self._memory[start : start + self._size], meta, parent_allocator=None)

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        import torch

        stored = 0
        for slot, (block, payload) in enumerate(zip(blocks, payloads, strict=True)):
            target = self._memory[slot * self._size : (slot + 1) * self._size]
            target.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            task = self._adapter.submit_store_task([self._key(block)], [self._object(slot)])
            done: dict[int, Any] = {}
            while task not in done:
                self._wait(self._adapter.get_store_event_fd(), WAIT_S)
                done |= self._adapter.pop_completed_store_tasks()
            stored += done[task].is_successful()
        return stored

    def get(self, blocks: Sequence[int], size: int) -> list[bytes | None]:
        out: list[bytes | None] = []
        for slot, block in enumerate(blocks):
            place = self._memory[slot * size : (slot + 1) * size]
            place.zero_()
            key = self._key(block)
            found = self._ask(
                self._adapter.submit_lookup_and_lock_task([key], {}),
                self._adapter.get_lookup_and_lock_event_fd(),
                self._adapter.query_lookup_and_lock_result,
            )
            loaded = found and self._ask(
                self._adapter.submit_load_task([key], [self._object(slot)]),
                self._adapter.get_load_event_fd(),
                self._adapter.query_load_result,
            )
            if found:
                self._adapter.submit_unlock([key])
            out.append(place.numpy().tobytes() if loaded else None)
        return out

    def _ask(self, task: int, fd: int, query: Any) -> int:
        while (found := query(task)) is None:
            self._wait(fd, WAIT_S)
        return int(found.popcount())

    def close(self) -> None:
        self._adapter.close()


if __name__ == "__main__":
    serve(LMCacheFiles, lambda: {"lmcache": version("lmcache")})
