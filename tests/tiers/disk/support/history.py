"""A random history of one G3 directory, and what may and must be served at every moment of it.

Two block sizes, three tenants, sessions that encrypt and sessions that do not, keys destroyed, purges, retained blocks,
restarts, other capacities, clocks that are set two days ahead or back, and maintenance beside the writers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kvtier.identity.keys import SHARED, BlockKey, Scope, scope_of, tenant_of
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.data_keys import KEY_CACHE_S
from kvtier.tiers.disk.maintenance import looking_after
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.tiers.disk.support.keys import MemoryKeys, sample_keys
from tests.tiers.disk.support.store import FAR_S, get, opened, put

SMALL, LARGE = 4096, 12288
CAPACITIES = (18, 24, 32)
"""In blocks of LARGE."""
SCOPES = (SHARED, scope_of("one"), scope_of("two", b"adapter"))
TERMS = (
    Terms("ever"),
    Terms("used", ttl=3600.0),
    Terms("day", max_age=86_400.0),
    Terms("both", ttl=300.0, max_age=7000.0),
)
DAY_S = 86_400.0
NEVER = Wall(float("-inf"))
Name = tuple[int, BlockKey]
"""Block size and key."""


@dataclass
class Life:
    """What is known of a block since it was last known to be absent."""

    key: int | None
    """The number of the key that it was encrypted with; None: plain."""
    made: list[tuple[Wall, Terms]] = field(default_factory=list)
    used: Wall = NEVER
    retained: Wall = NEVER

    def may_live(self, wall_s: Wall) -> bool:
        """Whether some of its terms may allow it, used whenever it may have been."""
        for made, terms in self.made:
            used = terms.ttl is None or wall_s - max(made, self.used) <= terms.ttl + 1
            aged = terms.max_age is None or wall_s - made <= terms.max_age + 1
            if made <= wall_s + FUTURE_S and used and aged:
                return True
        return False


class History:
    """Made over an empty directory; `run` may be called once. Raises AssertionError where a block is served that must
    not be, or missed that must not be."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._rng = Random(seed)
        self._clock = VirtualClock()
        self._store = MemoryKeys()
        self._keys = sample_keys(self._clock, self._store)
        self._key_numbers: Counter[Scope] = Counter()  # by tenant, how many were destroyed
        self._lives: dict[Name, Life] = {}
        self._purged: dict[tuple[int, Scope], Wall] = {}
        self._tiers: dict[int, DiskTier] = {}
        self._encrypts = False
        self._capacity = CAPACITIES[0]
        self._drawn: tuple[int, list[BlockKey]] | None = None
        self.seen: Counter[str] = Counter()
        self._chains = {
            size: [
                chain_of(sample_namespace(size), self._rng.randrange(2, 9), number, scope)
                for number in range(4)
                for scope in SCOPES
            ]
            for size in (SMALL, LARGE)
        }

    async def run(self, sessions: int, steps: int) -> None:
        """So many sessions of so many steps each."""
        for _ in range(sessions):
            self._encrypts = self._rng.random() < 0.6
            capacity = self._rng.choice(CAPACITIES)
            if capacity < self._capacity:
                self._forget_retained()  # what lies beyond goes, retained or not
            self._capacity = capacity
            async with AsyncExitStack() as stack:
                keys = self._keys if self._encrypts else None
                for size in (LARGE, SMALL):
                    blocks = self._capacity * LARGE // size
                    tier = opened(self._path, blocks, block_bytes=size, clock=self._clock, keys=keys)
                    self._tiers[size] = await stack.enter_async_context(tier)
                for _ in range(steps):
                    await self._step()

    async def _step(self) -> None:
        verbs = (
            (self._put, 40), (self._get, 40), (self._retain, 6), (self._release, 1), (self._evict, 2), (self._purge, 1),
            (self._destroy, 1), (self._wait, 5), (self._jump, 1), (self._maintain, 3),
        )  # fmt: skip
        verb = self._rng.choices([verb for verb, _ in verbs], [weight for _, weight in verbs])[0]
        self.seen[verb.__name__] += 1
        await verb()

    def _draw(self) -> tuple[DiskTier, list[BlockKey]]:
        """A tier and a chain: often the one before, and some more often than others."""
        if self._drawn is None or self._rng.random() < 0.6:
            size = self._rng.choice((SMALL, LARGE))
            chains = self._chains[size]
            self._drawn = size, chains[int(len(chains) * self._rng.random() ** 2)]
        size, chain = self._drawn
        return self._tiers[size], list(chain)

    def _key_of(self, key: BlockKey) -> int | None:
        return self._key_numbers[tenant_of(key[:16])] if self._encrypts else None

    async def _put(self) -> None:
        tier, chain = self._draw()
        terms = self._rng.choices(TERMS, [5, 1, 2, 1])[0]
        await self._store_chain(tier, chain[: self._rng.randrange(1, len(chain) + 1)], terms)

    async def _store_chain(self, tier: DiskTier, chain: list[BlockKey], terms: Terms) -> None:
        wall_s = self._clock.wall()
        results = await put(tier, chain, terms=terms, parents=True)
        there: list[BlockKey] = []
        for key, result in zip(chain, results, strict=True):
            self.seen[f"put {result.value}"] += 1
            name = (tier.block_bytes, key)
            if result is Stored.STORED:
                before = self._lives.get(name)
                # A retained block that is written anew keeps its old terms, too.
                made = before.made if before is not None and before.retained > wall_s else []
                retained = before.retained if before is not None else NEVER
                used = before.used if before is not None else wall_s
                self._lives[name] = Life(self._key_of(key), [*made, (wall_s, terms)], max(used, wall_s), retained)
            elif result is Stored.PRESENT:
                life = self._lives[name]
                assert life.key == self._key_of(key), "a block under another key is said to be here"
                life.made.append((wall_s, terms))
                life.used = max(life.used, wall_s)
            if result in (Stored.STORED, Stored.PRESENT):
                there.append(key)
        if there:
            answers = await get(tier, there)
            assert all(one is True or one is Miss.ABSENT for one in answers), answers
            assert answers[0] is True, f"{answers}: it was just stored"

    async def _get(self) -> None:
        tier, chain = self._draw()
        await self._read(tier, chain)

    async def _read(self, tier: DiskTier, chain: list[BlockKey]) -> None:
        wall_s = self._clock.wall()
        peeked = tier.peek(chain, range(len(chain)))
        answers = await get(tier, chain)
        if self._rng.random() < 0.5:
            tier.touch([key for key, answer in zip(chain, answers, strict=True) if answer is True], wall_s)
            await tier.flush(self._clock.monotonic() + FAR_S)
        for key, answer, peek in zip(chain, answers, peeked, strict=True):
            name = (tier.block_bytes, key)
            self.seen["hit" if answer is True else f"miss {answer}"] += 1
            assert answer is not Miss.CORRUPT, "sound bytes are taken for damage"
            life = self._lives.get(name)
            if answer is True or peek is None:
                self._may_be_served(life, name, wall_s)
            if answer is True and life is not None:
                life.used = max(life.used, wall_s)
            elif self._must_be_served(life, name, wall_s):
                raise AssertionError(f"a retained block is missed: {answer}")

    def _may_be_served(self, life: Life | None, name: Name, wall_s: Wall) -> None:
        size, key = name
        assert life is not None, "a block that was removed is served"
        assert life.may_live(wall_s), "a block is served beyond its terms"
        assert life.key == (None if life.key is None else self._key_of(key)), "a block of a destroyed key is served"
        youngest = max(made for made, _ in life.made)
        assert youngest > self._purged.get((size, tenant_of(key[:16])), NEVER), "a purged block is served"

    def _must_be_served(self, life: Life | None, name: Name, wall_s: Wall) -> bool:
        if life is None or life.retained <= wall_s or wall_s < max(made for made, _ in life.made):
            return False
        size, key = name
        if life.key is not None and life.key != self._key_of(key):
            return False
        oldest = min(made for made, _ in life.made)
        return oldest > self._purged.get((size, tenant_of(key[:16])), NEVER)

    async def _retain(self) -> None:
        tier, chain = self._draw()
        wall_s = self._clock.wall()
        until = Wall(wall_s + self._rng.choice((600.0, DAY_S)))
        for key, here in zip(chain, await tier.retain(chain, until, until), strict=True):
            life = self._lives.get((tier.block_bytes, key))
            if here:
                assert life is not None and life.may_live(wall_s), "a block that is gone is said to be retained"
                life.retained = until
                life.made.append((wall_s, Terms("retained", max_age=until - wall_s)))
        held = [one for one in self._lives.values() if one.retained > wall_s]
        if len(held) > self._capacity // 3:  # else nothing could be stored any more
            for size, one in self._tiers.items():
                await one.release_retained([key for of, key in self._lives if of == size])
            self._forget_retained()

    def _forget_retained(self) -> None:
        for life in self._lives.values():
            life.retained = NEVER

    async def _release(self) -> None:
        tier, chain = self._draw()
        await tier.release_retained(chain)
        for key in chain:
            if life := self._lives.get((tier.block_bytes, key)):
                life.retained = NEVER

    async def _evict(self) -> None:
        tier, chain = self._draw()
        await tier.evict(chain)
        for key in chain:
            self._lives.pop((tier.block_bytes, key), None)
        assert set(await get(tier, chain)) <= {Miss.ABSENT, Miss.PURGED}

    async def _purge(self) -> None:
        tier, chain = self._draw()
        tenant, wall_s = tenant_of(chain[0][:16]), self._clock.wall()
        await tier.purge(Scope(chain[0][:16]), wall_s)
        place = (tier.block_bytes, tenant)
        self._purged[place] = max(wall_s, self._purged.get(place, wall_s))
        for size, key in list(self._lives):
            if size == tier.block_bytes and tenant_of(key[:16]) == tenant:
                life = self._lives[size, key]
                if max(made for made, _ in life.made) <= wall_s:
                    del self._lives[size, key]
        await self._read(tier, chain)

    async def _destroy(self) -> None:
        scope = self._rng.choice(SCOPES)
        if self._store.destroy(self._keys.name_of(scope)):
            self._key_numbers[tenant_of(scope)] += 1
            await self._clock.sleep(KEY_CACHE_S + 1)

    async def _wait(self) -> None:
        await self._clock.sleep(self._rng.choice((1.0, 1.0, 70.0, 400.0, 4000.0)))

    async def _jump(self) -> None:
        """A jump beyond a block's time ends its retention, also where the clock comes back."""
        self._clock.jump_wall(self._rng.choice((-2 * DAY_S, -200.0, 200.0, 2 * DAY_S)))
        for life in self._lives.values():
            if life.retained <= self._clock.wall():
                life.retained = NEVER

    async def _maintain(self) -> None:
        """Look after the directory while others write to it."""
        tier, chain = self._draw()
        looking = asyncio.to_thread(self._look_after, self._rng.choice(("verify", "scrub", "gc")))
        _, wrong = await asyncio.gather(self._store_chain(tier, chain, TERMS[0]), looking)
        assert wrong is None, wrong

    def _look_after(self, verb: str) -> str | None:
        with looking_after([self._path], self._clock) as care:
            care.inspect()
            list(care.diagnose())
            if verb == "gc":
                care.due()
                care.gc()
                return None
            found = care.verify() if verb == "verify" else care.scrub()
            return None if found.sound and not found.removed else str(found)
