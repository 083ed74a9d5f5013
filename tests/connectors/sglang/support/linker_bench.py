"""A linker without an engine: over SGLang's real device pools, called as its tree calls it."""

from __future__ import annotations

import hashlib
import time
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.identity.keys import SHARED, make_keys

PAGE, PAGES, LAYERS, WINDOW = 16, 40, 3, 64


class Kind(IntEnum):
    FULL = 0
    SWA = 1
    MAMBA = 2


def mha(page: int = PAGE, **changed: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    given = {"head_num": 2, "head_dim": 32, "dtype": torch.float32, "layer_num": LAYERS, **changed}
    return MHATokenToKVPool(size=PAGE * PAGES, page_size=page, device="cpu", enable_memory_saver=False, **given)


def windows(layers: str = "SFSF", **changed: Any) -> Any:
    """SGLang's pool of windows: `layers` of full attention (F) and of windows (S)."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    given = {"page_size": PAGE, "dtype": torch.float32, "head_num": 2, "head_dim": 32, "device": "cpu", **changed}
    kinds = {kind: [number for number, letter in enumerate(layers) if letter == kind] for kind in "SF"}
    return SWAKVPool(
        size=PAGE * PAGES, size_swa=PAGE * (PAGES // 2), swa_attention_layer_ids=kinds["S"],
        full_attention_layer_ids=kinds["F"], **given,
    )  # fmt: skip


def states(page: int = PAGE, slots: int = 8, latent: bool = False, tracks: bool = False) -> tuple[Any, Any]:
    """SGLang's pool of full attention (layers 1 and 3) beside states (0 and 2), and its table of requests."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=8, conv_kernel=4
    )
    requests = HybridReqToTokenPool(
        size=1, mamba_size=slots, mamba_spec_state_size=0, max_context_len=128, device="cpu",
        enable_memory_saver=False, cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]), mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=tracks,
    )  # fmt: skip
    more = {"use_mla": True, "kv_lora_rank": 48, "qk_rope_head_dim": 16} if latent else {}
    pool = HybridLinearKVPool(
        size=PAGE * PAGES, page_size=page, dtype=torch.float32, head_num=2, head_dim=32, device="cpu",
        full_attention_layer_ids=[1, 3], mamba_pool=requests.mamba_pool, **more,
    )  # fmt: skip
    return pool, requests


def mla(**changed: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=PAGE * PAGES, page_size=PAGE, dtype=torch.float32, kv_lora_rank=48, qk_rope_head_dim=16,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False, **changed,
    )  # fmt: skip


def pool(device: Any, page: int = PAGE, *kinds: Kind) -> Any:
    from kvtier.connectors.sglang.pool import pool_of

    return pool_of(device, page, kinds or (Kind.FULL,))


def server(**changed: Any) -> Any:
    given = {
        "model_path": "hub/tiny", "revision": None, "speculative_algorithm": None, "load_format": "auto",
        "quantization": None, "json_model_override_args": "{}", "quantization_param_path": None,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changed})


