"""Everything at once, from a seed: tasks that put, get, purge, evict, pin and flush a small cache, cancelled anywhere.

    python -m tests.manager.support.hammer SECONDS [SEED]

A block's payload is a pure function of its key, so any wrong byte shows. Buffers are overwritten after every return and
every cancellation. The tiers below fail, hang and answer late; the wall clock is set. After each round the tiers heal,
all tasks end, and then: the invariants hold, nothing is pinned or quarantined, the background lives, purged blocks are
misses, and everything that is served is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Awaitable, Callable

import kvtier
from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.retention.terms import Depth
from kvtier.testing import Fault, FaultyTier, MemoryTier, payload_of, sample_namespace
from tests.manager.support.small import slices_of

BLOCK = 4096
NS = sample_namespace(BLOCK)
SALTS = ["a", "b", None]
CHAIN_BLOCKS = 12
WORKERS = 12
ROUND_S = 1.0
CLASSES = {
    "brief": {"ttl": "1s"},
    "sure": {"ttl": "1h", "guarantee": True},
    "shallow": {"ttl": "1h", "ceiling": "g2"},
    "urgent": {"ttl": "1h", "priority": 90},
}


class SetClock(SystemClock):
    """The system's clock, whose wall time is set now and then."""

    offset_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset_s


def chains() -> dict[str | None, list[list[BlockKey]]]:
    """Per salt, prompts of which each leaves an earlier one at some block."""
    rng = random.Random(0)
    out: dict[str | None, list[list[BlockKey]]] = {}
    for salt in SALTS:
        prompts = [[rng.randrange(1000) for _ in range(CHAIN_BLOCKS * NS.block_tokens)] for _ in range(3)]
        for base in prompts[:3]:
            for _ in range(3):
                fork = rng.randrange(1, CHAIN_BLOCKS) * NS.block_tokens
                prompts.append(base[:fork] + [rng.randrange(1000) for _ in range(len(base) - fork)])
        out[salt] = [[BlockKey(key) for key in kvtier.chain_hashes(tokens, NS, salt)] for tokens in prompts]
    return out


