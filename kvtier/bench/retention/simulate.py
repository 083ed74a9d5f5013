"""A trace replayed without bytes: the real manager, index, policy, terms and planner over a clock that is set.

Real: `kvtier.manager.manager.Manager` with G2's slots, leases, lifetimes and eviction, every policy of
`kvtier.policies`, and over a stack of tiers planning, promotion and write-behind. Simulated: memory (slots have no
bytes), the media below G2, time (that of the trace; nothing takes any). A request looks its chain up and stores the
missing blocks in the same instant.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from kvtier.bench.policies import COMPARED
from kvtier.bench.retention.byteless import EmptyArena, EmptyTier
from kvtier.bench.retention.trace import Trace
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SHARED, BlockKey
from kvtier.manager.hierarchy import ManagerLimits
from kvtier.manager.manager import Manager
from kvtier.policies.policy import Policy, make_policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth, Terms
from kvtier.tiers.host.tier import HostTier
from kvtier.times import Mono, Wall

FOREVER = Terms("forever")
STRIDES = MappingProxyType({"g3": 1, "g4": 16})
"""Blocks per unit of the tiers below G2."""
NEVER_S = 1e9
STEP_S = 60.0
"""Deadline of a request's steps, in seconds: without devices none comes near it."""


class TraceClock:
    """A `kvtier.clock.Clock` that shows the time of the request that is being replayed."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> Mono:
        return Mono(self.now)

    def wall(self) -> Wall:
        return Wall(self.now)

    async def sleep(self, seconds: float) -> None:
        """Never returns: housekeeping would be the only thing that happens by itself."""
        await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """Result of a simulation. `hits[i]`: prefix blocks that request i found."""

    references: int
    hits: tuple[int, ...]
    evictions: int
    seconds: float
    cpu_seconds: float
    policy: Mapping[str, float]

    @property
    def hit_percent(self) -> float:
        """Of all block references, those in a request's longest resident prefix."""
        return 100 * sum(self.hits) / self.references if self.references else 0.0


def keys_of(trace: Trace) -> list[BlockKey]:
    """A key for each block of a trace. Pure."""
    return [BlockKey(SHARED + number.to_bytes(HASH_BYTES, "big")) for number in range(trace.unique)]


def capacity_of(trace: Trace, fraction: float) -> int:
    """Blocks in this fraction of the trace's distinct blocks: floor, at least 1. Pure."""
    return max(1, int(trace.unique * fraction))


@contextmanager
def empty_manager(capacity: int, policy: Policy, clock: TraceClock) -> Iterator[Manager]:
    """A started manager whose G2 holds `capacity` blocks of no bytes."""
    manager = Manager(HostTier(EmptyArena(capacity), policy), (), clock, ManagerLimits())
    with asyncio.Runner() as runner:
        runner.run(manager.start())
        yield manager
        runner.run(manager.close())


def simulate(trace: Trace, policy: str, capacity: int, terms: Terms = FOREVER) -> SimulatedOutcome:
    """Replay `trace` in a G2 of `capacity` blocks. Deterministic; some 10 µs per missing block, 1 per hit."""
    clock, names = TraceClock(), keys_of(trace)
    chosen = make_policy(policy, capacity, refuses=True, among=COMPARED)
    hits, began, cpu_began = [], time.perf_counter(), time.process_time()
    with empty_manager(capacity, chosen, clock) as manager:
        for request in trace.requests:
            clock.now = request.at
            hits.append(_replay(manager, list(map(names.__getitem__, request.blocks)), terms))
            manager.host.policy.train()
        manager.host.check()
        evictions = manager.host.evictions
    stats = chosen.stats() if hasattr(chosen, "stats") else {}
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return SimulatedOutcome(trace.references, tuple(hits), evictions, spent, cpu, MappingProxyType(stats))


def _replay(manager: Manager, chain: Sequence[BlockKey], terms: Terms) -> int:
    lease = manager.pin(chain)
    hit = len(lease)
    if hit < len(chain):
        slots, _ = manager.reserve(chain, hit, len(chain), terms)
        manager.commit(chain, slots, [slot.generation for slot in slots])
    lease.release()
    return hit


