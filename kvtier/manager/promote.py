"""Brings blocks up into G2: locate → plan → reserve → read → verify (the tier does) → commit.

A load is a task of its own: whoever waits for it may give up at a deadline, the slots stay FILLING until the
tier has let go of their memory, and what then arrives verified is kept. Two requests for one block share a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier.errors import ClosedError
from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import SLICE_BLOCKS, Hierarchy
from kvtier.manager.lease import Hold
from kvtier.manager.plan import Costs, Where, make_plan
from kvtier.retention.trusted_clock import Reading
from kvtier.tiers.host.slot import Slot, SlotState
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Loaded, Miss, Target
from kvtier.times import Mono

GRACE_S = 1.0
"""How long `close` still waits for loads that nobody waits for."""

_SMOOTHING = 0.2

LoadOutcome = Slot | Miss
"""A slot that is pinned once for the caller, or why the block was not loaded."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Consecutive blocks of a chain, pinned in G2 for the caller, who owes each of `holds` one unpin.

    `found[i]`: the tier where block i of them was; `loaded`: depth → tier of all blocks that
    were read into G2; `miss`: why the chain is not served further, None if all of it is.
    """

    holds: Sequence[Hold]
    found: Sequence[str]
    loaded: Mapping[int, str]
    miss: Miss | None


class Promoter:
    """Lookups over all tiers and loads under way. Runs on one event loop; slots change under the hierarchy's lock."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._host, self._lock, self._clock = hierarchy.host, hierarchy.lock, hierarchy.clock
        self._under_way: dict[BlockKey, asyncio.Task[dict[int, LoadOutcome]]] = {}
        self._abandoned: set[asyncio.Task[dict[int, LoadOutcome]]] = set()
        self._compute_s_per_block: float | None = None
        self.overdue = 0  # slots of loads that nobody waits for any more
        self.late = 0  # blocks that arrived after their deadline

    # ── finding ─────────────────────────────────────────────────────────────────────────────────────────────

    async def locate(self, chain: Sequence[BlockKey], deadline: Mono | None = None, start: int = 0) -> list[Where]:
        """Where each block of `chain` is, up to the first that is nowhere; later ones may be unknown. Blocks before
        `start` are not looked for and given as G2's. Waits for lower tiers until `deadline`, at most `lookup_s`."""
        wall_s = self._hierarchy.now().serve
        where: list[Where] = [self._host.name] * start
        for first in range(start, len(chain), SLICE_BLOCKS):
            with self._lock:
                part = chain[first : first + SLICE_BLOCKS]
                where += [self._host.peek(key, wall_s) or self._host.name for key in part]
        latest = self._clock.monotonic() + self._hierarchy.limits.lookup_s
        deadline = latest if deadline is None else min(deadline, latest)
        for tier in self._hierarchy.lower.values():
            wanted = [index for index, place in enumerate(where) if isinstance(place, Miss)]
            if not wanted:
                break
            answers = await tier.lookup(chain, wanted, deadline)
            for index, miss in zip(wanted, answers, strict=True):
                if miss is None:
                    where[index] = tier.name
                elif where[index] is Miss.ABSENT:
                    where[index] = miss  # the more telling reason
        return where

    def computed(self, blocks: float, seconds: float) -> None:
        """The engine computed this many blocks in this time: the estimate that loading is weighed against. A time of 0
        is one that the clock could not tell: no estimate."""
        if seconds <= 0:
            return
        sample = seconds / max(blocks, 1e-9)
        old = self._compute_s_per_block
        self._compute_s_per_block = sample if old is None else old + _SMOOTHING * (sample - old)

    def costs(self) -> Costs | None:
        """Seconds per block, to compute and to load from each tier that was read lately; None: nothing was computed."""
        if self._compute_s_per_block is None:
            return None
        known = {name: tier.estimate() for name, tier in self._hierarchy.lower.items()}
        return Costs(self._compute_s_per_block, {name: s for name, s in known.items() if s is not None})

    # ── bringing up ─────────────────────────────────────────────────────────────────────────────────────────

    async def promote(
        self, chain: Sequence[BlockKey], start: int, deadline: Mono, time: Reading, *, referenced: bool
    ) -> Promotion:
        """Bring the longest prefix that pays off into G2 and pin its blocks from `start` on, by `deadline`; late blocks
        are misses. `referenced`: the policy knows of this request already."""
        where = await self.locate(chain, deadline, start)
        plan = make_plan(where, start + self._host.capacity, self._host.name, self.costs())
        pinned: dict[int, Slot] = {}
        with self._lock:
            for index in range(start, plan.hit):
                if where[index] == self._host.name:
                    slot = self._host.pin(chain[index], time.serve, time.stamp)
                    if slot is not None:
                        pinned[index] = slot
            if not referenced:  # before the loads, so that the policy knows for which request it evicts
                self._host.policy.reference(chain, start + len(pinned), self._clock.monotonic())
        try:
            outcomes = await self.load(chain, plan.loads, deadline)
        except BaseException:
            self._hierarchy.unpin([(slot, slot.generation) for slot in pinned.values()])
            raise
        pinned.update({index: out for index, out in outcomes.items() if isinstance(out, Slot)})
        hit = next((index for index in range(start, plan.hit) if index not in pinned), max(start, plan.hit))
        self._hierarchy.unpin([(slot, slot.generation) for index, slot in pinned.items() if index >= hit])
        miss = plan.miss
        if hit < plan.hit:
            outcome = outcomes.get(hit, Miss.EVICTED)
            miss = outcome if isinstance(outcome, Miss) else Miss.EVICTED
        return Promotion(
            [(pinned[index], pinned[index].generation) for index in range(start, hit)],
            [str(place) for place in where[start:hit]],
            {index: str(where[index]) for index, out in outcomes.items() if isinstance(out, Slot)},
            miss,
        )

    async def load(
        self, chain: Sequence[BlockKey], loads: Mapping[str, Sequence[int]], deadline: Mono
    ) -> dict[int, LoadOutcome]:
        """Bring the blocks at `loads[tier]` of `chain` into G2; answers for each by `deadline`.

        Every Slot in the result is pinned once, which the caller undoes, and not renewed: that is for who serves it.
        Past the bound of abandoned loads nothing is started: NO_ROOM. A load that is shared with an earlier request and
        came too late for that one is tried again for this one.
        """
        outcomes: dict[int, LoadOutcome] = {}
        try:
            while loads:
                shared = await self._load_once(chain, loads, deadline, outcomes)
                late = {index for index in shared if outcomes[index] is Miss.LATE}
                if not late or self._clock.monotonic() >= deadline:
                    break
                loads = {name: again for name, of in loads.items() if (again := [i for i in of if i in late])}
        except BaseException:
            self._unpin(outcomes)
            raise
        return outcomes

    async def _load_once(
        self,
        chain: Sequence[BlockKey],
        loads: Mapping[str, Sequence[int]],
        deadline: Mono,
        outcomes: dict[int, LoadOutcome],
    ) -> Collection[int]:
        """Set the outcome of each load; returns the depths that earlier requests were loading."""
        mine: list[asyncio.Task[dict[int, LoadOutcome]]] = []
        joined: dict[int, asyncio.Task[dict[int, LoadOutcome]]] = {}
        for name, indices in loads.items():
            reserved: list[tuple[int, Slot]] = []
            for index in indices:
                task = self._under_way.get(chain[index])
                if task is not None:
                    joined[index] = task
                    continue
                slot = self._reserve(chain, index)
                if isinstance(slot, Slot) and slot.state is SlotState.FILLING:
                    reserved.append((index, slot))
                else:
                    outcomes[index] = slot
            if reserved:
                mine.append(self._start(self._hierarchy.lower[name], chain, reserved, deadline))
        try:
            await self._wait({*mine, *joined.values()}, deadline)
        except BaseException:
            for task in mine:
                self._abandon(task)
            raise
        for task in mine:
            if task.done() and not task.cancelled():
                outcomes.update(task.result())
            else:
                self._abandon(task)
        for index, task in joined.items():
            outcomes[index] = self._pin(chain[index])
            if outcomes[index] is Miss.ABSENT and task.done() and not task.cancelled():
                loaded = task.result().get(index)
                outcomes[index] = loaded if isinstance(loaded, Miss) else Miss.EVICTED
        for indices in loads.values():
            for index in indices:
                if index not in outcomes or outcomes[index] is Miss.PENDING:
                    outcomes[index] = Miss.LATE
        return joined

    def _reserve(self, chain: Sequence[BlockKey], index: int) -> LoadOutcome:
        """A FILLING slot; or, where the block turned up meanwhile, its READY slot, pinned; or why neither."""
        with self._lock:
            if self.overdue >= max(1, int(self._host.capacity * self._hierarchy.limits.overdue_fraction)):
                return Miss.NO_ROOM
            slot = self._host.reserve(chain[index], index, insist=True)
            if slot is not None:
                return slot
            why = self._host.peek(chain[index], self._clock.wall())
            if why is Miss.ABSENT:
                return Miss.NO_ROOM
            if why is Miss.EXPIRED:
                self._host.drop(chain[index])
                return self._host.reserve(chain[index], index, insist=True) or Miss.NO_ROOM
            return self._host.pin(chain[index], self._clock.wall()) or why or Miss.EVICTED

    def _pin(self, key: BlockKey) -> LoadOutcome:
        with self._lock:
            now = self._clock.wall()
            return self._host.pin(key, now) or self._host.peek(key, now) or Miss.EVICTED

    def _unpin(self, outcomes: Mapping[int, LoadOutcome]) -> None:
        with self._lock:
            for outcome in outcomes.values():
                if isinstance(outcome, Slot):
                    self._host.unpin(outcome, outcome.generation)

    async def _wait(self, tasks: set[asyncio.Task[dict[int, LoadOutcome]]], deadline: Mono) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - self._clock.monotonic()))

    def _start(
        self, tier: Metered, chain: Sequence[BlockKey], reserved: Sequence[tuple[int, Slot]], deadline: Mono
    ) -> asyncio.Task[dict[int, LoadOutcome]]:
        task = self._hierarchy.supervisor.spawn(self._read(tier, chain, reserved, deadline))
        for index, _ in reserved:
            self._under_way[chain[index]] = task
        return task

    async def _read(
        self, tier: Metered, chain: Sequence[BlockKey], reserved: Sequence[tuple[int, Slot]], deadline: Mono
    ) -> dict[int, LoadOutcome]:
        """Fill reserved slots; every one of them is READY and pinned, or free again, when this returns."""
        generations = [slot.generation for _, slot in reserved]
        results: Sequence[Loaded | Miss] = [Miss.ERROR] * len(reserved)
        in_flight = False
        try:
            targets = [Target(index, slot.pieces) for index, slot in reserved]
            results = await tier.read(chain, targets, deadline)
        except asyncio.CancelledError:
            in_flight = True  # the tier was cut off: its threads may still write to the slots
            raise
        except ClosedError:
            raise
        except Exception as error:  # a tier's own failures are answers: this is ours, and costs a miss
            self._hierarchy.supervisor.failures.record(f"{tier.name} load", error, tier.breaker)
        finally:
            outcomes: dict[int, LoadOutcome] = {}
            with self._lock:
                for (index, slot), generation, result in zip(reserved, generations, results, strict=True):
                    self._under_way.pop(chain[index], None)
                    if not isinstance(result, Loaded):
                        self._host.abort(slot, generation, in_flight=in_flight)
                        outcomes[index] = result
                    elif self._host.commit(slot, generation, result.life, result.digest, result.priority):
                        self._host.pin_slot(slot)
                        outcomes[index] = slot
                    else:
                        outcomes[index] = Miss.PURGED
        return outcomes

    def _abandon(self, task: asyncio.Task[dict[int, LoadOutcome]]) -> None:
        """Nobody waits for this load any more: undo its pins when it ends."""
        waiting = sum(under_way is task for under_way in self._under_way.values())
        self.overdue += waiting
        self._abandoned.add(task)

        def ended(task: asyncio.Task[dict[int, LoadOutcome]]) -> None:
            self._abandoned.discard(task)
            self.overdue -= waiting
            if task.cancelled() or task.exception() is not None:
                return
            arrived = task.result()
            self.late += sum(isinstance(outcome, Slot) for outcome in arrived.values())
            self._unpin(arrived)

        task.add_done_callback(ended)

    async def close(self, deadline: Mono) -> None:
        """Wait for loads under way, those that were given up no longer than GRACE_S, then cancel them."""
        tasks = {*self._under_way.values(), *self._abandoned}
        await self._wait(tasks - self._abandoned, deadline)
        await self._wait(self._abandoned, min(deadline, self._clock.monotonic() + GRACE_S))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