class Hammer:
    """One cache, its tiers, and what is done to it. `wrong` are blocks that were served with other bytes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.slots = self.rng.choice([24, 32, 48, 96])
        self.clock = SetClock()
        self.tiers = [FaultyTier(MemoryTier(NS, self.clock, capacity_blocks=self.rng.choice([0, 40, 200])), seed=seed)]
        if self.rng.random() < 0.7:
            stride = self.rng.choice([1, 2, 4])
            self.tiers.append(
                FaultyTier(MemoryTier(NS, self.clock, name="g4", depth=Depth.G4, stride=stride), seed=seed + 1)
            )
        self.config = kvtier.Config.parse(
            {
                "tiers": {"g2": {"capacity": self.slots * BLOCK}},
                "retention": {"classes": CLASSES},
                "deadlines": {"close": "5s", "get": "300ms", "put": "300ms", "lookup": "50ms"},
            }
        )
        self.chains = chains()
        self.wrong: list[str] = []
        self.done = 0

    def chain(self) -> tuple[str | None, list[BlockKey]]:
        salt = self.rng.choice(SALTS)
        chain = self.rng.choice(self.chains[salt])
        return salt, chain[: self.rng.randint(1, len(chain))]

    async def put(self, cache: kvtier.AsyncCache) -> None:
        _, chain = self.chain()
        start = self.rng.choice([0, 0, 0, self.rng.randrange(len(chain))])
        buffers = [bytearray(payload_of(key, BLOCK)) for key in chain[start:]]
        retention = self.rng.choice([None, None, *CLASSES])
        try:
            wait, timeout = self.rng.random() < 0.6, self.rng.choice([None, 0.0, 0.01, 0.2])
            await cache.put(chain, buffers, retention, wait, start=start, timeout=timeout)
        except kvtier.InvalidRequest:
            assert retention == "sure"  # more than may be guaranteed
        finally:
            for buffer in buffers:
                buffer[:] = b"\xee" * BLOCK

    async def get(self, cache: kvtier.AsyncCache) -> None:
        _, chain = self.chain()
        start = self.rng.choice([0, 0, self.rng.randrange(len(chain))])
        async with cache.get(chain, self.rng.choice([None, 0.0, 0.005, 0.1]), start=start) as hit:
            self.compare(chain[start:], hit)
            await asyncio.sleep(self.rng.choice([0, 0, 0.01]))
            self.compare(chain[start:], hit)

    def compare(self, chain: list[BlockKey], hit: kvtier.Hit) -> None:
        for key, block in zip(chain, hit.blocks, strict=False):
            if bytes(block) != payload_of(key, BLOCK):
                self.wrong.append(f"{key.hex()} from {hit.tiers}")

    async def others(self, cache: kvtier.AsyncCache) -> None:
        salt, chain = self.chain()
        verbs: list[Callable[[], Awaitable[object]]] = [
            lambda: cache.match(chain, self.rng.choice([None, 0.0, 0.01])),
            lambda: cache.prewarm(chain, self.rng.choice([None, 0.0, 0.05])),
            lambda: cache.flush(self.rng.choice([0.0, 0.02, 0.2])),
            lambda: cache.evict(self.rng.choice(["g2", *(tier.name for tier in self.tiers)])),
            lambda: cache.purge(salt),
            lambda: cache.pins.create(f"p{self.rng.randrange(4)}", chain, self.rng.choice([0.5, 3600.0])),
            lambda: cache.pins.extend(f"p{self.rng.randrange(4)}", 60.0),
            lambda: cache.pins.delete(f"p{self.rng.randrange(4)}", drop=self.rng.random() < 0.5),
        ]
        weights = [6, 3, 2, 1, 1, 2, 1, 2]
        with contextlib.suppress(kvtier.KVTierError, OSError):
            await self.rng.choices(verbs, weights)[0]()
        cache.computed(self.rng.randrange(1, 64), self.rng.choice([0.0, 1e-4, 0.1]))

    async def work(self, cache: kvtier.AsyncCache, until: float) -> None:
        """One caller: a verb after the other, a third of them cancelled at some await."""
        while time.monotonic() < until:
            verb = self.rng.choices([self.put, self.get, self.others], [5, 5, 2])[0]
            task = asyncio.ensure_future(verb(cache))
            if self.rng.random() < 0.35:
                for _ in range(self.rng.choice([0, 1, 2, 3, 5, 8, 13])):
                    await asyncio.sleep(0)
                if self.rng.random() < 0.5:
                    await asyncio.sleep(self.rng.random() * 0.01)
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.done += 1

    def make_trouble(self) -> None:
        for tier in self.tiers:
            kind = self.rng.choice(["none", "none", "error", "crash", "slow", "linger", "drop"])
            verb = self.rng.choice(["read", "write", "lookup", "retain", "*"])
            tier.faults[:] = (
                [] if kind == "none" else [Fault(verb, kind, rate=0.3, times=20, seconds=self.rng.random() * 0.1)]
            )
        if self.rng.random() < 0.2:
            self.clock.offset_s = self.rng.choice([0.0, 30.0, -30.0])

    async def round(self, cache: kvtier.AsyncCache) -> None:
        until = time.monotonic() + ROUND_S
        workers = [asyncio.ensure_future(self.work(cache, until)) for _ in range(WORKERS)]
        while time.monotonic() < until:
            self.make_trouble()
            await asyncio.sleep(0.1)
        for tier in self.tiers:
            tier.faults.clear()
        self.clock.offset_s = 0.0
        await asyncio.gather(*workers)
        await self.quiesce(cache)

    async def quiesce(self, cache: kvtier.AsyncCache) -> None:
        """All tiers are well, and nobody calls: what must hold then."""
        manager = cache.manager
        for tier in manager.lower.values():
            tier.inner.breaker.succeeded()
        deadline = time.monotonic() + 20
        while True:
            await cache.flush(timeout=5)
            with manager.lock:
                pinned = [slot for slot in manager.host._slots if slot.pins]
                quiet = not pinned and not manager.host.quarantined and not manager.host._filling
            if quiet:
                break
            assert time.monotonic() < deadline, f"held: {len(pinned)} pinned, {manager.host.quarantined} quarantined"
            await asyncio.sleep(0.05)
        cache.check()
        assert not self.wrong, self.wrong[:3]
        fresh = [BlockKey(scope_of("fresh") + self.rng.randbytes(32)) for _ in range(4)]
        await cache.purge("fresh")
        for chain in (chain for of in self.chains.values() for chain in of):
            async with cache.get(chain, 5.0) as hit:
                self.compare(chain, hit)
        assert not self.wrong, self.wrong[:3]
        room = all(not getattr(tier.inner, "_capacity_blocks", 0) for tier in self.tiers)
        assert await cache.put(fresh, [payload_of(key, BLOCK) for key in fresh], timeout=5.0) == 4
        flushed = await cache.flush(timeout=10)
        assert flushed.pending == 0, "the background lives"
        if room:
            for tier in self.tiers:
                missing = [miss for miss in tier.inner.peek(fresh, range(4)) if miss is not None]
                assert not missing, f"{tier.name} lacks what was put: {missing}, {cache.stats()[tier.name]}"
        salt = self.rng.choice(SALTS)
        await cache.purge(salt)
        for chain in self.chains[salt]:
            assert await cache.match(chain) == 0, "purged"


async def hammer(seed: int, seconds: float) -> int:
    """Rounds for `seconds` on one cache; returns how many calls were made. With an even seed, in slices of a block or
    two, which chains as short as these would not be cut into."""
    it = Hammer(seed)
    ends = time.monotonic() + seconds
    with slices_of(1 + seed // 2 % 2) if seed % 2 == 0 else contextlib.nullcontext():
        async with kvtier.aopen(it.config, NS, clock=it.clock, tiers=it.tiers) as cache:
            while time.monotonic() < ends:
                await it.round(cache)
    return it.done


def main() -> None:
    """Seeds from SEED on, four seconds each; stops at the first that fails, and names it."""
    ends, seed = time.monotonic() + float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    calls = 0
    while time.monotonic() < ends:
        try:
            calls += asyncio.run(asyncio.wait_for(hammer(seed, 4.0), 120))
        except BaseException:
            print(f"seed {seed} fails", flush=True)
            raise
        seed += 1
    print(f"{calls} calls, up to seed {seed - 1}: all right")


if __name__ == "__main__":
    main()
