"""A trace replayed without bytes: the real manager, index, policy, terms and planner over a clock that is set.

What is real: `kvtier.manager.Manager` with G2's slots, leases, lifetimes and eviction, every policy of
`kvtier.policy`. What is not: memory (slots have no bytes), time (it is that of the trace, and nothing takes any).
A request looks its chain up and stores what it lacked, in the same instant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from kvtier.arena import Arena
from kvtier.bench.traces import Request, Trace
from kvtier.block import SHARED, BlockKey
from kvtier.hashing import HASH_BYTES
from kvtier.manager import Manager, Settings
from kvtier.plan import make_plan
from kvtier.policy import Policy, make_policy
from kvtier.terms import Lifetime, Terms
from kvtier.tier import Miss
from kvtier.tiers.host import HostTier

FOREVER = Terms("forever")


class TraceClock:
    """A `kvtier.clock.Clock` that shows the time of the request that is being replayed."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Housekeeping never falls due: it would be the only thing that moves by itself."""
        await asyncio.get_running_loop().create_future()


class EmptyArena(Arena):
    """Slots without bytes."""

    def __init__(self, slots: int) -> None:
        super().__init__(1, 1, slots * 4096)
        self.slots = slots

    def open(self, room: Callable[[], int] = lambda: 0) -> None:
        """Nothing to allocate."""

    def pieces(self, slot: int) -> tuple[memoryview, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found. `hits[i]`: prefix blocks that request i found."""

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
    """A name for each block of a trace. Pure."""
    return [BlockKey(SHARED + number.to_bytes(HASH_BYTES, "big")) for number in range(trace.unique)]


def capacity_of(trace: Trace, fraction: float) -> int:
    """Blocks in this fraction of the trace's distinct blocks: floor, at least 1. Pure."""
    return max(1, int(trace.unique * fraction))


@contextmanager
def empty_manager(capacity: int, policy: Policy, clock: TraceClock) -> Iterator[Manager]:
    """A started manager whose G2 holds `capacity` blocks of no bytes."""
    manager = Manager(HostTier(EmptyArena(capacity), policy), (), clock, Settings())
    with asyncio.Runner() as runner:
        runner.run(manager.start())
        yield manager
        runner.run(manager.close())


def simulate(trace: Trace, policy: str, capacity: int, terms: Terms = FOREVER) -> Outcome:
    """Replay `trace` in a G2 of `capacity` blocks. Deterministic; some 10 µs per missing block, 1 per hit."""
    clock, names = TraceClock(), keys_of(trace)
    chosen = make_policy(policy, capacity, refuses=True)
    hits, began, cpu_began = [], time.perf_counter(), time.process_time()
    with empty_manager(capacity, chosen, clock) as manager:
        for request in trace.requests:
            clock.now = request.at
            hits.append(_replay(manager, list(map(names.__getitem__, request.blocks)), terms))
            manager.host.learn()
        manager.host.check()
        evictions = manager.host.evictions
    stats = chosen.stats() if hasattr(chosen, "stats") else {}
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return Outcome(trace.references, tuple(hits), evictions, spent, cpu, MappingProxyType(stats))


def _replay(manager: Manager, chain: Sequence[BlockKey], terms: Terms) -> int:
    lease = manager.pin(chain)
    hit = len(lease)
    if hit < len(chain):
        slots, _ = manager.reserve(chain, hit, len(chain), terms)
        manager.commit(chain, slots, [slot.generation for slot in slots])
    lease.release()
    return hit


@dataclass(frozen=True, slots=True)
class Level:
    """One tier of a stack: its name and how many blocks it holds."""

    name: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Split:
    """Where a stack served its references from, in percent of them, and blocks written into each tier."""

    references: int
    hit_percent: Mapping[str, float]
    written: Mapping[str, int]

    @property
    def total_percent(self) -> float:
        return sum(self.hit_percent.values())


def simulate_stack(trace: Trace, policy: str, levels: Sequence[Level], terms: Terms = FOREVER) -> Split:
    """Replay `trace` over a stack of tiers, nearest first, each an index of G2's kind, written through on creation.

    A block is served from the nearest tier that has it, as far as the prefix is contiguous over all of them
    (`kvtier.plan`), and then is in every tier. A reference renews it in all tiers.
    """
    names = keys_of(trace)
    tiers = [HostTier(EmptyArena(level.blocks), make_policy(policy, level.blocks)) for level in levels]
    for tier in tiers:
        tier.open()
    served = dict.fromkeys((level.name for level in levels), 0)
    written = dict.fromkeys(served, 0)
    for request in trace.requests:
        chain = list(map(names.__getitem__, request.blocks))
        where = _locate(chain, tiers, levels, request.at)
        plan = make_plan(where, len(chain), levels[0].name)
        for place in where[: plan.hit]:
            served[str(place)] += 1
        for level, tier in zip(levels, tiers, strict=True):
            written[level.name] += _bring(tier, chain, terms, request)
    references = trace.references
    shares = {name: 100 * count / references for name, count in served.items()}
    return Split(references, MappingProxyType(shares), MappingProxyType(written))


def _locate(
    chain: Sequence[BlockKey], tiers: Sequence[HostTier], levels: Sequence[Level], now: float
) -> list[str | Miss]:
    """Where each block is, up to the first that is nowhere. Prefixes first: tiers are nearly prefix-closed."""
    where: list[str | Miss] = []
    for level, tier in zip(levels, tiers, strict=True):
        more = tier.prefix(chain[len(where) :], now)
        where += [level.name] * more
    while len(where) < len(chain):
        key = chain[len(where)]
        place = next((level.name for level, tier in zip(levels, tiers, strict=True) if not tier.peek(key, now)), None)
        where.append(place or Miss.ABSENT)
        if place is None:
            break
    return where


def _bring(tier: HostTier, chain: Sequence[BlockKey], terms: Terms, request: Request) -> int:
    """Renew what the tier has of a chain, store what it lacks; gives the blocks written."""
    now, written = request.at, 0
    have = tier.prefix(chain, now)
    tier.reference(chain, have, now)
    for key in chain[:have]:
        tier.index[key].use(now)
    life = Lifetime.of(terms, now)
    for index in range(have, len(chain)):
        slot = tier.index.get(chain[index])
        if slot is not None and slot.expires_at >= now:
            slot.use(now)
            continue
        if slot is not None:
            tier.drop(chain[index])
        room = tier.reserve(chain[index], index)
        if room is None:
            break
        tier.commit(room, room.generation, life)
        written += 1
    tier.learn()
    return written


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """CPU microseconds per block reference: on the request's path (reference, victim, insert, remove), and off it."""

    path_us: float
    learn_us: float
    references: int


def policy_cost(trace: Trace, policy: Policy, capacity: int) -> PolicyCost:
    """What a policy costs with keys as an engine has them, 48 bytes each. Only its own verbs are timed."""
    names = keys_of(trace)
    resident: set[BlockKey] = set()
    path = learn = 0
    clock = time.thread_time_ns
    for request in trace.requests:
        chain = [names[block] for block in request.blocks]
        hit = 0
        while hit < len(chain) and chain[hit] in resident:
            hit += 1
        began = clock()
        policy.reference(chain, hit, request.at)
        for key in chain[hit:]:
            if len(resident) >= capacity:
                victim = policy.victim(key, lambda _: True)
                if victim is None:
                    break
                policy.remove(victim)
                resident.remove(victim)
            policy.insert(key)
            resident.add(key)
        ended = clock()
        policy.learn()
        path += ended - began
        learn += clock() - ended
    return PolicyCost(path / trace.references / 1000, learn / trace.references / 1000, trace.references)


def drive(trace: Trace, policy: Policy, capacity: int) -> int:
    """Prefix hits of a policy alone, without manager, slots or terms: what comparing many of them can afford."""
    blocks = cast("Sequence[list[BlockKey]]", [request.blocks for request in trace.requests])  # any hashable name does
    resident: set[BlockKey] = set()
    hits = 0
    for request, chain in zip(trace.requests, blocks, strict=True):
        hit = 0
        while hit < len(chain) and chain[hit] in resident:
            hit += 1
        hits += hit
        policy.reference(chain, hit, request.at)
        for key in chain[hit:]:
            if key in resident:
                continue
            if len(resident) >= capacity:
                victim = policy.victim(key, lambda _: True)
                if victim is None:
                    break
                policy.remove(victim)
                resident.remove(victim)
            policy.insert(key)
            resident.add(key)
        policy.learn()
    policy.check(resident)
    return hits