@dataclass(frozen=True, slots=True)
class TierLevel:
    """One tier of a stack: its name (g1 … g4) and how many blocks it holds."""

    name: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Admission below G2: blocks that `threshold` requests wanted, of prompts of at least `min_prefix` tokens."""

    threshold: int = 1
    min_prefix: int = 0

    def __str__(self) -> str:
        if self.min_prefix:
            return f"prompts of {self.min_prefix:,} tokens or more"
        return "all" if self.threshold == 1 else f"wanted by {self.threshold} requests"


ALL = Admit()


@dataclass(frozen=True, slots=True)
class Split:
    """Percent of references that each tier of a stack served, and blocks written into it."""

    references: int
    hit_percent: Mapping[str, float]
    written: Mapping[str, int]
    seconds: float
    cpu_seconds: float

    @property
    def total_percent(self) -> float:
        return sum(self.hit_percent.values())


def simulate_stack(
    trace: Trace, policy: str, levels: Sequence[TierLevel], terms: Terms = FOREVER, admit: Admit = ALL
) -> Split:
    """Replay `trace` over a stack of tiers, nearest first. Deterministic; some 15 µs per reference.

    `g1` is the engine's, with leaf-first LRU; the manager owns the rest (and a single tier, whatever its name). It
    looks up, plans, promotes, stores and writes behind over tiers without bytes that take no time: a request's blocks
    are in every tier before the next request. `policy` orders G2; lower tiers evict by (last use, -depth).
    """
    return asyncio.run(_Stack(trace, policy, levels, admit).run(terms))


EVICTED_AT_ONCE = 64
"""Newcomers shown to a policy in one eviction: the benchmark's own copying stays linear."""


