"""SGLang: kvtier below the device pool, as a UnifiedCacheLinker.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVTierLinker", "linker_module_path": "kvtier.connectors.sglang",
        "linker_extra_config": {"kvtier_config": "kvtier.yaml"}}'

SGLang owns its radix tree and G1, kvtier G2 … G4. SGLang makes one linker in every rank's scheduler process, so
each rank has a manager of its own and its rank is in the namespace. Blocks are SGLang's pages, named by SGLang's own
SHA-256 chain, which salts and extra keys seed.

    lookup    G2 answers at once; deeper blocks are promoted meanwhile, and the request passed over until they are there
              or its time is up (deadlines.get). So a load only ever copies verified bytes from host RAM.
    load      refused (the engine computes) unless every block is in G2 at that moment.
    offload   one copy per block that G2 lacks; restored pages come back here and cost a dictionary look-up.

With several ranks, decisions that each makes for itself are put to a vote (waiting, loading) or reported later
(offloads complete, well or not), so that their trees stay alike.

Requests say {"kvtier": {"retention": "1h", …}} in their sampling parameters' `custom_params`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

import kvtier
from kvtier.clock import SystemClock
from kvtier.config import Config
from kvtier.connectors.announcer import Announcer, start_first, write_last
from kvtier.connectors.block_events import TIERS, keeps_contents, tiers_announced
from kvtier.connectors.control import Control
from kvtier.connectors.fallback import falls_back_to
from kvtier.connectors.prefill_clock import PrefillClock
from kvtier.connectors.rotation import Rotation
from kvtier.connectors.settings import Settings, flag, port, recompute
from kvtier.connectors.sglang import adapters
from kvtier.connectors.sglang.beside import PoolBeside
from kvtier.connectors.sglang.boundary_requests import BoundaryRequests
from kvtier.connectors.sglang.copies import PageCopies
from kvtier.connectors.sglang.events import PageEvents, is_dynamo, publishes
from kvtier.connectors.sglang.hooks import NO_CHECKPOINT, Checkpoint, LinkerListener, install
from kvtier.connectors.sglang.identity import namespace_of_rank, process_number
from kvtier.connectors.sglang.loads import PageLoads, WantedPages
from kvtier.connectors.sglang.metrics import EngineMetrics
from kvtier.connectors.sglang.offloads import PageOffloads
from kvtier.connectors.sglang.pool import pool_of
from kvtier.connectors.sglang.refusals import grid_of, refuse, window_of
from kvtier.connectors.sglang.requests import QueuedRequest, QueuedRequests
from kvtier.connectors.sglang.states import States
from kvtier.connectors.sglang.transfers import of_pool, page_numbers
from kvtier.connectors.sglang.windows import Windows
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.kernels.engine import cpus_near
from kvtier.metrics import serve
from kvtier.retention.terms import Depth

log = logging.getLogger(__name__)

ARGUMENTS = {"metrics_port": port, "recompute": recompute, "event_tiers": tiers_announced, "keep_contents": flag}


class KVTierLinker(LinkerListener, UnifiedCacheLinker):  # type: ignore[misc]  # sglang has no types
    """See the module. Every method is called by the scheduler's thread of this rank.

    Raises ConfigError or IdentityError at construction, which stops the engine's start, for a set-up that would never
    work.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None,
        forward_stream: Any = None,
    ) -> None:
        install()
        self._settings = Settings.parse(extra_config or {}, ARGUMENTS)
        self._weighs_loads = self._settings.own.get("recompute", "auto") == "auto"  # against prefill
        self.forward_stream = forward_stream
        device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        refuse(server_args, params)
        self._pool = pool_of(device_pool, params.page_size, components, window_of(server_args, params))
        self._beside: PoolBeside | None = Windows.of(self._pool, params.token_to_kv_pool_allocator)
        if self._pool.states:
            self._beside = States.of(self._pool, grid_of(params), params.req_to_token_pool)
        self.branch = self._beside.branch if self._beside is not None else ""
        adapters.remember(getattr(server_args, "lora_paths", None))
        namespace = namespace_of_rank(server_args, self._settings, self._pool)
        self.pools = {PoolName.KV: device_pool}
        if self._pool.beside:
            self.pools[PoolName.SWA] = device_pool.swa_kv_pool  # without it the tree would take windows for not needed
        self.layer_done_counter = LayerWiseLoadCounter(self._pool.depth)
        if self._pool.states:  # whose layers wait for theirs at the table of requests
            self.pools[PoolName.MAMBA] = device_pool.mamba_pool
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._wait_s = self._settings.config.deadlines.get
        self._order = self._ordering_stream()
        ranks = (getattr(server_args, name, 1) or 1 for name in ("tp_size", "pp_size", "dp_size"))
        self._alone = all(int(count) == 1 for count in ranks)
        given = self._settings, self._pool.page, self._current
        self._requests = QueuedRequests(*given)
        if self._beside is not None:
            self._requests = BoundaryRequests(self._beside, namespace.ranks == 1, *given)
        self._prefill = PrefillClock(self._computed, self._pool.page)
        self._looked_up: tuple[Any, Callable[[], list[str]]] | None = None
        self._agree: Callable[[bool], bool] = bool
        self._loads = PageLoads(self.layer_done_counter, lambda: self._pages)
        self._offloads = PageOffloads(
            self._pool.page, self._beside, self._requests.control_of, self._remember, lambda: self._pages
        )
        self._events: Counter[str] = Counter()
        tiers = self._settings.own.get("event_tiers", TIERS)
        self._kv_events: PageEvents | None = None
        if publishes(server_args) and self._beside is None:  # whose pages are of use at boundaries alone
            self._kv_events = PageEvents(self._pool.page, tiers=tiers, dynamo=is_dynamo(server_args))
        self._announcers: dict[int, Announcer] = {}  # by cache
        self._rotation = Rotation(self._settings.config, namespace, self._open, self._close)
        self._rotation.open()
        self._metrics = EngineMetrics.of(server_args, self._tier_stats)
        if (first := self._settings.own.get("metrics_port")) is not None:
            serve(self.stats, port=first + process_number())

    def _open(self, namespace: Namespace) -> PageCopies:
        cache = self.open_cache(namespace)
        try:
            if self._kv_events is not None:
                self._announce(cache, self._kv_events)
            return PageCopies(cache, self._pool, self._wait_s, self._behind_writers)
        except BaseException:
            cache.close()
            raise

    def _announce(self, cache: kvtier.Cache, events: PageEvents) -> None:
        """Publish events of the cache's blocks from now on."""
        cache.manager.subscribe(events.events)
        if keeps_contents(self._settings):
            announcer = self._announcers[id(cache)] = events.announcer(cache.manager.hierarchy)
            start_first(cache, announcer)

    def _close(self, pages: PageCopies) -> None:
        pages.close()
        if (announcer := self._announcers.pop(id(pages.cache), None)) is not None:
            write_last(pages.cache, announcer)
        pages.cache.close()

    def _ordering_stream(self) -> Any:
        """A stream that carries only the order of copies behind forwards; None where nothing is asynchronous."""
        if not self._pool.on_gpu:
            return None
        import torch

        return torch.cuda.Stream()

    def open_cache(self, namespace: Namespace) -> kvtier.Cache:
        """The cache below; a seam for tests and for other tiers."""
        near = cpus_near(self._pool.tensors[0][0].device)
        cache = kvtier.open(self._rotation.config, namespace, near=[near], computes=True)
        # Ranks decide alike, and only one of several could be asked.
        cache.source, cache.on_reload = self._settings.source if self._alone else None, self._rotation.follow
        return cache

    def _current(self) -> Config:
        """The configuration in force."""
        return self._rotation.config

    @property
    def _pages(self) -> PageCopies | None:
        return self._rotation.current

    def stats(self) -> dict[str, Any]:
        """The cache's `stats()`, and "engine": tokens read by tier, and events. Only the latter while the cache is
        being replaced."""
        return {**self._tier_stats(), "engine": self._engine_stats()}

    def _tier_stats(self) -> dict[str, Any]:
        pages = self._pages
        return {} if pages is None else pages.cache.stats()

    def _engine_stats(self) -> dict[str, dict[str, int]]:
        pages = self._pages
        sources = [
            self._events,
            self._requests.events,
            self._loads.events,
            self._offloads.events,
            *([pages.events] if pages is not None else []),
        ]
        events: Counter[str] = Counter()
        for source in sources:
            events.update(dict(source))  # a copy at once: metrics are asked for on a thread of their own
        return {"tokens_read": dict(self._requests.tokens_read), "events": {k: n for k, n in events.items() if n}}

    def _behind_writers(self, submit: Callable[[], int]) -> int:
        """Submit a copy behind the forward that runs: it may fill pages that are offloaded, and still uses pages that
        were freed when it had been launched, which a load may be given."""
        if self._order is None:
            return submit()
        import torch

        for event in self.record_offload_ready():
            self._order.wait_event(event)
        with torch.cuda.stream(self._order):
            return submit()

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def before_lookup(self, req: Any, head: Callable[[], list[str]], agree: Callable[[bool], bool]) -> None:
        self._looked_up, self._agree = (req, head), agree
        if (queued := self._requests.of(req.rid)) is not None:
            queued.waits = False  # unless the look-up says so, which does not come when the device has all of it by now

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """All restorable lengths, in pages after those on the device: 1 … what G2 has now, and of models with windows
        or states those at whose end it has a whole one."""
        self._requests.arrive(rid)
        return self._restorable(rid, transfers)

    def known_of(self, rid: str) -> int:
        queued, step = self._requests.of(rid), 1 if self._beside is None else self._beside.step
        return queued.known // step * step if queued is not None else 0

    @falls_back_to([])
    def _restorable(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        looked_up, self._looked_up = self._looked_up, None
        queued, pages = self._requests.arrive(rid), self._pages
        queued.waits = False
        if pages is None or looked_up is None or looked_up[0].rid != rid:
            return []
        if not pages.ready:
            self._events["lookups_without_copies"] += 1
            return []
        tail = of_pool(transfers, PoolName.KV).keys
        if self._requests.update_chain(queued, *looked_up, tail, pages.cache):
            self._remember(looked_up[0], queued.control, queued.chain, 0)
        return self._requests.restorable(queued, pages.cache)

    def awaited(self, rid: str) -> bool:
        queued = self._requests.of(rid)
        if queued is None or queued.decided:
            return False
        queued.decided = self._agree(not queued.waits or SystemClock().monotonic() >= queued.until_s)
        if not queued.decided:
            time.sleep(0)  # a scheduler with nothing else to do spins: let the promotion have the interpreter
        return not queued.decided

    @falls_back_to(None)
    def admitted(self, req: Any) -> None:
        looked_up, self._looked_up = self._looked_up, None
        head = looked_up[1] if looked_up is not None and looked_up[0].rid == req.rid else None
        try:
            if self._pages is not None:
                self._requests.admit(req, head, self._pages.cache)
        finally:  # whatever failed: all ranks have the same requests, since they vote on them
            self._requests.forget(req.rid)

    def forget(self, rid: str) -> None:
        self._requests.forget(rid)

    @falls_back_to(None)
    def batch_done(self, batch: Any) -> None:
        mode, began = batch.forward_mode, batch.launch_ts
        # Mixed batches also decode, and those that were loaded for have waited.
        pure = mode.is_extend() and not mode.is_mixed() and batch.hicache_consumer_index < 0
        self._prefill.ran(int(batch.extend_num_tokens or 0) if pure else 0, began, time.monotonic())
        if self._metrics is not None:
            self._metrics.update(self._engine_stats())

    def _computed(self, blocks: int, seconds: float) -> None:
        if self._pages is not None and self._weighs_loads:
            self._pages.cache.manager.computed(blocks, seconds)

    # ── loading ─────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queue blocks for pages; False, and the engine computes, unless G2 holds every one of them now, on every
        rank."""
        mine = self._pinned(rid, transfers)
        if not self._agree(mine is not None):
            if mine is not None:
                mine[1].release()
            return False
        assert mine is not None
        queued, wanted = mine
        queued.lease = wanted.lease
        self._loads.add(wanted)
        return True

    @falls_back_to(None)
    def _pinned(self, rid: str, transfers: Sequence[Any]) -> tuple[QueuedRequest, WantedPages] | None:
        transfer, queued, pages = of_pool(transfers, PoolName.KV), self._requests.of(rid), self._pages
        if queued is None or not queued.reads or pages is None or not pages.ready:
            return None
        count, numbers = len(transfer.keys), page_numbers(transfer.device_indices, self._pool.page)
        manager, chain = pages.cache.manager, queued.chain[: queued.start + count]
        boundary = None
        if self._beside is not None:
            boundary = self._beside.pin(manager, chain, queued.start, transfers)
            if boundary is None:
                return None
        wanted = WantedPages(rid, manager.pin(chain, queued.start), numbers, boundary)
        if not len(wanted.lease) == count == len(numbers):
            wanted.release()
            return None
        wanted.lease.tiers = queued.promoted.tiers(queued.start, count)
        return queued, wanted

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; -1 if nothing is. `finish_layer_wise_loading` reports errors."""
        return self._loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Raises KVTierError, which ends the engine, where a copy into its pages was begun and does not end."""
        return self._loads.finish(counter_index)

    @falls_back_to(False)
    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    # ── offload ─────────────────────────────────────────────────────────────────────────────────────────────

    def offloads_for(self, req: Any | None, checkpoint: Checkpoint = NO_CHECKPOINT) -> None:
        self._offloads.are_of(req, checkpoint)

    def before_offload(self, head: list[str], path: Callable[[], Any] | None = None) -> None:
        self._offloads.follow(head, path)

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Copy a node's pages to G2 where it lacks them. False, on every rank alike: the request does not want it, or
        there is none. Later errors are in the completion; the tree then asks again."""
        return self._offloads.begin(transfers)

    @falls_back_to(0)
    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    @falls_back_to(None)
    def _remember(self, req: Any, control: Control | None, chain: Sequence[BlockKey], start: int) -> None:
        """Know what these blocks of a request hold, for events of them."""
        if self._kv_events is not None and control is not None:
            lasts = control.store and control.chain_terms(self._pool.page).ceiling >= Depth.G3
            isolated = bool(control.request.isolated)
            self._kv_events.remember(req, chain, start, lasting=len(chain) if lasts else 0, isolated=isolated)

    @falls_back_to([])
    def kv_events(self) -> list[Any]:
        return [] if self._kv_events is None else list(self._kv_events.take())

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    @falls_back_to(None)
    def reset(self) -> None:
        """The tree is being emptied: wait for copies, forget requests. Stored blocks stay."""
        self._requests.clear()
        self._offloads.clear()
        try:
            if self._pages is not None:
                self._pages.quiesce()
        finally:
            self._loads.clear()

    @falls_back_to(None)
    def memory_goes(self) -> None:
        if self._pages is not None:
            self._pages.free_pages()

    def _keeps_on_reset(self) -> bool:
        return self._rotation.config.keep_on_reset  # as it was reloaded

    def _rotate(self) -> bool:
        self._requests.clear()
        old = self._pages
        if old is not None:
            self._offloads.lose(old.leave())  # before another thread closes it
            self._events.update(dict(old.events))
        if old is not None and self._kv_events is not None:
            old.cache.manager.subscribe(None)
        self._rotation.rotate()
        if self._kv_events is not None:
            self._kv_events.clear()
        return True

    @falls_back_to(None)
    def close(self) -> None:
        self.reset()
        self._rotation.close(self._settings.config.deadlines.close + self._wait_s)
