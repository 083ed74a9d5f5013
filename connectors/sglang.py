"""SGLang: kvtier below the device pool, as a UnifiedCacheLinker.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVTierLinker", "linker_module_path": "kvtier.connectors.sglang",
        "linker_extra_config": {"kvtier_config": "kvtier.yaml"}}'

SGLang keeps its radix tree and G1; kvtier owns G2 … G4. SGLang makes one linker in every rank's scheduler process, so
each rank has a manager of its own and its rank is in the namespace. Blocks are SGLang's pages, named by SGLang's own
SHA-256 chain, which salts and extra keys seed.

    lookup    G2 answers at once; what lies deeper is promoted meanwhile, and the request passed over until it is there
              or its time is up (deadlines.get). So a load only ever copies verified bytes from host RAM.
    load      refused (the engine computes) unless every block is in G2 at that moment.
    offload   one copy per block that G2 lacks; restored pages come back here and cost a dictionary look-up.

Requests say {"kvtier": {"retention": "1h", …}} in their sampling parameters' `custom_params`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

import kvtier
from kvtier.block import BlockKey, Scope
from kvtier.connectors.common import Control, Controls, Scopes, Settings, engine_keys, epoch_after_reset
from kvtier.connectors.sglang_hooks import Follower, install
from kvtier.connectors.sglang_pages import Load, Pages
from kvtier.connectors.sglang_pool import Ranks, namespace_of, pool_of
from kvtier.errors import IdentityError
from kvtier.kernels.engine import cpus_near
from kvtier.lease import Lease
from kvtier.metrics import serve
from kvtier.namespace import Namespace

log = logging.getLogger(__name__)

T = TypeVar("T")

_VISITS_MAX = 4096


@dataclass(slots=True)
class _Visit:
    """A request between its first look-up and its admission. `chain` is its prompt's whole pages, from the first."""

    chain: list[BlockKey]
    start: int  # pages that are on the device
    control: Control
    until: float
    promotion: Future[Lease] | None = None
    waits: bool = False  # as of the last look-up
    decided: bool = False  # on every rank: waits no longer
    counted: bool = False


