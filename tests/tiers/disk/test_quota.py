"""No scope holds more of G3 than its share: its own coldest blocks make room, and nobody else's."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import lmdb
import pytest

from kvtier.identity.keys import SHARED, BlockKey, Scope, scope_of
from kvtier.identity.namespace import Namespace
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import eviction, write_txn
from kvtier.tiers.disk.quota import shares_of
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, put

NAMESPACE = sample_namespace(BLOCK)
A, B = scope_of("a"), scope_of("b")
BLOCKS = 40
QUOTA = 0.25
SHARE = 10


@asynccontextmanager
async def shared(
    path: Path, quota: float = QUOTA, *, clock: VirtualClock | None = None, namespace: Namespace = NAMESPACE
) -> AsyncIterator[DiskTier]:
    tier = DiskTier([path], BLOCKS * BLOCK, namespace, clock=clock or VirtualClock(), quota=quota)
    await tier.open()
    try:
        yield tier
        tier.check()
    finally:
        await tier.close(FAR_S)


def chain(seed: int, length: int, scope: Scope) -> list[BlockKey]:
    return list(chain_of(NAMESPACE, length, seed=seed, scope=scope))


def here(tier: DiskTier, keys: Sequence[BlockKey]) -> int:
    """Leading blocks that are there; all others must not be, or a chain has lost its head."""
    found = [miss is None for miss in tier.peek(keys, range(len(keys)))]
    leading = found.index(False) if False in found else len(found)
    assert not any(found[leading:]), "a block is there without its parent"
    return leading


def counted(tier: DiskTier) -> dict[bytes, int] | None:
    """Blocks by scope, as the store counts them."""
    with tier._store.index.reading() as txn:
        found = shares_of(txn)
    return None if found is None else {scope: size // BLOCK for scope, size in found.items()}


async def test_a_full_scope_gives_up_its_own_coldest_blocks(tmp_path: Path) -> None:
    old, young, others = chain(1, 6, A), chain(2, 6, A), chain(3, 8, B)
    async with shared(tmp_path / "g3") as tier:
        await put(tier, others, parents=True)  # colder than all that follows
        await put(tier, old, parents=True)
        assert await put(tier, young, parents=True) == [Stored.STORED] * 6
        assert (here(tier, old), here(tier, young), here(tier, others)) == (4, 6, 8)
        assert counted(tier) == {A: SHARE, B: 8}
        assert tier.usage().evictions == 2
        assert await get(tier, young) == [True] * 6


async def test_a_full_scope_takes_no_slot_of_others_in_a_full_store(tmp_path: Path) -> None:
    others = chain(1, BLOCKS - SHARE, B)
    async with shared(tmp_path / "g3", 0.0) as tier:
        await put(tier, others, parents=True)  # the coldest of all
        await put(tier, chain(2, SHARE, A), parents=True)
    async with shared(tmp_path / "g3") as tier:
        assert await put(tier, chain(3, 6, A), parents=True) == [Stored.STORED] * 6
        assert (here(tier, chain(2, SHARE, A)), here(tier, chain(3, 6, A))) == (SHARE - 6, 6)
        assert here(tier, others) == len(others), "blocks of another scope left for it"


async def test_without_a_quota_it_fills_the_store(tmp_path: Path) -> None:
    async with shared(tmp_path / "g3", 0.0) as tier:
        for seed in range(5):
            assert await put(tier, chain(seed, 6, A), parents=True) == [Stored.STORED] * 6
        assert sum(here(tier, chain(seed, 6, A)) for seed in range(5)) == 30
        assert counted(tier) is None, "nobody asked for shares"


async def test_a_chain_longer_than_the_share_keeps_its_head(tmp_path: Path) -> None:
    long = chain(1, 14, A)
    async with shared(tmp_path / "g3") as tier:
        stored = await put(tier, long, parents=True)
        assert stored == [Stored.STORED] * 10 + [Stored.FULL] + [Stored.REFUSED] * 3
        assert here(tier, long) == 10
        assert await put(tier, long[:11], [10], parents=True) == [Stored.FULL], "it may not push out its own parent"
        assert here(tier, long) == 10


async def test_the_last_of_a_scope_may_be_its_only_block(tmp_path: Path) -> None:
    """A share that holds less than a block holds one."""
    async with shared(tmp_path / "g3", 0.001) as tier:
        assert await put(tier, chain(1, 2, A), parents=True) == [Stored.STORED, Stored.FULL]
        assert await put(tier, chain(2, 1, A), parents=True) == [Stored.STORED]
        assert (here(tier, chain(1, 2, A)), here(tier, chain(2, 1, A))) == (0, 1)


async def test_blocks_of_two_sizes_that_come_together_fill_no_share_twice(tmp_path: Path) -> None:
    """Each counts as large as it is: 40 of 4 KiB and 4 of 32 KiB are less than the share of 1 MiB."""
    sizes, clock, go_on = (BLOCK, 8 * BLOCK), VirtualClock(), threading.Event()
    async with AsyncExitStack() as stack:
        tiers = []
        for size in sizes:
            tier = DiskTier([tmp_path / "g3"], 1 << 30, sample_namespace(size), clock=clock, quota=2**-10)
            await tier.open()
            stack.push_async_callback(tier.close, FAR_S)
            tiers.append(tier)
        chains = [
            list(chain_of(sample_namespace(size), length, seed=size, scope=A))
            for size, length in zip(sizes, (40, 4), strict=True)
        ]
        tiers[0]._store.submit(lambda txn: go_on.wait(30))  # so that both are of one transaction
        written = asyncio.gather(*(put(*one, parents=True) for one in zip(tiers, chains, strict=True)))
        await asyncio.sleep(0.2)
        go_on.set()
        assert await written == [[Stored.STORED] * 40, [Stored.STORED] * 4]
        assert counted(tiers[0]) == {A: 40 + 4 * 8}


async def test_a_retained_block_is_not_given_up(tmp_path: Path) -> None:
    clock = VirtualClock()
    sure, first, second = chain(1, 6, A), chain(2, 4, A), chain(3, 4, A)
    async with shared(tmp_path / "g3", clock=clock) as tier:
        await put(tier, sure, parents=True)
        assert await tier.retain(sure, clock.wall() + 60) == [True] * 6
        await put(tier, first, parents=True)
        assert await put(tier, second, parents=True) == [Stored.STORED] * 4
        assert (here(tier, sure), here(tier, first), here(tier, second)) == (6, 0, 4)
        clock.advance(61)
        await put(tier, first, parents=True)
        assert here(tier, first) == 4 and here(tier, sure) < 6, "retention that is over still held"


async def test_a_use_keeps_a_block_from_being_given_up(tmp_path: Path) -> None:
    old, young = chain(1, 5, A), chain(2, 5, A)
    async with shared(tmp_path / "g3") as tier:
        await put(tier, old, parents=True)
        await put(tier, young, parents=True)
        tier.touch(old, tier._clock.wall())
        await tier.flush(tier._clock.monotonic() + FAR_S)
        await put(tier, chain(3, 3, A), parents=True)
        assert (here(tier, old), here(tier, young)) == (5, 2)


async def test_counting_begins_in_a_store_that_has_blocks(tmp_path: Path) -> None:
    async with shared(tmp_path / "g3", 0.0) as tier:
        for seed in range(3):
            await put(tier, chain(seed, 6, A), parents=True)
        await put(tier, chain(9, 6, B), parents=True)
    async with shared(tmp_path / "g3") as tier:
        assert await put(tier, chain(5, 1, A), parents=True) == [Stored.STORED]
        assert counted(tier) == {A: SHARE, B: 6}
    async with shared(tmp_path / "g3", 0.0) as tier:
        await tier.purge(A, tier._clock.wall())
        assert counted(tier) == {B: 6}, "who has no quota counts, too, once it was begun"


async def test_a_scope_far_beyond_its_share_shrinks_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction must not hold the lock for long."""
    monkeypatch.setattr(write_txn, "EXTRA_EVICTIONS_MAX", 2)
    async with shared(tmp_path / "g3", 0.0) as tier:
        for seed in range(3):
            await put(tier, chain(seed, 6, A), parents=True)
    async with shared(tmp_path / "g3") as tier:
        tries = 0
        while await put(tier, chain(5, 1, A), parents=True) == [Stored.FULL]:
            tries += 1
        assert tries == 2 and counted(tier) == {A: SHARE}


