"""vLLM's tiered offloading on machines without a GPU, for tests: its specification with copies by the processor.

    "kv_connector_extra_config": {"spec_name": "CpuTieringSpec",
                                  "spec_module_path": "kvtier.connectors.vllm.offloading.cpu_spec",
                                  "cpu_bytes_to_use": …}

vLLM refuses the CPU platform in one method only, the one that makes the worker's copies between the device and the
host cache. Everything above those copies is vLLM's own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Copies at once: a job is done before its submit returns."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        """`region` is this worker's from now on. Groups of KV cache share their tensors, so that a block is one page of
        each, whichever group it is of."""
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # [blocks, page] ↔ [chunks, blocks per chunk, page]
        for canonical in caches.tensors:
            page = canonical.page_size_bytes
            device = canonical.tensor.view(torch.int8).view(-1, page)
            host = region.create_next_worker_view(page * blocks_per_chunk)
            self._pairs.append((device, host.unflatten(1, (blocks_per_chunk, page))))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        blocks, chunks, parts = self._places(src_spec, dst_spec)
        began = time.perf_counter()
        for device, host in self._pairs:
            host[chunks, parts] = device[blocks]
        return self._finish(job_id, len(blocks), began)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        blocks, chunks, parts = self._places(dst_spec, src_spec)
        began = time.perf_counter()
        for device, host in self._pairs:
            device[blocks] = host[chunks, parts]
        return self._finish(job_id, len(blocks), began)

    def _places(self, device: Any, host: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Per block: its number on the device, its chunk, and which of the chunk's blocks it is. Blocks are listed
        group by group, and so are chunks."""
        each, chunks, parts, used = self._blocks_per_chunk, [], [], 0
        ids = np.asarray(host.chunk_ids, np.int64)
        for count, first in zip(device.group_sizes, device.block_indices, strict=True):
            logical = np.arange(count) + first % each
            chunks.append(ids[used + logical // each])
            parts.append(logical % each)
            used += int(logical[-1]) // each + 1 if count else 0
        return (
            torch.from_numpy(np.asarray(device.block_ids, np.int64)),
            torch.from_numpy(np.concatenate(chunks)),
            torch.from_numpy(np.concatenate(parts)),
        )

    def _finish(self, job_id: int, blocks: int, began: float) -> bool:
        size = blocks * sum(device.shape[1] for device, _ in self._pairs)
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """No job is ever under way."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """See the module."""

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = CpuWorker(kv_caches, region, self.blocks_per_chunk)
            except BaseException:
                region.cleanup()
                raise
        return self._worker