def _degrades(fallback: T) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Whatever goes wrong in the cache is a miss or a refusal to the engine: its scheduler must not see exceptions."""

    def decorate(verb: Callable[..., T]) -> Callable[..., T]:
        @wraps(verb)
        def guarded(*arguments: Any, **named: Any) -> T:
            try:
                return verb(*arguments, **named)
            except Exception:
                log.exception("%s failed; the engine goes on without", verb.__name__)
                return fallback

        return guarded

    return decorate


class KVTierLinker(Follower, UnifiedCacheLinker):  # type: ignore[misc]  # sglang has no types
    """See the module. Every method is called by the scheduler's thread of this rank.

    Raises ConfigError or IdentityError at construction, which stops the engine's start, for what would never work.
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
        self._settings = Settings.parse(extra_config or {}, more=("metrics_port",))
        self.forward_stream = forward_stream
        device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        _refuse(params)
        self._pool = pool_of(device_pool, params.page_size, components)
        self._namespace = _namespace(server_args, self._settings, self._pool)
        self.pools = {PoolName.KV: device_pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(self._pool.tensors))
        config = self._settings.config
        self._controls, self._scopes = Controls(config), Scopes(config)
        self._wait_s = config.deadlines.get
        self._order = self._ordering_stream()
        self._pages: Pages | None = self._open(self._namespace)
        self._swap = threading.Lock()  # of `_namespace` and `_pages` together
        self._rotation: threading.Thread | None = None
        self._stale = False  # weights changed, and the tree was not flushed since
        self._visits: OrderedDict[str, _Visit] = OrderedDict()
        self._meeting: tuple[Any, Callable[[], list[str]]] | None = None
        self._owner: Any = None
        self._head: list[str] = []
        self._queue: list[tuple[str, Lease, list[int]]] = []
        self._loads: dict[int, Load] = {}
        self._lost = 0  # offloads that a replaced cache still owes the tree an answer for
        self._serve_metrics(extra_config or {})

    def _open(self, namespace: Namespace) -> Pages:
        cache = self.open_cache(namespace)
        try:
            return Pages(cache, self._pool, self._wait_s, self._behind_writers)
        except BaseException:
            cache.close()
            raise

    def _ordering_stream(self) -> Any:
        """A stream that carries only the order of offloads behind forwards; None where nothing is asynchronous."""
        if not self._pool.tensors[0][0].is_cuda:
            return None
        import torch

        return torch.cuda.Stream()

    def open_cache(self, namespace: Namespace) -> kvtier.Cache:
        """The cache below; a seam for tests and for other tiers."""
        near = cpus_near(self._pool.tensors[0][0].device)
        return kvtier.open(self._settings.config, namespace, near=[near])

    def _serve_metrics(self, extra: dict[str, Any]) -> None:
        port = extra.get("metrics_port")
        if port is not None:
            serve(self.stats, port=int(port) + self._namespace.rank)

    def stats(self) -> dict[str, Any]:
        """The cache's `stats()`; empty while it is being replaced."""
        pages = self._pages
        return pages.cache.stats() if pages is not None else {}

    def _behind_writers(self, submit: Callable[[], int]) -> int:
        """Submit a copy out of the device's pages behind the forward that fills them."""
        if self._order is None:
            return submit()
        import torch

        for event in self.record_offload_ready():
            self._order.wait_event(event)
        with torch.cuda.stream(self._order):
            return submit()

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def meet(self, req: Any, head: Callable[[], list[str]]) -> None:
        self._meeting = (req, head)

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """All restorable lengths, in pages after those on the device: 1 … what G2 has now."""
        return list(range(1, self._resident(rid, transfers) + 1))

    @_degrades(0)
    def _resident(self, rid: str, transfers: Sequence[Any]) -> int:
        meeting, self._meeting = self._meeting, None
        pages = self._pages
        if pages is None or meeting is None or meeting[0].rid != rid:
            return 0
        visit = self._visit(rid, *meeting, _kv(transfers).keys)
        if visit is None or not visit.control.load:
            return 0
        tail = visit.chain[visit.start :]
        resident = pages.cache.manager.prefix(tail)
        self._promote(visit, pages, resident == len(tail))
        if not visit.waits and not visit.counted:
            visit.counted = True
            with pages.cache.manager.pin(visit.chain, visit.start) as lease:
                pages.cache.manager.count(lease, len(tail))
        return resident

    def _visit(self, rid: str, req: Any, head: Callable[[], list[str]], tail: Sequence[str]) -> _Visit | None:
        """What is known of the request, brought up to date; None where it may not be cached."""
        visit = self._visits.get(rid)
        last = bytes.fromhex(tail[-1])
        if visit is not None and visit.chain[-1].endswith(last) and len(visit.chain) - visit.start == len(tail):
            return visit
        hashes = [*head(), *tail]
        control = self._controls.parse(_asked(req))
        scope = self._scope(req, control)
        if scope is None:
            return None
        chain = engine_keys(scope, [bytes.fromhex(page) for page in hashes])
        start = len(hashes) - len(tail)
        if visit is not None:
            visit.chain, visit.start = chain, start
            return visit
        visit = self._visits[rid] = _Visit(chain, start, control, time.monotonic() + self._wait_s)
        while len(self._visits) > _VISITS_MAX:
            self.forget(next(iter(self._visits)))
        return visit

    def _scope(self, req: Any, control: Control) -> Scope | None:
        # SGLang folds an adapter's id into the extra key, which seeds the page hashes; both also name the scope.
        adapter = (req.extra_key or "").encode()
        return self._scopes.of(req.cache_salt, adapter, control.terms)

    def _promote(self, visit: _Visit, pages: Pages, complete: bool) -> None:
        """Start bringing up what G2 lacks, once per request, and note whether it is worth waiting for."""
        if visit.decided or complete or not pages.cache.manager.lower:
            visit.waits = False
            return
        if visit.promotion is None:
            work = pages.cache.manager.promote(visit.chain, visit.until, visit.start)
            visit.promotion = pages.cache.submit(work)
        visit.waits = not visit.promotion.done() and time.monotonic() < visit.until

    def awaited(self, rid: str, agree: Callable[[bool], bool]) -> bool:
        visit = self._visits.get(rid)
        if visit is None or visit.decided:
            return False
        visit.decided = agree(not visit.waits)
        return not visit.decided

    def forget(self, rid: str) -> None:
        visit = self._visits.pop(rid, None)
        if visit is not None and visit.promotion is not None:
            visit.promotion.cancel()
            visit.promotion.add_done_callback(_release_result)

    # ── loading ─────────────────────────────────────────────────────────────────────────────────────────────

    @_degrades(False)
    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queue blocks for pages; False, and the engine computes, unless G2 holds every one of them now."""
        transfer, visit, pages = _kv(transfers), self._visits.get(rid), self._pages
        if visit is None or pages is None:
            return False
        wanted = visit.chain[: visit.start + len(transfer.keys)]
        numbers = _page_numbers(transfer.device_indices, self._pool.page)
        lease = pages.cache.manager.pin(wanted, visit.start)
        if len(lease) < len(transfer.keys) or len(numbers) != len(transfer.keys):
            lease.release()
            return False
        self._queue.append((rid, lease, numbers))
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; -1 if nothing is. Errors are told by `finish_layer_wise_loading`."""
        queue, self._queue = self._queue, []
        if not queue:
            return -1
        counter = self.layer_done_counter
        index: int = counter.update_producer()
        try:
            if self._pages is None:
                raise RuntimeError("the cache is being replaced")
            self._loads[index] = self._pages.load([(lease, numbers) for _, lease, numbers in queue])
            for layer in range(counter.num_layers):
                counter.complete(index, layer)
        except Exception as error:
            log.exception("a load of %d requests could not be started", len(queue))
            for _, lease, _ in queue:
                lease.release()
            counter.fail(index, error)
        return index

    @_degrades(False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        started = bool(self.layer_done_counter.finish(counter_index))
        load = self._loads.pop(counter_index, None)
        if load is None:
            return started
        return self._pages is not None and self._pages.landed(load) and started

    @_degrades(False)
    def cancel_queued_load(self, rid: str) -> bool:
        kept = [entry for entry in self._queue if entry[0] != rid]
        dropped = [entry for entry in self._queue if entry[0] == rid]
        self._queue = kept
        for _, lease, _ in dropped:
            lease.release()
        return bool(dropped)

    # ── offload ─────────────────────────────────────────────────────────────────────────────────────────────

    def own(self, req: Any | None) -> None:
        self._owner = req

    def place(self, head: list[str]) -> None:
        self._head = head

    @_degrades(False)
    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Copy a node's pages to G2 where it lacks them. False: not queued, the tree will ask again."""
        pages, owner, head = self._pages, self._owner, self._head
        self._head = []
        transfer = _kv(transfers)
        if pages is None or owner is None or not transfer.keys:
            return False
        control = self._controls.parse(_asked(owner))
        scope = self._scope(owner, control)
        if scope is None or not control.store:
            return False
        hashes = [*head, *transfer.keys]
        chain = engine_keys(scope, [bytes.fromhex(page) for page in hashes])
        numbers = _page_numbers(transfer.device_indices, self._pool.page)
        if len(numbers) != len(transfer.keys):
            return False
        return pages.offload(chain, len(head), numbers, control.terms)

    @_degrades(0)
    def num_completed_offloads(self) -> int:
        return self._lost + (self._pages.completed() if self._pages is not None else 0)

    def pop_completed_offload(self) -> bool:
        if self._lost:
            self._lost -= 1
            return False
        return self._pages is not None and self._pages.pop()

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    @_degrades(None)
    def weights_change(self) -> None:
        if self._settings.config.keep_on_reset:
            return
        self._stale = True
        self._rotate()

    @_degrades(None)
    def reset(self) -> None:
        """The tree is being emptied: let transfers end, forget requests. Stored blocks stay, unless the weights changed
        since the last time: then those stored meanwhile may stand on a prefix of the old ones."""
        self._quiesce()
        if self._stale:
            self._stale = False
            self._rotate()

    def _quiesce(self) -> None:
        for rid in list(self._visits):
            self.forget(rid)
        for _, lease, _ in self._queue:
            lease.release()
        self._queue.clear()
        if self._pages is not None:
            self._pages.quiesce()
        self._lost = 0
        self._loads.clear()
        self.layer_done_counter.reset()

    def _rotate(self) -> None:
        """Go on in a namespace that no other process shares. The old cache closes and the new one opens off this
        thread; until then everything misses."""
        for rid in list(self._visits):
            self.forget(rid)
        with self._swap:
            namespace = self._namespace = epoch_after_reset(self._settings.config, self._namespace)
            old, self._pages = self._pages, None
        self._lost += old.outstanding() if old is not None else 0
        log.warning("new weights: the cache goes on in a namespace of this process alone, and misses until it is open")
        self._rotation = threading.Thread(
            target=self._replace, args=(old, namespace, self._rotation), name="kvtier-rotate", daemon=True
        )
        self._rotation.start()

    def _replace(self, old: Pages | None, namespace: Namespace, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        _close(old)
        if self._namespace is not namespace:
            return  # a later rotation opens
        try:
            opened: Pages | None = self._open(namespace)
        except Exception:
            log.exception("the cache could not be opened again after new weights; the engine goes on without")
            return
        with self._swap:
            if self._namespace is namespace:
                self._pages, opened = opened, None
                log.warning("the cache is open again after new weights")
        _close(opened)

    @_degrades(None)
    def close(self) -> None:
        self._quiesce()
        if self._rotation is not None:
            self._rotation.join(self._wait_s)
        with self._swap:
            pages, self._pages = self._pages, None
            self._namespace = self._namespace.rotated("closed")
        _close(pages)


def _close(pages: Pages | None) -> None:
    if pages is not None:
        pages.close()
        pages.cache.close()


def _namespace(server_args: Any, settings: Settings, pool: Any) -> Namespace:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    ranks = Ranks(parallel.attn_tp_rank, parallel.attn_tp_size, parallel.pp_rank, parallel.pp_size)
    if ranks.pp > 1:
        raise IdentityError("pipeline parallelism: SGLang's linker cannot make its stages agree on a prefix; use pp 1")
    for name in ("attn_cp_size", "attn_dcp_size"):
        if getattr(parallel, name, 1) > 1:
            raise IdentityError(f"{name} is {getattr(parallel, name)}: pages are spread over ranks; kvtier serves 1")
    return namespace_of(server_args, ModelConfig.from_server_args(server_args), settings, pool, ranks)


def _refuse(params: Any) -> None:
    if params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise IdentityError(
            "the KV of a draft model is not kept; start without speculative decoding, or without kvtier"
        )


def _asked(req: Any) -> object:
    """The request's "kvtier" parameters; None if it has none."""
    custom = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    return custom.get("kvtier") if isinstance(custom, dict) else None


def _kv(transfers: Sequence[Any]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _page_numbers(indices: Any, page: int) -> list[int]:
    """Page numbers of token slots. Empty unless they are whole, aligned pages."""
    rows = indices.detach().to("cpu").view(-1, page)
    first = rows[:, 0]
    aligned = bool((first % page == 0).all()) and bool((rows[:, -1] - first == page - 1).all())
    return [int(number) for number in (first // page).tolist()] if aligned else []


def _release_result(promotion: Future[Lease]) -> None:
    if not promotion.cancelled() and promotion.exception() is None:
        promotion.result().release()