async def test_a_scope_counts_in_all_namespaces(tmp_path: Path) -> None:
    other = sample_namespace(BLOCK, model="other")
    mine, theirs = chain(1, 8, A), list(chain_of(other, 6, seed=2, scope=A))
    async with shared(tmp_path / "g3") as tier, shared(tmp_path / "g3", namespace=other) as second:
        await put(tier, mine, parents=True)
        assert await put(second, theirs, parents=True) == [Stored.STORED] * 6
        assert here(tier, mine) == 4 and counted(tier) == {A: SHARE}


async def test_a_search_is_bounded_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scope's blocks lie behind many of others: what is not found now is refused now."""
    monkeypatch.setattr(eviction, "SCAN_ROWS_MAX", 4)
    async with shared(tmp_path / "g3") as tier:
        for seed in range(10):
            await put(tier, chain(seed, 1, B), parents=True)
        await put(tier, chain(20, 10, A), parents=True)
        refused = 0
        while await put(tier, chain(30, 1, A), parents=True) == [Stored.FULL]:
            refused += 1
        assert 1 <= refused <= 4
        assert (here(tier, chain(20, 10, A)), here(tier, chain(30, 1, A))) == (9, 1)


async def test_what_a_failed_commit_found_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a scope's coldest block lies is remembered between transactions, but not from one that never was."""
    old = chain(1, SHARE, A)
    save = WriteTxn.save
    failed: list[int] = []

    def save_but_once(txn: WriteTxn) -> None:
        save(txn)
        if txn.evicted and not failed:
            failed.append(len(txn.evicted))
            raise lmdb.MapFullError("injected")

    async with shared(tmp_path / "g3") as tier:
        await put(tier, old, parents=True)
        monkeypatch.setattr(WriteTxn, "save", save_but_once)
        assert await put(tier, chain(2, 1, A), parents=True) == [Stored.FULL]
        assert failed == [1] and here(tier, old) == SHARE and counted(tier) == {A: SHARE}
        assert await put(tier, chain(2, 1, A), parents=True) == [Stored.STORED]
        assert here(tier, old) == SHARE - 1


