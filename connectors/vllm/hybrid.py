"""The scheduler half for models with several KV groups: full attention, and sliding windows.

A request resumes at a *boundary*: a depth up to which the full group's blocks are in G2, and for which the blocks that
every window needs there are, too (`kvtier.identity.groups`). The full group's chain is stored block by block, as ever.
The windows' blocks of one boundary are a chain of their own, named by the boundary: stored, found and evicted together,
and useless in parts. Boundaries are kept for the end of a prompt, for the end of an answer, and where a prompt was seen
to leave a chain that is known.

A load brings all groups or none: the engine is told of the request that failed, and computes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.fallback import or_fallback
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.boundary_stores import BoundaryStores
from kvtier.connectors.vllm.groups import Groups
from kvtier.connectors.vllm.messages import StepMeta, WorkerMeta
from kvtier.connectors.vllm.requests import RequestState
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.windows import WindowBlocks
from kvtier.identity.groups import boundary_keys, first_boundary_key, lacking_blocks, longest_boundary
from kvtier.identity.keys import BlockKey
from kvtier.identity.namespace import Namespace
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono

_TRIED = 512
"""Boundaries that are tried for one request, from the longest on: each is a look-up."""
_ASKED_AT_ONCE = 16
"""Boundaries that lower tiers are asked for at the same time."""


class HybridHalf(SchedulerHalf):
    """See the module."""

    def __init__(self, groups: Groups, *arguments: Any, **more: Any) -> None:
        """`groups` has windows; the rest is SchedulerHalf's."""
        self._groups = groups
        self._group = groups.full
        self._windows: WindowBlocks | None = None
        super().__init__(*arguments, **more)
        self._boundaries = BoundaryStores(self._limits, self._loads.ranks, self._clock, self.counters, self._job)

    def bind(self, pool: Any) -> None:
        super().bind(pool)
        assert self._pool is not None
        self._windows = WindowBlocks(self._groups, self._pool)

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def _state_of(self, request: Any) -> RequestState:
        known = request.request_id in self._requests
        state = super()._state_of(request)
        if not known and state.adapter is not None:
            state.give_up()  # an adapter may turn out to be another one when its blocks are loaded: one block at a time
        return state

    def _grow(self, state: RequestState) -> None:
        chain = state.track.chain
        super()._grow(state)
        if state.track.chain is not chain and self._windows is not None:
            self._windows.drop(state.track.name)

    def _keys(self, chain: Sequence[BlockKey], depth: int) -> list[BlockKey]:
        """Names of the windows' blocks at a boundary."""
        return boundary_keys(chain[depth - 1], self._groups.counts(depth * self._block_tokens))

    def _first_key(self, chain: Sequence[BlockKey], depth: int) -> BlockKey | None:
        return first_boundary_key(chain[depth - 1], self._groups.counts(depth * self._block_tokens))

    def _prefetch(self, cache: Cache, state: RequestState) -> None:
        manager, usable = cache.manager, self._readable(state)
        if not manager.lower or not usable:
            return
        chain = state.track.chain[:usable]
        start = self._resident(chain)
        if start + manager.prefix(chain[start:]) == usable and self._longest(manager, chain, start, usable) == usable:
            return
        deadline = self._clock.monotonic() + self._limits.prefetch_s
        ends = (partial(self._first_key, chain), partial(self._keys, chain))
        found = promote_boundary(manager, chain, *ends, deadline, start)
        state.promoted = Promoted(cache.submit(found, compat.trace_of(state.track.request)), start)

    def _resident(self, chain: Sequence[BlockKey]) -> int:
        """The boundary that the engine's pool can serve by itself."""
        pool = self._pool
        if pool is None:
            return 0
        full = pool.resident(chain) * self._block_tokens
        lacking = [
            lacking_blocks(window.group, partial(_has, pool, chain, window.number)) for window in self._groups.windows
        ]
        return longest_boundary(full, self._block_tokens, lacking) // self._block_tokens

    def _longest(self, manager: Manager, chain: Sequence[BlockKey], start: int, top: int) -> int:
        """The longest boundary beyond `start`, up to `top`, whose windows G2 can serve; `start` if there is none."""
        for depth in range(top, max(start, top - _TRIED), -1):
            first = self._first_key(chain, depth)
            if first is None or (manager.holds(first) and _whole(manager, self._keys(chain, depth))):
                return depth
        return start

    def _pin(self, manager: Manager, state: RequestState, start: int, usable: int) -> Lease:
        chain = state.track.chain
        top = start + manager.prefix(chain[start:usable])
        state.known = max(top, self._pool.resident(chain[:usable]) if self._pool is not None else 0)
        depth = self._longest(manager, chain, start, top)
        lease = manager.pin(chain[:depth], start)
        also = manager.pin(self._keys(chain, depth)) if depth > start else None
        if also is not None and (len(lease) < depth - start or also.miss is not None):  # evicted meanwhile
            lease.release()
            also.release()
            lease, also = manager.pin(chain[:start], start), None
        if start + len(lease) < usable:
            lease.miss = lease.miss or Miss.ABSENT
        state.also = also
        return lease

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        state = self._state_of(request)
        state.more = self._more(state, blocks, tokens // self._block_tokens)
        super().allocated(request, blocks, tokens)

    def _more(self, state: RequestState, blocks: Any, count: int) -> Sequence[tuple[int, Slot]]:
        """The windows' blocks, and their slots, that are loaded with `count` blocks of the request's chain."""
        track, start = state.track, state.lease_start
        tables = [compat.table_of(blocks, window.number) for window in self._groups.windows]
        assert self._windows is not None
        self._windows.place(track, tables)
        if state.known > start + count:  # other prompts will leave the known chain there, too
            self._windows.want(track, state.known * self._block_tokens)
        if not count:
            return ()
        depth = start + count
        needed = self._groups.needed(depth * self._block_tokens)
        slots = iter(state.also.slots if state.also is not None else ())
        more: list[tuple[int, Slot]] = []
        for table, depths in zip(tables, needed, strict=True):
            for place, slot in zip(depths, slots, strict=False):
                if place >= start:  # those before it are the engine's
                    more.append((table[place], slot))
        pinned = 0 if state.also is None else len(state.also)
        if state.lease is None or len(state.lease) != count or pinned != sum(map(len, needed)):
            raise AssertionError(f"{count} blocks are to be loaded, and the windows' were found for another boundary")
        if any(not block for block, _ in more):
            raise AssertionError("the engine has no block for a window that is to be loaded")
        return more

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, output: Any) -> StepMeta:
        meta = super().plan(output)
        if (windows := self._windows) is not None and windows.ready:
            nothing: list[Any] = []
            meta.stores += or_fallback(self._boundaries.plan, self._manager, windows, fallback=nothing)
        return meta

    def _follow(self, output: Any) -> None:
        super()._follow(output)
        if self._windows is None:
            return
        try:
            self._follow_windows(output, self._windows)
        except BaseException:
            self._windows.lose()
            raise

    def _follow_windows(self, output: Any, windows: WindowBlocks) -> None:
        for name in compat.preempted(output):
            windows.drop(name)
        confirmer = self._confirmer
        tokens, resumed = compat.tokens_of(output), compat.resumed(output)
        for name, blocks, begin in zip(*compat.going_on(output), strict=True):
            if (track := confirmer.get(name)) is not None:
                if blocks is not None:
                    tables = [blocks[window.number] for window in self._groups.windows]
                    (windows.place if name in resumed else windows.extend)(track, tables)
                windows.cover(self._step, track, begin, begin + tokens.get(name, 0))
        for name, tables, begin in self._starting(output):
            if (track := confirmer.get(name)) is not None:
                windows.place(track, tables)
                windows.cover(self._step, track, begin, begin + tokens.get(name, 0))

    def _starting(self, output: Any) -> Iterator[tuple[str, list[Sequence[int]], int]]:
        """Requests that are new to the workers: name, tables of the windows, and the first token that is computed."""
        columns = [list(compat.starting(output, window.number)) for window in self._groups.windows]
        for rows in zip(*columns, strict=True):
            yield rows[0][0], [table for _, table, _ in rows], rows[0][2]

    def completed(self, output: Any) -> None:
        super().completed(output)
        answers, windows = getattr(output, "kv_connector_worker_meta", None), self._windows
        if windows is None or not isinstance(answers, WorkerMeta):
            return
        windows.complete(answers.step)
        for boundary in windows.ready:
            if not windows.running(boundary):
                windows.watch(boundary)
        self.counters["spill_lost"] += windows.given_up
        windows.given_up = 0
        self._boundaries.abort_overdue(windows, self._clock.monotonic())

    def _answer(self, job: int, ranks: int, failed: set[int]) -> None:
        windows = self._windows
        if windows is None or not self._boundaries.answer(windows, job, ranks, failed):
            super()._answer(job, ranks, failed)

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, request: Any, tables: Sequence[Sequence[int]] = ()) -> tuple[bool, dict[str, Any] | None]:
        state, windows = self._requests.get(request.request_id), self._windows
        if state is not None and windows is not None:
            or_fallback(self._end, state, tables, fallback=None)
            windows.drop(state.track.name)
        return super().finish(request)

    def _end(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        self._grow(state)
        if tables and self._windows is not None:
            ours = [tables[window.number] for window in self._groups.windows]
            self._windows.finish(state.track, compat.computed(state.track.request), ours, self._step)

    def pending(self) -> bool:
        if super().pending():
            return True
        if self._requests or self._windows is None or self._idle_since_s is None:
            return False
        idle = self._clock.monotonic() - self._idle_since_s
        return bool(self._windows or self._boundaries) and idle < self._limits.flush_timeout_s

    def reset(self, to: Namespace | None = None) -> bool:
        self._boundaries.clear(self._windows)
        if self._windows is not None:
            self._windows.clear()
        return super().reset(to)

    def check(self) -> None:
        super().check()
        if self._windows is not None:
            self._windows.check()


def _has(pool: compat.EnginePool, chain: Sequence[BlockKey], group: int, depth: int) -> bool:
    return pool.has(chain[depth], group)


def _whole(manager: Manager, keys: Sequence[BlockKey]) -> bool:
    return manager.prefix(keys) == len(keys)


async def promote_boundary(
    manager: Manager,
    chain: Sequence[BlockKey],
    first_at: Callable[[int], BlockKey | None],
    keys_at: Callable[[int], list[BlockKey]],
    deadline: Mono,
    start: int,
) -> Lease:
    """Promote the longest boundary beyond `start` that the tiers can serve: the chain up to there, and the windows'
    blocks (`keys_at` a depth, of which `first_at` is the first). Releases what it pinned; see `requests.promote`."""
    top = await manager.match(chain, deadline)
    depth = await _stored(manager, first_at, keys_at, range(top, max(start, top - _TRIED), -1), deadline)
    if depth is None:
        return await manager.promote(chain[:start], deadline, start)
    with await manager.promote(chain[:depth], deadline, start) as lease:
        if keys := keys_at(depth):
            (await manager.promote(keys, deadline)).release()
        return lease


async def _stored(
    manager: Manager,
    first_at: Callable[[int], BlockKey | None],
    keys_at: Callable[[int], list[BlockKey]],
    depths: Iterable[int],
    deadline: Mono,
) -> int | None:
    """The first of `depths` whose windows' blocks are all in some tier."""
    waiting = list(depths)
    while waiting:
        part, waiting = waiting[:_ASKED_AT_ONCE], waiting[_ASKED_AT_ONCE:]
        heads = [first for depth in part if (first := first_at(depth)) is not None]
        found = await asyncio.gather(*(manager.match([head], deadline) for head in heads))
        here = {head for head, count in zip(heads, found, strict=True) if count}
        for depth in part:
            first = first_at(depth)
            if first is None:
                return depth
            if first in here:
                keys = keys_at(depth)
                if await manager.match(keys, deadline) == len(keys):
                    return depth
    return None
