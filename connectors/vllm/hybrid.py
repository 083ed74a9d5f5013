"""The scheduler half for models with several KV groups: full attention, and sliding windows or recurrent states.

A request resumes at a *boundary*: a depth up to which the full group's blocks are in G2, and for which the blocks that
every other group needs there are, too (`kvtier.identity.groups`). The full group's chain is stored block by block, as
ever. The other groups' blocks of one boundary are a chain of their own, named by the boundary: stored, found and
evicted together, and useless in parts. Boundaries are kept for the end of a prompt, for the end of an answer, and where
a prompt was seen to leave a chain that is known. There, a model with states is asked to end a step: in the middle of
one it has none.

A load brings all groups or none: the engine is told of the request that failed, and computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from kvtier.cache import Cache
from kvtier.connectors.boundaries import TRIED, promote_boundary
from kvtier.connectors.fallback import or_fallback
from kvtier.connectors.promoted import Promoted
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.boundary_blocks import BoundaryBlocks
from kvtier.connectors.vllm.boundary_stores import BoundaryStores
from kvtier.connectors.vllm.groups import Groups
from kvtier.connectors.vllm.messages import StepMeta, WorkerMeta
from kvtier.connectors.vllm.requests import RequestState
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.identity.groups import boundary_keys, first_boundary_key, lacking_blocks, longest_boundary
from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.identity.namespace import Namespace
from kvtier.manager.lease import Lease
from kvtier.manager.manager import Manager
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss


class HybridHalf(SchedulerHalf):
    """See the module."""

    def __init__(self, groups: Groups, *arguments: Any, **more: Any) -> None:
        """`groups` has some beside the full one; the rest is SchedulerHalf's."""
        self._groups = groups
        self._group = groups.full
        self._held: BoundaryBlocks | None = None
        super().__init__(*arguments, **more)
        self._boundaries = BoundaryStores(self._limits, self._loads.ranks, self._clock, self.counters, self._job)

    def bind(self, pool: Any) -> None:
        super().bind(pool)
        assert self._pool is not None
        self._held = BoundaryBlocks(self._groups, self._pool)
        self._pool.before_reset(self._held.watch_all)

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        found = super().match(request, computed)
        state = self._state_of(request)
        if self._groups.states and state.track.storable and state.known:  # the engine forgets it with each question
            compat.end_step_at(request, state.known * self._block_tokens)
        return found

    def _state_of(self, request: Any) -> RequestState:
        state = super()._state_of(request)
        if state.adapter is not None and state.scope is not None:
            state.give_up()  # an adapter may turn out to be another one when its blocks are loaded: one block at a time
        return state

    def _grow(self, state: RequestState) -> None:
        chain = state.track.chain
        super()._grow(state)
        if state.track.chain is not chain and self._held is not None:
            self._held.rename(state.track)

    def _keys(self, chain: Sequence[BlockKey], depth: int) -> list[BlockKey]:
        """Names of the other groups' blocks at a boundary."""
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
        if not self._weighing.asks(state, usable - start):
            return
        deadline = self._clock.monotonic() + self._limits.prefetch_s
        ends = (partial(self._first_key, chain), partial(self._keys, chain))
        state.promoted = promoted = Promoted(start=start)
        found = promote_boundary(manager, chain, *ends, deadline, promoted)
        promoted.future = cache.submit(found, compat.trace_of(state.track.request))

    def _resident(self, chain: Sequence[BlockKey]) -> int:
        """The boundary that the engine serves from its own pool."""
        pool = self._pool
        if pool is None:
            return 0
        full = super()._resident(chain) * self._block_tokens
        lacking = [lacking_blocks(one.group, partial(_has, pool, chain, one.number)) for one in self._groups.beside]
        return longest_boundary(full, self._block_tokens, lacking) // self._block_tokens

    def _longest(self, manager: Manager, chain: Sequence[BlockKey], start: int, top: int) -> int:
        """The longest boundary beyond `start`, up to `top`, that G2 can serve in all groups; `start` for none."""
        for depth in range(top, max(start, top - TRIED), -1):
            first = self._first_key(chain, depth)
            if first is None or (manager.holds(first) and _whole(manager, self._keys(chain, depth))):
                return depth
        return start

    def _pin(self, manager: Manager, state: RequestState, start: int, usable: int) -> Lease:
        chain = state.track.chain
        top = start + manager.prefix(chain[start:usable])
        here = self._pool.resident(chain[:usable]) if self._pool is not None else 0
        state.known = max(top, here, min(usable, state.promoted.matched))
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
        """The other groups' blocks, and their slots, that are loaded with `count` blocks of the request's chain."""
        track, start = state.track, state.lease_start
        tables = [compat.table_of(blocks, one.number) for one in self._groups.beside]
        assert self._held is not None
        self._held.place(track, tables)
        if state.known > start + count:  # other prompts will leave the known chain there, too
            self._held.want(track, state.known * self._block_tokens)
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
            raise AssertionError(
                f"{count} blocks are to be loaded, and those of other groups were found for another boundary"
            )
        if any(not block for block, _ in more):
            raise AssertionError("the engine has no block for a window or a state that is to be loaded")
        return more

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, output: Any) -> StepMeta:
        meta = super().plan(output)
        if (held := self._held) is not None and held.ready:
            nothing: list[Any] = []
            meta.stores += or_fallback(self._boundaries.plan, self._manager, held, fallback=nothing)
        return meta

    def _forget(self, tenants: set[Scope]) -> None:
        super()._forget(tenants)
        if self._held is not None:
            self._held.forget(lambda chain: bool(chain) and tenant_of(chain[0]) in tenants)

    def _follow(self, output: Any) -> None:
        if self._groups.states:
            self._spoil_states(output)
        super()._follow(output)
        if self._held is not None:
            self._follow_tables(output, self._held)

    def _lose(self) -> None:
        super()._lose()
        if self._held is not None:
            self._held.lose()

    def _spoil_states(self, output: Any) -> None:
        """Where a session's turn ends while a step goes on beyond, the engine takes back that step's token, but not
        what it has made of the state: all that is computed from then on is of another text than its name says."""
        names, _, begins = compat.going_on(output)
        sessions = ((name, begin) for name, _, begin in compat.starting(output))
        for name, begin in (*zip(names, begins, strict=True), *sessions):
            track = self._confirmer.get(name)
            if track is not None and self._confirmer.back(track, begin):
                self._confirmer.spoil(track)

    def _follow_tables(self, output: Any, held: BoundaryBlocks) -> None:
        for name in compat.preempted(output):
            held.drop(name)
        confirmer = self._confirmer
        tokens, resumed = compat.tokens_of(output), compat.resumed(output)
        for name, blocks, begin in zip(*compat.going_on(output), strict=True):
            if (track := confirmer.get(name)) is not None:
                if blocks is not None:
                    tables = [blocks[one.number] for one in self._groups.beside]
                    (held.place if name in resumed else held.extend)(track, tables)
                held.cover(self._step, track, begin, begin + tokens.get(name, 0))
        for name, tables, begin in self._starting(output):
            if (track := confirmer.get(name)) is not None:
                held.place(track, tables)
                held.cover(self._step, track, begin, begin + tokens.get(name, 0))

    def _starting(self, output: Any) -> Iterator[tuple[str, list[Sequence[int]], int]]:
        """Requests that are new to the workers: name, tables of the other groups, and the first computed token."""
        columns = [list(compat.starting(output, one.number)) for one in self._groups.beside]
        for rows in zip(*columns, strict=True):
            yield rows[0][0], [table for _, table, _ in rows], rows[0][2]

    def completed(self, output: Any) -> None:
        super().completed(output)
        answers, held = getattr(output, "kv_connector_worker_meta", None), self._held
        if held is None or not isinstance(answers, WorkerMeta):
            return
        held.complete(answers.step)
        for boundary in held.ready:
            if not held.running(boundary):
                held.watch(boundary)
        self.counters["spill_lost"] += held.lost
        self.counters["boundary_blocks_given_up"] += held.given_up
        held.given_up = held.lost = 0
        self._boundaries.abort_overdue(held, self._clock.monotonic())

    def _answer(self, job: int, ranks: int, failed: set[int]) -> None:
        held = self._held
        if held is None or not self._boundaries.answer(held, job, ranks, failed):
            super()._answer(job, ranks, failed)

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, request: Any, tables: Sequence[Sequence[int]] = ()) -> tuple[bool, dict[str, Any] | None]:
        state, held = self._requests.get(request.request_id), self._held
        if state is not None and held is not None:
            or_fallback(self._end, state, tables, fallback=None)
            held.drop(state.track.name)
        return super().finish(request)

    def _end(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        self._grow(state)
        if tables and self._held is not None:
            ours = [tables[one.number] for one in self._groups.beside]
            self._held.finish(state.track, compat.computed(state.track.request), ours, self._step)

    def free_blocks(self) -> bool:
        """Hold no block any more. Returns whether the engine has more free ones now."""
        return self._held is not None and self._held.free()

    def pending(self) -> bool:
        if super().pending():
            return True
        if (idle := self._idle.seconds()) is None:
            return False
        return bool(self._held or self._boundaries) and idle < self._limits.flush_timeout_s

    def reset(self, to: Namespace | None = None) -> bool:
        self._boundaries.clear(self._held)
        if self._held is not None:
            self._held.clear()
        return super().reset(to)

    def check(self) -> None:
        super().check()
        if self._held is not None:
            self._held.check()


def _has(pool: compat.EnginePool, chain: Sequence[BlockKey], group: int, depth: int) -> bool:
    return pool.has(chain[depth], group)


def _whole(manager: Manager, keys: Sequence[BlockKey]) -> bool:
    return manager.prefix(keys) == len(keys)
