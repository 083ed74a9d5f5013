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

With several ranks, what they decide for themselves is put to a vote (waiting, loading) or comes out later (offloads
complete, well or not), so that their trees stay alike.

Requests say {"kvtier": {"retention": "1h", …}} in their sampling parameters' `custom_params`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

import kvtier
from kvtier.connectors.common import PrefillClock, Settings, engine_keys, weighs
from kvtier.connectors.rotation import Rotation
from kvtier.connectors.sglang.copies import PageCopies
from kvtier.connectors.sglang.hooks import LinkerListener, install
from kvtier.connectors.sglang.loads import PageLoads, Wanted
from kvtier.connectors.sglang.metrics import EngineMetrics
from kvtier.connectors.sglang.pool import Ranks, namespace_of, pool_of
from kvtier.connectors.sglang.requests import QueuedRequest, QueuedRequests
from kvtier.errors import IdentityError
from kvtier.identity.namespace import Namespace
from kvtier.kernels.engine import cpus_near
from kvtier.manager.lease import Lease
from kvtier.metrics import serve

log = logging.getLogger(__name__)

T = TypeVar("T")

ARGUMENTS = ("metrics_port", "recompute")
_NONE = cast("tuple[QueuedRequest, Lease, list[int]] | None", None)


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


class KVTierLinker(LinkerListener, UnifiedCacheLinker):  # type: ignore[misc]  # sglang has no types
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
        extra = extra_config or {}
        self._settings = Settings.parse(extra, ARGUMENTS)
        self._weighs = weighs(extra)  # whether loading is weighed against prefill
        self.forward_stream = forward_stream
        device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        _refuse(params)
        self._pool = pool_of(device_pool, params.page_size, components)
        namespace = _namespace(server_args, self._settings, self._pool)
        self.pools = {PoolName.KV: device_pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(self._pool.tensors))
        self._wait_s = self._settings.config.deadlines.get
        self._order = self._ordering_stream()
        self._visits = QueuedRequests(self._settings, self._pool.page)
        self._prefill = PrefillClock(self._computed, self._pool.page)
        self._stale = False  # weights changed, and the tree was not flushed since
        self._meeting: tuple[Any, Callable[[], list[str]]] | None = None
        self._agree: Callable[[bool], bool] = bool
        self._owner: Any = None
        self._head: list[str] = []
        self._loads = PageLoads(self.layer_done_counter, lambda: self._pages)
        self._lost = 0  # offloads that the tree is owed the answer "failed" for, before all others
        self._events: Counter[str] = Counter()
        self._rotation = Rotation(self._settings.config, namespace, self._open, _close)
        self._rotation.open()
        self._metrics = EngineMetrics.of(server_args, namespace.rank)
        port = extra.get("metrics_port")
        if port is not None:
            serve(self.stats, port=int(port) + namespace.rank)

    def _open(self, namespace: Namespace) -> PageCopies:
        cache = self.open_cache(namespace)
        try:
            return PageCopies(cache, self._pool, self._wait_s, self._behind_writers)
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
        return kvtier.open(self._settings.config, namespace, near=[near], computes=True)

    @property
    def _pages(self) -> PageCopies | None:
        return self._rotation.current

    def stats(self) -> dict[str, Any]:
        """The cache's `stats()`, and "engine": tokens read by tier, and events. Only the latter while the cache is
        being replaced."""
        pages = self._pages
        return {**(pages.cache.stats() if pages is not None else {}), "engine": self._engine_stats()}

    def _engine_stats(self) -> dict[str, dict[str, int]]:
        pages = self._pages
        sources = [
            self._events,
            self._visits.events,
            self._loads.events,
            *([pages.events] if pages is not None else []),
        ]
        events: Counter[str] = Counter()
        for source in sources:
            events.update(dict(source))  # a copy at once: metrics are asked for on a thread of their own
        return {"tokens_read": dict(self._visits.tokens_read), "events": {k: n for k, n in events.items() if n}}

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

    def meet(self, req: Any, head: Callable[[], list[str]], agree: Callable[[bool], bool]) -> None:
        self._meeting, self._agree = (req, head), agree
        if (visit := self._visits.of(req.rid)) is not None:
            visit.waits = False  # unless the look-up says so, which does not come when the device has all of it by now

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """All restorable lengths, in pages after those on the device: 1 … what G2 has now."""
        self._visits.arrive(rid)
        return list(range(1, self._resident(rid, transfers) + 1))

    @_degrades(0)
    def _resident(self, rid: str, transfers: Sequence[Any]) -> int:
        meeting, self._meeting = self._meeting, None
        visit, pages = self._visits.arrive(rid), self._pages
        visit.waits = False
        if pages is None or meeting is None or meeting[0].rid != rid:
            return 0
        self._visits.place(visit, *meeting, _kv(transfers).keys, pages.cache)
        return self._visits.resident(visit, pages.cache)

    def awaited(self, rid: str) -> bool:
        visit = self._visits.of(rid)
        if visit is None or visit.decided:
            return False
        visit.decided = self._agree(not visit.waits or time.monotonic() >= visit.until)
        if not visit.decided:
            time.sleep(0)  # a scheduler with nothing else to do spins: let the promotion have the interpreter
        return not visit.decided

    @_degrades(None)
    def admitted(self, req: Any) -> None:
        meeting, self._meeting = self._meeting, None
        head = meeting[1] if meeting is not None and meeting[0].rid == req.rid else None
        if self._pages is None:
            self._visits.forget(req.rid)
        else:
            self._visits.admit(req, head, self._pages.cache)

    def forget(self, rid: str) -> None:
        self._visits.forget(rid)

    @_degrades(None)
    def ran(self, batch: Any) -> None:
        mode, began = batch.forward_mode, batch.launch_ts
        # Mixed batches also decode, and those that were loaded for have waited.
        pure = mode.is_extend() and not mode.is_mixed() and batch.hicache_consumer_index < 0
        self._prefill.ran(int(batch.extend_num_tokens or 0) if pure else 0, began, time.monotonic())
        if self._metrics is not None:
            self._metrics.update(self._engine_stats())

    def _computed(self, blocks: int, seconds: float) -> None:
        if self._pages is not None and self._weighs:
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
        visit, lease, numbers = mine
        visit.lease = lease
        self._loads.add(Wanted(rid, lease, numbers))
        return True

    @_degrades(_NONE)
    def _pinned(self, rid: str, transfers: Sequence[Any]) -> tuple[QueuedRequest, Lease, list[int]] | None:
        transfer, visit, pages = _kv(transfers), self._visits.of(rid), self._pages
        if visit is None or not visit.reads or pages is None:
            return None
        count = len(transfer.keys)
        numbers = _page_numbers(transfer.device_indices, self._pool.page)
        lease = pages.cache.manager.pin(visit.chain[: visit.start + count], visit.start)
        if len(lease) < count or len(numbers) != count:
            lease.release()
            return None
        lease.tiers = visit.tiers(count)
        return visit, lease, numbers

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; -1 if nothing is. Errors are told by `finish_layer_wise_loading`."""
        return self._loads.start()

    @_degrades(False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loads.finish(counter_index)

    @_degrades(False)
    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    # ── offload ─────────────────────────────────────────────────────────────────────────────────────────────

    def own(self, req: Any | None) -> None:
        self._owner = req

    def place(self, head: list[str]) -> None:
        self._head = head

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Copy a node's pages to G2 where it lacks them. False, on every rank alike: the request does not want it, or
        there is none. What goes wrong after that is told by the completion; the tree will then ask again."""
        head, self._head = self._head, []
        transfer = _kv(transfers)
        if self._owner is None or not transfer.keys:
            return False
        control, scope = self._visits.control_of(self._owner)
        if scope is None or not control.store:
            return False
        pages = self._pages
        if pages is None:
            self._lost += 1
            return True
        owed = pages.outstanding()
        try:
            chain = engine_keys(scope, [bytes.fromhex(page) for page in (*head, *transfer.keys)])
            numbers = _page_numbers(transfer.device_indices, self._pool.page)
            pages.offload(chain, len(head), numbers, control.chain_terms(self._pool.page))
        except Exception:
            log.exception("an offload of %d pages failed", len(transfer.keys))
        if pages.outstanding() == owed:
            pages.fail()
        return True

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
        """The tree is being emptied: let transfers end, forget requests. Stored blocks stay."""
        self._quiesce()

    @_degrades(None)
    def flushed(self) -> None:
        """If the weights changed since the last time, what was stored meanwhile may stand on a prefix of old ones."""
        if self._stale:
            self._stale = False
            self._rotate()

    def _quiesce(self) -> None:
        self._visits.clear()
        if self._pages is not None:
            self._pages.quiesce()
        self._loads.clear()
        self._lost = 0

    def _rotate(self) -> None:
        self._visits.clear()
        old = self._pages
        if old is not None:
            self._lost += old.outstanding()  # before another thread closes it, which forgets them
            self._events.update(dict(old.events))
        self._rotation.rotate()

    @_degrades(None)
    def close(self) -> None:
        self._quiesce()
        self._rotation.close(self._settings.config.deadlines.close + self._wait_s)


def _close(pages: PageCopies) -> None:
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


def _kv(transfers: Sequence[Any]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _page_numbers(indices: Any, page: int) -> list[int]:
    """Page numbers of token slots. Empty unless they are whole, aligned pages."""
    rows = indices.detach().to("cpu").view(-1, page)
    first = rows[:, 0]
    aligned = bool((first % page == 0).all()) and bool((rows[:, -1] - first == page - 1).all())
    return [int(number) for number in (first // page).tolist()] if aligned else []