class Sharing:
    """Random writes, uses, retentions and purges of three scopes by two namespaces at once."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.clock = VirtualClock()
        self.namespaces = [NAMESPACE, sample_namespace(BLOCK, model="other")]
        self.scopes = [SHARED, A, B]
        self.chains = [
            (number, list(chain_of(namespace, self.rng.randrange(2, 14), seed=seed, scope=scope)))
            for number, namespace in enumerate(self.namespaces)
            for scope in self.scopes
            for seed in range(5)
        ]
        self.outcomes: Counter[str] = Counter()

    async def run(self, steps: int) -> None:
        async with (
            shared(self.path, clock=self.clock, namespace=self.namespaces[0]) as one,
            shared(self.path, clock=self.clock, namespace=self.namespaces[1]) as two,
        ):
            self.tiers = [one, two]
            for _ in range(steps):
                self.clock.advance(1.0)
                await asyncio.gather(*(self.step() for _ in range(self.rng.randrange(1, 4))))
                self.check()

    async def step(self) -> None:
        number, keys = self.rng.choice(self.chains)
        tier = self.tiers[number]
        verbs = {"write": 12, "touch": 6, "retain": 1, "release": 2, "evict": 1, "purge": 0.3, "read": 3}
        match self.rng.choices(list(verbs), list(verbs.values()))[0]:
            case "write":
                start = sum(miss is None for miss in tier.peek(keys, range(len(keys))))
                stop = min(len(keys), start + self.rng.randrange(1, 8))
                terms = Terms("t", ttl=86_400, priority=self.rng.choice([50, 50, 20, 90]))
                written = await put(tier, keys, range(start, stop), parents=True, terms=terms)
                self.outcomes.update(map(str, written))
            case "touch":
                tier.touch(keys[: self.rng.randrange(len(keys) + 1)], self.clock.wall())
            case "retain":
                await tier.retain(keys[:2], self.clock.wall() + 20)
            case "release":
                await tier.release_retained(keys[:2])
            case "evict":
                await tier.evict(keys[len(keys) // 2 :])
            case "purge":
                await tier.purge(self.rng.choice(self.scopes), self.clock.wall())
            case "read":
                assert all(found is not False for found in await get(tier, keys)), "wrong bytes"

    def check(self) -> None:
        for tier in self.tiers:
            tier.check()  # compares the counts with what is there
        for scope, blocks in (counted(self.tiers[0]) or {}).items():
            assert blocks <= SHARE, f"a scope holds {blocks} blocks"
            self.outcomes[f"full {self.scopes.index(Scope(scope))}"] += blocks == SHARE
        for number, keys in self.chains:
            found = [miss is None for miss in self.tiers[number].peek(keys, range(len(keys)))]
            assert not any(below and not above for above, below in itertools.pairwise(found)), "an orphan"


@pytest.mark.parametrize("seed", range(3))
async def test_scopes_race_for_their_shares(tmp_path: Path, seed: int) -> None:
    sharing = Sharing(tmp_path / "g3", seed)
    await sharing.run(80)
    assert sharing.outcomes["stored"] > 60
    assert all(sharing.outcomes[f"full {number}"] for number in range(3)), "no scope ever met its bound"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 112))
async def test_scopes_race_for_their_shares_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(eviction, "SCAN_ROWS_MAX", 1 + seed % 3 * 20)
    await Sharing(tmp_path / "g3", seed).run(600)
