"""SGLang's own tree (its Rust core) over kvtier's linker, with states beside full attention, and without a model.

Requests are generators that go on in any order. A "forward" writes what a place's content is a function of: the tokens
up to its end. So whatever a request is given, by the tree or from below, is checked where it is given, and slots are
taken as an engine takes them, which ends where there is none.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvtier.connectors.sglang import hooks
from tests.connectors.sglang.support.linker_bench import PAGE, PAGES, Kind, states

RUNNING, TRACKED = 3, 2
"""Requests at once, and slots in which each tracks its states."""
_STEM_PAGES = 8


class TreeWorld:
    """See the module. `spare`: slots of states beside those that `RUNNING` requests need at most."""

    def __init__(self, bench: Callable[..., Any], seed: int, spare: int, g2: str) -> None:
        arguments = ServerArgs(model_path="dummy", page_size=PAGE)
        arguments._mamba_cache_chunk_size = PAGE
        set_global_server_args_for_scheduler(arguments)
        device, self.table = states(PAGE, RUNNING * (2 + TRACKED) + 1 + spare)
        self.table.size = RUNNING
        self.bench = bench(device=device, requests=self.table, kinds=(Kind.FULL, Kind.MAMBA), g2=g2)
        self.linker, self.slots = self.bench.linker, self.table.mamba_allocator
        self.pages = PagedTokenToKVPoolAllocator(PAGE * PAGES, PAGE, torch.float32, "cpu", device, False)
        kept = device.mamba_pool.mamba_cache
        self._states, self._layers = [*kept.conv, kept.temporal], [t for pair in self.bench.pool.tensors for t in pair]
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=self.table, token_to_kv_pool_allocator=self.pages, page_size=PAGE,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA), enable_mamba_extra_buffer=True,
                tree_core_backend="rust",
            )
        )  # fmt: skip
        self.cache.init_cache_linker(self.linker)
        self.chance, self.slow = random.Random(seed), 0.0
        self.requests: list[Iterator[None]] = []
        self.arrived = self.loaded = self.own = 0
        self._stems = [[self.chance.randrange(3, 1000) for _ in range(PAGE * _STEM_PAGES)] for _ in range(3)]
        completed = self.cache.linker.num_completed_offloads
        self.cache.linker.num_completed_offloads = lambda: 0 if self.chance.random() < self.slow else completed()

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────

    def _write_pages(self, named: list[int], row: Any, start: int, stop: int) -> None:
        for end in range(start + PAGE, stop + 1, PAGE):
            for layer in self._layers:
                layer[row[end - PAGE : end]] = _content(named, end)

    def _check(self, named: list[int], row: Any, start: int, stop: int, state: int | None = None) -> None:
        """Pages of these tokens, and the state behind them, hold what was made of all tokens up to there."""
        for end in range(start + PAGE, stop + 1, PAGE):
            assert all((layer[row[end - PAGE : end]] == _content(named, end)).all() for layer in self._layers)
        if state is not None:
            assert all((one[:, state] == _content(named, stop)).all() for one in self._states), "another state"

    def _slot(self) -> Any:
        """A slot of a state, which SGLang takes from its tree where none is free."""
        if (slot := self.slots.alloc(1)) is None:
            self.cache.evict_for_alloc(EvictParams(mamba_num=1))
            slot = self.slots.alloc(1)
        assert slot is not None, "the engine ends: copies keep too many states"
        return slot

    def _room(self, tokens: int) -> Any:
        if (room := self.pages.alloc(tokens)) is None:
            self.cache.evict_for_alloc(EvictParams(num_tokens=tokens))
            room = self.pages.alloc(tokens)
        return room

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def _prompt(self) -> list[int]:
        stem = self.chance.choice(self._stems)[: PAGE * self.chance.randrange(1, _STEM_PAGES)]
        more = [2000 + self.chance.randrange(3)] * PAGE * self.chance.choice([0, 1, 1, 2])
        return [*stem, *more, 7]  # the last token is always computed

    def _request(self) -> Iterator[None]:
        self.arrived += 1
        tokens, salt = self._prompt(), self.chance.choice([None, None, "tenant"])
        req = SimpleNamespace(
            rid=f"r{self.arrived}", kv=ReqKvInfo(), cache_salt=salt, extra_key=None, sampling_params=None, session=None,
            origin_input_ids=tokens, customized_info=None, swa_branching_seqlen=None,
        )  # fmt: skip
        named, size = [*tokens, *([1] if salt else [])], len(tokens) // PAGE * PAGE

        def key(count: int) -> Any:
            return RadixKey(array("q", tokens[:count]), None, cache_salt=salt)

        while True:
            match = self.cache.match_prefix(MatchPrefixParams(key=key(size), cow_mamba=True, req=req))
            if not self.linker.awaited(req.rid):
                break
            hooks._give_back_state(self.cache, req)
            yield
        row, own = torch.zeros(size, dtype=torch.int64), match.device_prefix_len
        row[:own] = self.cache.path_device_indices(match.last_device_node)
        copied = req.kv.mamba_cow_src_index
        self._check(named, row, 0, own, int(copied[0]) if own else None)
        self.own += own
        req.last_node, lock = match.last_device_node, self.cache.inc_lock_ref(match.last_device_node).to_dec_params()
        have = own + self._load(req, match, named, row)
        self.linker.admitted(req)
        if not req.kv.holds_mamba:
            req.kv.mamba_pool_idx = self._slot()[0]
        tracked = [self._slot() for _ in range(TRACKED)]
        yield
        inserted, branch = own, match.mamba_branching_seqlen or 0
        for stop in sorted({size, branch, PAGE * self.chance.randrange(1, size // PAGE + 1)}):
            if stop <= inserted or stop < have:
                continue
            if stop > have:
                if (room := self._room(stop - have)) is None:
                    break
                row[have:stop] = room
                self._write_pages(named, row, have, stop)
                have = stop
            lock = self._insert(req, key(stop), named, row, inserted, lock, branches=stop == branch, last=stop == size)
            inserted = stop
            yield
        if have > inserted:
            self.pages.free(row[inserted:have])
        self.slots.free(torch.cat([*tracked, req.kv.mamba_pool_idx.unsqueeze(0)]))
        self.cache.dec_lock_ref(req.last_node, lock)
        self.cache.linker.release_request(req.rid)

    def _load(self, req: Any, match: Any, named: list[int], row: Any) -> int:
        """Tokens that came from below; some loads are taken back before they begin."""
        if not match.host_hit_length:
            return 0
        wanted = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=req)
        count, own = self.cache.init_load_back(wanted)[0], match.device_prefix_len
        if not count:
            return 0
        private = self.cache.linker.private_load_indices[req.rid]
        if self.chance.random() < 0.1:
            self.cache.linker.release_request(req.rid)
            assert self.cache.ready_to_load_host_cache() == -1
            self.pages.free(private)
            return 0
        row[own : own + count] = private
        self.cache.ready_to_load_host_cache()
        assert self.cache.linker.finish_loads() == []
        self._check(named, row, own, own + count, int(req.kv.mamba_pool_idx))
        self.loaded += count
        return int(count)

    def _insert(
        self, req: Any, key: Any, named: list[int], row: Any, inserted: int, lock: Any, *, branches: bool, last: bool
    ) -> Any:
        """The tree takes the request's tokens, and a state at their end; the lock of the node where they end."""
        stop, slot = len(key), self._slot()
        for one in self._states:
            one[:, int(slot[0])] = _content(named, stop)
        self.linker.offloads_for(req, hooks.Checkpoint(inserted, stop, lasting=branches or last, branch=branches))
        done = self.cache.insert(
            InsertParams(key=key, value=row[:stop].clone(), mamba_value=slot, prev_prefix_len=inserted)
        )
        if done.mamba_exist:
            self.slots.free(slot)
        row[:stop] = self.cache.path_device_indices(done.last_device_node)
        self.cache.dec_lock_ref(req.last_node, lock)
        req.last_node, kept = done.last_device_node, self.cache.inc_lock_ref(done.last_device_node).to_dec_params()
        if branches:
            hooks._offer_again(self.cache, self.linker, req.last_node)
        self.linker.offloads_for(None)
        self._check(named, row, 0, stop)
        return kept

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> None:
        """A request comes or goes on; now and then something else happens."""
        chance, below = self.chance, self.linker._pages
        roll = chance.random()
        if len(self.requests) < RUNNING and roll < 0.5:
            self.requests.append(self._request())
        if self.requests:
            self._go_on(chance.choice(self.requests))
        if roll > 0.9:
            self.cache.evict(EvictParams(num_tokens=PAGE * chance.randrange(6), mamba_num=chance.randrange(3)))
        elif roll > 0.87:
            self.slow = chance.choice([0.0, 0.0, 0.5, 0.95])
        elif roll > 0.86 and below is not None:
            below.cache.evict("g2")
        elif roll > 0.855 and below is not None:
            below.cache.purge(chance.choice([None, "tenant"]))
        elif roll > 0.845:
            self.finish()
            self.cache.reset()
            self.pages.clear()
            self.table.clear()
        elif roll > 0.843:
            self.linker.weights_change()
        self.cache.check_hicache_events()

    def _go_on(self, request: Iterator[None]) -> None:
        try:
            next(request)
        except StopIteration:
            self.requests.remove(request)

    def finish(self) -> None:
        """Until no request is left."""
        until = time.monotonic() + 30.0
        while self.requests:
            assert time.monotonic() < until, "a request waits for ever"
            for request in list(self.requests):
                self._go_on(request)
            self.cache.check_hicache_events()

    def end(self) -> None:
        """Finish, and look that nothing is kept."""
        self.finish()
        self.slow, until = 0.0, time.monotonic() + 30.0
        while self.cache.linker.pending_offloads:
            assert time.monotonic() < until, "an offload has no end"
            self.cache.check_hicache_events()
        assert self.cache.mamba_protected_size() == self.cache.full_protected_size() == 0
        assert self.slots.available_size() + self.cache.mamba_evictable_size() == self.slots.size
        assert self.pages.available_size() + self.cache.full_evictable_size() == PAGE * PAGES
        assert self.linker._rotation.join(30) and self.bench.pinned() == 0
        self.linker._pages.cache.check()


def _content(named: list[int], stop: int) -> float:
    """What is made of the tokens up to there; `named` may have a salt's behind the prompt's last."""
    prompt = named[:stop] + ([0] if named[-1] == 1 else [])
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=2).digest()
    return 1.0 + int.from_bytes(digest) % 251
