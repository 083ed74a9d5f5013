"""A tier in miniature: what an owner does with a policy, and the best that any policy could do."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.policies.policy import Policy

Request = tuple[float, list[BlockKey]]


@dataclass
class Owner:
    """Keeps `capacity` blocks as a tier would: head first, nothing below a refused block."""

    policy: Policy
    capacity: int
    resident: set[BlockKey] = field(default_factory=set)
    hits: int = 0
    references: int = 0

    def request(self, now: float, chain: Sequence[BlockKey]) -> int:
        hit = 0
        while hit < len(chain) and chain[hit] in self.resident:
            hit += 1
        self.hits += hit
        self.references += len(chain)
        self.policy.reference(chain, hit, now)
        for key in chain[hit:]:
            if key in self.resident:
                continue
            if len(self.resident) >= self.capacity:
                victim = self.policy.victim(key, lambda _: True)
                if victim is None:
                    break
                self.drop(victim)
            self.policy.insert(key)
            self.resident.add(key)
        return hit

    def drop(self, key: BlockKey) -> None:
        self.policy.remove(key)
        self.resident.remove(key)

    def run(self, requests: Sequence[Request]) -> float:
        """Percent of references that were prefix hits."""
        for now, chain in requests:
            self.request(now, chain)
        return 100 * self.hits / self.references


def best_hits(requests: Sequence[Request], capacity: int) -> int:
    """Belady with bypass over single blocks: no policy hits more (Belady, IBM Systems Journal 1966)."""
    after: list[list[float]] = []
    upcoming: dict[BlockKey, float] = {}
    for number in range(len(requests) - 1, -1, -1):
        chain = requests[number][1]
        after.append([upcoming.get(key, float("inf")) for key in chain])
        upcoming.update(dict.fromkeys(chain, float(number)))
    after.reverse()
    held: dict[BlockKey, float] = {}
    farthest: list[tuple[float, BlockKey]] = []
    hits = 0
    for (_, chain), nexts in zip(requests, after, strict=True):
        for key, coming in zip(chain, nexts, strict=True):
            hits += key in held
            if key not in held and len(held) >= capacity:
                while held.get(farthest[0][1]) != -farthest[0][0]:
                    heapq.heappop(farthest)
                if -farthest[0][0] <= coming:
                    continue
                del held[heapq.heappop(farthest)[1]]
            held[key] = coming
            heapq.heappush(farthest, (-coming, key))
    return hits


def sessions(seed: int, requests: int, users: int, turn: int = 6) -> list[Request]:
    """Conversations that grow by up to `turn` blocks per request, share a few heads, pause, and sometimes branch."""
    rng = random.Random(seed)
    chains: list[list[BlockKey]] = [[] for _ in range(users)]
    fresh, now, out = 0, 0.0, []
    for _ in range(requests):
        now += rng.expovariate(1.0) if rng.random() < 0.97 else 300.0
        user = min(int(rng.paretovariate(0.7)) - 1, users - 1)
        if not chains[user] or rng.random() < 0.02:
            head = rng.randrange(4)
            chains[user] = [BlockKey(b"head-%d-%d" % (head, depth)) for depth in range(3)]
        elif rng.random() < 0.05:
            chains[user] = chains[user][: rng.randrange(1, len(chains[user]) + 1)]
        grown = list(chains[user])
        for _ in range(rng.randrange(turn)):
            grown.append(BlockKey(b"%d" % fresh))
            fresh += 1
        chains[user] = grown
        out.append((now, grown))
    return out


@pytest.fixture
def make_sessions() -> Callable[..., list[Request]]:
    return sessions


@pytest.fixture
def make_owner() -> type[Owner]:
    return Owner


@pytest.fixture
def ceiling() -> Callable[[Sequence[Request], int], int]:
    return best_hits