class _Stack:
    """One replay over a stack: an engine's G1 before a manager."""

    def __init__(self, trace: Trace, policy: str, levels: Sequence[TierLevel], admit: Admit) -> None:
        self._trace = trace
        self._clock = TraceClock()
        own, owned = (levels[0].blocks, levels[1:]) if levels[0].name == "g1" and len(levels) > 1 else (0, levels)
        self._pool = HostTier(EmptyArena(own), make_policy("lru", own)) if own else None
        self._nearest = owned[0].name
        self._lower = [
            EmptyTier(level.name, Depth[level.name.upper()], STRIDES[level.name], level.blocks, self._clock)
            for level in owned[1:]
        ]
        host = HostTier(
            EmptyArena(owned[0].blocks), make_policy(policy, owned[0].blocks, refuses=not self._lower, among=COMPARED)
        )
        settings = ManagerLimits(
            queue_fraction=1.0,
            housekeeping_s=NEVER_S,  # done after every request instead
            store_threshold=admit.threshold,
            min_prefix_blocks=-(-admit.min_prefix // trace.block_tokens),
        )
        self._manager = Manager(host, self._lower, self._clock, settings)
        self._served = Counter({level.name: 0 for level in levels})
        self._written = Counter({level.name: 0 for level in levels})

    async def run(self, terms: Terms) -> Split:
        began, cpu_began = time.perf_counter(), time.process_time()
        names = keys_of(self._trace)
        if self._pool is not None:
            self._pool.open()
        await self._manager.start()
        for request in self._trace.requests:
            self._clock.now = request.at
            await self._serve(list(map(names.__getitem__, request.blocks)), terms)
        self._manager.check()
        await self._manager.close()
        self._written.update({tier.name: tier.written for tier in self._lower})
        references = self._trace.references
        shares = {name: 100 * count / references for name, count in self._served.items()}
        spent, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        return Split(references, MappingProxyType(shares), MappingProxyType(dict(self._written)), spent, cpu)

    async def _serve(self, chain: Sequence[BlockKey], terms: Terms) -> None:
        """As a connector does: take G1's blocks, let the manager promote more, compute the rest, store it."""
        manager, wall_s = self._manager, self._clock.wall()
        deadline = self._clock.monotonic() + STEP_S
        start = self._pool.prefix(chain, wall_s) if self._pool is not None else 0
        lease = manager.pin(chain, start)
        if start + len(lease) < len(chain) and self._lower:
            lease.release()
            lease = await manager.promote(chain, deadline, start, referenced=True)
        self._served.update(self._nearest if name == manager.host.name else name for name in lease.tiers)
        if self._pool is not None:
            self._served["g1"] += start
            self._written["g1"] += _fill(self._pool, chain, start, terms, self._clock)
        await manager.flush(deadline)  # uses reach the lower tiers before stored blocks evict there
        await self._store(chain, start + len(lease), terms, deadline)
        lease.release()
        manager.host.policy.train()

    async def _store(self, chain: Sequence[BlockKey], start: int, terms: Terms, deadline: Mono) -> None:
        """Head first, as far as there are slots."""
        manager, ours = self._manager, set(chain)
        while start < len(chain):
            slots, reached = manager.reserve(chain, start, len(chain), terms, ours.__contains__)
            self._written[self._nearest] += len(slots)
            manager.commit(chain, slots, [slot.generation for slot in slots])
            await manager.flush(deadline)
            if reached == start:
                break
            start = reached


def _fill(pool: HostTier, chain: Sequence[BlockKey], have: int, terms: Terms, clock: TraceClock) -> int:
    """Renew the blocks of a chain in G1 and add the missing ones; returns how many were added."""
    wall_s = clock.wall()
    pool.policy.reference(chain, have, clock.monotonic())
    life, written = Lifetime.of(terms, wall_s), 0
    ends = life.ends(Depth.G1)
    for index, key in enumerate(chain):
        slot = pool.index.get(key)
        if slot is not None and slot.expires_at >= wall_s:
            slot.stamp(life, ends)
            continue
        if slot is not None:
            pool.drop(key)
        slot = pool.reserve(key, index)
        if slot is None:
            break
        slot.stamp(life, ends)
        pool.commit(slot, slot.generation)
        written += 1
    return written


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """CPU microseconds per block reference: on the request's path (all verbs but `train`), and in `train`."""

    path_us: float
    train_us: float
    references: int


def policy_cost(trace: Trace, policy: Policy, capacity: int) -> PolicyCost:
    """CPU time of a policy with keys of 48 bytes, as an engine's. Only the policy's own calls are timed."""
    names = keys_of(trace)
    resident: set[BlockKey] = set()
    path = train = 0
    clock = time.thread_time_ns
    for request in trace.requests:
        chain = [names[block] for block in request.blocks]
        hit = _resident(chain, resident)
        began = clock()
        _reference(policy, chain, hit, Mono(request.at), resident, capacity)
        ended = clock()
        policy.train()
        path += ended - began
        train += clock() - ended
    return PolicyCost(path / trace.references / 1000, train / trace.references / 1000, trace.references)


def drive(trace: Trace, policy: Policy, capacity: int) -> int:
    """Prefix hits of a policy alone, without manager, slots or terms: fast enough to compare many."""
    names = keys_of(trace)
    resident: set[BlockKey] = set()
    hits = 0
    for request in trace.requests:
        chain = [names[block] for block in request.blocks]
        hit = _resident(chain, resident)
        hits += hit
        _reference(policy, chain, hit, Mono(request.at), resident, capacity)
        policy.train()
    policy.check(resident)
    return hits


def _resident(chain: Sequence[BlockKey], resident: set[BlockKey]) -> int:
    """Leading blocks that are resident."""
    hit = 0
    while hit < len(chain) and chain[hit] in resident:
        hit += 1
    return hit


def _reference(
    policy: Policy, chain: Sequence[BlockKey], hit: int, mono_s: Mono, resident: set[BlockKey], capacity: int
) -> None:
    """One request to a policy, as G2 makes it, by runs: reference all of it, insert missing blocks as far as the policy
    names victims."""
    policy.reference(chain, hit, mono_s)
    depths = [depth for depth in range(hit, len(chain)) if chain[depth] not in resident]
    keys = [chain[depth] for depth in depths]
    done = 0
    while done < len(keys):
        stop = done + capacity - len(resident)
        if stop <= done:
            victims = policy.evict(keys[done : done + EVICTED_AT_ONCE], _any, depth=depths[done])
            if not victims:
                break
            resident.difference_update(victims)
            stop = done + len(victims)
        coming = keys[done:stop]
        policy.insert_all(coming, depths[done:stop])
        resident.update(coming)
        done = min(stop, len(keys))


def _any(key: BlockKey) -> bool:
    return True
