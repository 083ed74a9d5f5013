"""SGLang's HiCache over kvtier: G2 … G4 below SGLang's own host pool, as a dynamic HiCacheStorage.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvtier", "module_path": "kvtier.connectors.sglang.hicache", "class_name": "KVTierStorage",
          "interface_v1": 1, "hicache_storage_pass_prefix_keys": true, "kvtier_config": "kvtier.yaml"}'

For set-ups that keep HiCache and its host tier; `kvtier.connectors.sglang` is the shorter way. Each page is copied
once, between SGLang's host pool and G2, which is a small staging area here. SGLang calls from its own storage threads,
so these calls may wait, up to the configuration's deadlines. Salts and extra keys seed the page hashes, so tenants
never share; but the request is not known here, and all pages lie in one scope. New weights are noticed as there.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

import kvtier
from kvtier.clock import SystemClock
from kvtier.connectors.control import Controls
from kvtier.connectors.fallback import falls_back_to, or_fallback
from kvtier.connectors.identity import engine_keys
from kvtier.connectors.rotation import Rotation
from kvtier.connectors.settings import Settings, port
from kvtier.connectors.sglang import adapters
from kvtier.connectors.sglang.hooks import WeightsListener, install
from kvtier.connectors.sglang.identity import Ranks, engine_fields, process_number
from kvtier.connectors.sglang.metrics import EngineMetrics
from kvtier.errors import ConfigError, IdentityError
from kvtier.identity.keys import SHARED, BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.metrics import serve
from kvtier.tiers.host.slot import copy_in, copy_out
from kvtier.times import Wall

log = logging.getLogger(__name__)

_SGLANG_KEYS = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys", "tp_lcm_size",
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "allocator",
    }
)  # fmt: skip
"""Keys of the extra configuration that SGLang reads."""

Page = list[tuple[int, int]]
"""Addresses and sizes of a page's pieces."""

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class KVTierStorage(WeightsListener, HiCacheStorage):  # type: ignore[misc]  # sglang has no types
    """See the module. Opens its cache when SGLang registers the host pool; thread-safe from then on.

    Raises ConfigError or IdentityError for a set-up that would never work. Later errors are misses, or refused pages.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError(
                "hicache-storage-backend-extra-config: interface_v1 must be set; kvtier serves no other way of calling"
            )
        self._settings = Settings.parse(
            {k: v for k, v in extra.items() if k not in _SGLANG_KEYS}, {"metrics_port": port}
        )
        self._port = self._settings.own.get("metrics_port")
        if self._settings.config.security.salt == "deny":
            raise ConfigError("security.salt: deny cannot be kept below HiCache, which names no salts; use the linker")
        install()
        self._place = storage_config
        self._control = Controls(self._settings.config).parse(None)
        self._rotation: Rotation[kvtier.Cache] | None = None
        self._metrics: EngineMetrics | None = None
        self._reporting = threading.Lock()
        self._warned = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the cache for this pool's pages. Reads the checkpoint; may take seconds."""
        self.mem_pool_host = mem_pool_host
        self.close()
        namespace = self._namespace(mem_pool_host)
        rotation = Rotation(self._settings.config, namespace, self.open_cache, kvtier.Cache.close)
        rotation.open()
        self._rotation = rotation
        if self._port is not None:
            first, self._port = self._port, None
            serve(self.stats, port=first + process_number())
        if self._metrics is None:
            self._metrics = EngineMetrics.of(running_engine()[0], self.stats)

    def _report(self) -> None:
        """Have SGLang's own metrics follow the tiers, at most once a second. Any thread; a report under way is not
        waited for."""
        if self._metrics is not None and self._reporting.acquire(blocking=False):
            try:
                or_fallback(self._metrics.update, {"tokens_read": {}, "events": {}}, fallback=None)
            finally:
                self._reporting.release()

    def stats(self) -> dict[str, Any]:
        """The cache's `stats()`; empty while there is none."""
        cache = self._cache
        return cache.stats() if cache is not None else {}

    @property
    def _cache(self) -> kvtier.Cache | None:
        """None before there is a host pool, after `close`, and while it is opened anew after new weights."""
        return self._rotation.current if self._rotation is not None else None

    def open_cache(self, namespace: Namespace) -> kvtier.Cache:
        """The cache below; a seam for tests and for other tiers."""
        return kvtier.open(self._settings.config, namespace, computes=True)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Only the KV pool. Raises IdentityError for others, which fails the attach: half a state would be wrong."""
        if host_pool_name != PoolName.KV:
            raise IdentityError(
                f"HiCache registers a pool of {host_pool_name} pages; kvtier keeps full attention and MLA only"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _namespace(self, pool: Any) -> Namespace:
        place = self._place
        if pool.layout not in _LAYOUTS:
            raise IdentityError(f"hicache-mem-layout {pool.layout} is not served; use one of {', '.join(_LAYOUTS)}")
        for name in ("attn_cp_size", "dcp_size"):
            if getattr(place, name, 1) > 1:
                raise IdentityError(f"{name} is {getattr(place, name)}: pages are spread over ranks; kvtier serves 1")
        mla = bool(place.is_mla_model)
        server, model_config = running_engine()
        fields = engine_fields(server, model_config, self._settings, str(pool.dtype).removeprefix("torch."))
        if refs := getattr(server, "lora_paths", None):  # a page's request is not known: all pages are of all of them
            adapters.remember(refs)
            fields["weights"] += f"+adapters:{adapters.name_of_all(refs)}"
        return Namespace(
            layout=f"sglang-host:{pool.layout}",
            block_tokens=int(pool.page_size),
            block_bytes=sum(size for _, size in self._pieces([0])[0]),
            layers=f"{pool.start_layer}:{pool.end_layer}",
            kv_heads=int(getattr(pool, "head_num", 1)),
            head_size=int(getattr(pool, "head_dim", 0) or 0),
            group="mla" if mla else "full",
            **Ranks(place.tp_rank, place.tp_size, place.pp_size).fields(mla),
            **fields,
        )

    # ── pages ───────────────────────────────────────────────────────────────────────────────────────────────

    def _pieces(self, firsts: Sequence[int]) -> list[Page]:
        """Each page's pieces in the host pool; a page starts at token slot `firsts[i]`."""
        import torch

        page = self.mem_pool_host.page_size
        indices = torch.cat([torch.arange(first, first + page) for first in firsts])
        places = zip(*self.mem_pool_host.get_page_buffer_meta(indices), strict=True)
        pieces = [(int(address), int(size)) for address, size in places]
        each = len(pieces) // len(firsts)
        return [pieces[i : i + each] for i in range(0, len(pieces), each)]

    def _pages(self, host_indices: Any) -> list[Page]:
        return self._pieces([int(first) for first in host_indices[:: self.mem_pool_host.page_size].tolist()])

    @staticmethod
    def _chain(keys: Sequence[str], extra_info: Any) -> tuple[list[BlockKey], int]:
        """All pages from the prompt's first on, and how many of them come before `keys`."""
        before = list(getattr(extra_info, "prefix_keys", None) or [])
        return engine_keys(SHARED, [bytes.fromhex(key) for key in (*before, *keys)]), len(before)

    # ── the zero-copy interface ─────────────────────────────────────────────────────────────────────────────

    @falls_back_to(0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of `keys`, from the first on, are in some tier. Waits for lower tiers up to deadlines.lookup."""
        cache = self._cache
        if cache is None or not keys:
            return 0
        self._report()
        chain, start = self._chain(keys, extra_info)
        return max(0, cache.match(chain) - start)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy pages into the host pool, verified; true for the leading ones that are there by deadlines.get."""
        done = self._get(keys, host_indices, extra_info)
        self._report()
        return [True] * done + [False] * (len(keys) - done)

    @falls_back_to(0)
    def _get(self, keys: list[str], host_indices: Any, extra_info: Any) -> int:
        cache = self._cache
        if cache is None or not keys:
            return 0
        chain, start = self._chain(keys, extra_info)
        pages = self._pages(host_indices)
        with cache.get(chain, start=start) as hit:
            for block, page in zip(hit.blocks, pages, strict=False):
                copy_in(_views(page), block)
            return min(len(hit), len(pages))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy pages out of the host pool; true for those that are stored. Waits for space up to deadlines.put."""
        if extra_info is not None and extra_info.prefix_keys is None:
            self._warn_of_prefixes()
            return [False] * len(keys)
        if not getattr(self._place, "is_storage_writer", True):
            return [True] * len(keys)  # another rank writes these very bytes
        done = self._put(keys, host_indices, extra_info)
        self._report()
        return [True] * done + [False] * (len(keys) - done)

    def _warn_of_prefixes(self) -> None:
        """SGLang does not show the switch: only its calls do."""
        if not self._warned:
            self._warned = True
            log.error(
                "hicache-storage-backend-extra-config: hicache_storage_pass_prefix_keys must be true; without it "
                "kvtier cannot tell which pages come before a batch, and stores nothing"
            )

    @falls_back_to(0)
    def _put(self, keys: list[str], host_indices: Any, extra_info: Any) -> int:
        cache = self._cache
        if cache is None or not keys:
            return 0
        chain, start = self._chain(keys, extra_info)
        pages = self._pages(host_indices)
        manager, reached = cache.manager, start
        work = manager.hierarchy.begin(Wall("-inf"))  # on pages that are older: a purge from now on holds for all
        deadline = SystemClock().monotonic() + self._settings.config.deadlines.put
        while reached < len(chain):
            version = manager.space.version
            space = manager.queue_space() if manager.lower else len(chain)
            if space:
                stop = min(len(chain), reached + space)
                slots, reached = manager.reserve(chain, reached, stop, self._control.terms, work=work)
                generations = [slot.generation for slot in slots]
                try:
                    for slot in slots:
                        copy_out(_views(pages[slot.index - start]), slot.pieces[0])
                except BaseException:
                    manager.abort(slots, generations)
                    raise
                manager.commit(chain, slots, generations)
                if reached == stop:
                    continue
            with manager.lock:
                purged = work.lost(chain[:1])
            if purged or not cache.submit(manager.space.wait(deadline, version)).result():
                break
        manager.finish_put(chain)
        return reached - start

    # ── several pools ───────────────────────────────────────────────────────────────────────────────────────

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The KV pool alone: a prefix that needs pages of other pools is not restorable."""
        if any(transfer.name != PoolName.KV for transfer in pool_transfers or ()):
            return PoolTransferResult.empty()
        pages = self.batch_exists(keys, extra_info)
        return PoolTransferResult(pages, {}, list(range(1, pages + 1)))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {t.name: self._v2(self.batch_get_v1, t, extra_info) for t in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {t.name: self._v2(self.batch_set_v1, t, extra_info) for t in transfers}

    @staticmethod
    def _v2(verb: Any, transfer: Any, extra_info: Any) -> list[bool]:
        keys = list(transfer.keys or [])
        if transfer.name != PoolName.KV or transfer.host_indices is None:
            return [False] * len(keys)
        done: list[bool] = verb(keys, transfer.host_indices, extra_info)
        return done

    # ── the copying interface, which SGLang does not use with interface_v1 ──────────────────────────────────

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _copy(self, *args: Any, **options: Any) -> Any:
        """SGLang's base class demands these four; with interface_v1, the only one served, nothing calls them."""
        raise NotImplementedError("kvtier serves interface_v1 only")

    get = batch_get = set = batch_set = _copy

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    def _rotate(self) -> bool:
        if self._rotation is not None:
            self._rotation.rotate()
        return self._rotation is not None

    def clear(self) -> None:
        """Drop this namespace's pages from every tier, for all replicas that share it."""
        cache = self._cache
        if cache is not None:
            for tier in ("g2", *cache.manager.lower):
                cache.evict(tier)

    def close(self) -> None:
        """Flush within deadlines.close, and close. Idempotent."""
        rotation, self._rotation = self._rotation, None
        if rotation is not None:
            rotation.close(2 * self._settings.config.deadlines.close)


def running_engine() -> tuple[Any, Any]:
    """This process's server arguments and model configuration, as SGLang published them."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    server = get_server_args()
    return server, ModelConfig.from_server_args(server)


def _views(page: Page) -> list[memoryview]:
    """A page's memory in the host pool, which SGLang keeps alive during the call."""
    return [memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B") for address, size in page]