class Bench:
    """A linker over a real pool, called as the tree calls it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, page: int = PAGE, g2: str = "4MiB", more: Any = None,
        device: Any = None, kinds: tuple[Kind, ...] = (Kind.FULL,), requests: Any = None, grid: int = 0, **config: Any,
    ) -> None:  # fmt: skip
        from kvtier.connectors.sglang import linker as module
        from kvtier.testing import sample_namespace

        self.device, self.page, self.requests = device or mha(page), page, requests
        self.refusals = 0  # votes of another rank, to come
        kept = self.pool = pool(self.device, page, *kinds)
        for tensor in (*(one for part in (kept, *kept.beside) for layer in part.tensors for one in layer),
                       *(part.tensor for part in kept.states)):  # fmt: skip
            tensor.copy_(torch.randn(tensor.shape))
        namespace = sample_namespace(kept.block_bytes, block_tokens=page, dtype="float32")
        monkeypatch.setattr(module, "namespace_of_rank", lambda *_: namespace)
        self.window_of: dict[int, int] = {}  # pages of windows by pages of the full pool
        self.window_shift = 0  # of their slots
        allocator = type("TokenToKVPoolAllocator", (), {})()
        allocator.get_kvcache = lambda: self.device
        allocator.translate_swa_indices_for_transfer = self.window_slots
        params = SimpleNamespace(
            token_to_kv_pool_allocator=allocator, page_size=page, is_eagle=False, mtp_draft_device_pools=(),
            sidecar_draft_device_pools=(), req_to_token_pool=requests, enable_mamba_extra_buffer=True,
        )  # fmt: skip
        monkeypatch.setattr(module, "grid_of", lambda _: grid or page)
        monkeypatch.setattr(module, "window_of", lambda *_: WINDOW - 1 if Kind.SWA in kinds else 0)
        tiers = {"g2": {"capacity": g2}, "g3": {"path": str(folder), "capacity": "64MiB"}}
        extra = {"kvtier_config": {"version": 1, "tiers": tiers, **config}, **(more or {})}
        self.linker = module.KVTierLinker(server(), params, components=set(kinds), extra_config=extra)

    def vote(self, answer: bool) -> bool:
        refused, self.refusals = self.refusals > 0, max(0, self.refusals - 1)
        return answer and not refused

    def chain(self, keys: list[str]) -> list[Any]:
        """Blocks of a request without salt."""
        return make_keys(SHARED, [bytes.fromhex(key) for key in keys])

    def req(self, rid: str, salt: str | None = None, **asked: Any) -> Any:
        params = SimpleNamespace(custom_params={"kvtier": asked} if asked else None)
        return SimpleNamespace(rid=rid, cache_salt=salt, extra_key=None, sampling_params=params)

    def slots(self, pages: list[int]) -> Any:
        return torch.cat([torch.arange(page * self.page, (page + 1) * self.page) for page in pages])

    def transfer(self, keys: list[str], pages: list[int] | None = None) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        indices = None if pages is None else self.slots(pages)
        return [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=indices)]

    def window_slots(self, slots: Any) -> Any:
        """As the allocator of both pools has it; 0 for what was freed."""
        pages = [self.window_of.get(int(page), 0) for page in (slots[:: self.page] // self.page).tolist()]
        return self.window_shift + torch.cat(
            [torch.arange(self.page) + page * self.page if page else torch.zeros(self.page) for page in pages]
        )

    def windows(self, keys: list[str], pages: list[int]) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        policy = PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(name=PoolName.SWA, keys=keys, device_indices=self.slots(pages), hit_policy=policy)

    def state(self, key: str, slot: int) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        policy = PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(name=PoolName.MAMBA, keys=[key], device_indices=torch.tensor([slot]), hit_policy=policy)

    def state_of(self, slot: int) -> bytes:
        """The bytes of a slot of the pool of states."""
        cache = self.device.mamba_pool.mamba_cache
        return b"".join(one[:, slot].contiguous().view(torch.uint8).numpy().tobytes()
                        for one in (*cache.conv, cache.temporal))  # fmt: skip

    def offload(
        self, keys: list[str], pages: list[int], head: list[str] | None = None, checkpoint: Any = None,
        path: list[int] | None = None, state: int | None = None, **req: Any,
    ) -> bool:  # fmt: skip
        self.linker.offloads_for(self.req("o", **req), *([checkpoint] if checkpoint is not None else []))
        self.linker.before_offload(head or [], None if path is None else lambda: self.slots(path))
        more = [] if state is None else [self.state(keys[-1], state)]
        queued: bool = self.linker.offload([*self.transfer(keys, pages), *more])
        self.linker.offloads_for(None)
        return queued

    def settle(self) -> list[bool]:
        return [self.linker.pop_completed_offload() for _ in range(self.linker.num_completed_offloads())]

    def lookup(self, rid: str, keys: list[str], head: list[str] | None = None, **req: Any) -> int:
        return len(self.lengths(rid, keys, head, **req))

    def lengths(self, rid: str, keys: list[str], head: list[str] | None = None, **req: Any) -> list[int]:
        self.linker.before_lookup(self.req(rid, **req), lambda: head or [], self.vote)
        found: list[int] = self.linker.lookup(rid, self.transfer(keys))
        return found

    def flush(self) -> None:
        self.linker.reset()
        self.linker.flushed()

    def run(self) -> bool:
        return bool(self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading()))

    def pinned(self) -> int:
        """Blocks under a lease, once those on their way to disk are there."""
        self.linker._pages.cache.flush()
        return int(self.linker.stats()["g2"]["pinned"])

    def bytes_of(self, page: int, window: bool = False) -> bytes:
        """Of all layers of full attention, or of those of windows."""
        rows = slice(page * self.page, (page + 1) * self.page)
        layers = [layer for part in self.pool.beside for layer in part.tensors] if window else self.pool.tensors
        return b"".join(tensor[rows].numpy().tobytes() for layer in layers for tensor in layer)

    def until_promoted(self, rid: str, keys: list[str]) -> int:
        """Blocks in G2 once nothing is on its way up any more."""
        for _ in range(3000):
            hit = self.lookup(rid, keys)
            if not self.linker._requests.of(rid).waits:
                return hit
            time.sleep(0.01)
        pytest.fail("the promotion does not end")

    def until_resident(self, rid: str, keys: list[str]) -> int:
        for _ in range(3000):
            hit = self.lookup(rid, keys)
            if not self.linker.awaited(rid):
                return hit
            time.sleep(0.01)
        pytest.fail("the request waits for ever")


def keys_of(count: int, seed: int = 0) -> list[str]:
    return [hashlib.sha256(f"{seed}/{index}".encode()).hexdigest() for index in range(count)]
