"""No chain without its head: what is in G3 has its parent there, whatever is written, used and pushed out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.identity.keys import SHARED, BlockKey, make_keys, scope_of_key, tenant_of
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.marks import mark_below
from kvtier.retention.terms import BUILTIN
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import removals, touches, write
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index, Use, map_bytes_for
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.records import SCOPED_BYTES, NewBlock, SlotReservation
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 12)
NOW = Wall(1e9)
SLOTS = 3


def tree(rng: random.Random, chains: int, length: int) -> list[list[BlockKey]]:
    """Prompts that share beginnings."""
    out: list[list[BlockKey]] = []
    for _ in range(chains):
        base = rng.choice(out)[: rng.randrange(length)] if out and rng.random() < 0.7 else []
        fresh = make_keys(SHARED, [rng.randbytes(32) for _ in range(length - len(base))])
        out.append([*base, *fresh])
    return out


def orphans(tier: DiskTier, chains: list[list[BlockKey]]) -> int:
    """Blocks whose parent is not there."""
    count = 0
    for chain in chains:
        here = [miss is None for miss in tier.peek(chain, range(len(chain)))]
        count += sum(below and not above for above, below in itertools.pairwise(here))
    return count


async def churn(path: Path, seed: int, *, parents: bool, steps: int = 120) -> tuple[int, int]:
    """Returns (orphans seen, blocks stored)."""
    rng = random.Random(seed)
    clock = VirtualClock()
    chains = tree(rng, 30, 10)
    seen = stored = 0
    async with opened(path, 40, clock=clock) as tier:
        for _ in range(steps):
            clock.advance(1.0)
            chain = rng.choice(chains)
            start = sum(miss is None for miss in tier.peek(chain, range(len(chain))))
            if rng.random() < 0.7:
                end = min(len(chain), start + rng.randrange(1, 5))
                if rng.random() < 0.5:
                    tier.touch(chain[:start], clock.wall())  # a hit; its touches may come late, or with others'
                written = await put(tier, chain, range(start, end), parents=parents)
                stored += written.count(Stored.STORED)
            else:
                tier.touch(chain[: rng.randrange(10)], clock.wall())
            if rng.random() < 0.3:
                await tier.flush(clock.monotonic() + 60)
            seen += orphans(tier, chains)
    return seen, stored


def every_write_is_one_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it keeps slots for the next one."""
    monkeypatch.setattr(write, "STREAM_BYTES_MIN", BLOCK)
    monkeypatch.setattr(write, "STREAM_SHARE", 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_block_has_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(touches, "NAMES_PER_COMMIT_MAX", 3)
    if stream:
        every_write_is_one_of_a_stream(monkeypatch)
    for seed in range(2):
        seen, stored = await churn(tmp_path / str(seed), seed, parents=True)
        assert seen == 0
        assert stored > 60, "hardly anything was pushed out"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(8))
async def test_every_block_has_its_parent_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(touches, "NAMES_PER_COMMIT_MAX", 1 + seed)
    if seed % 2:
        every_write_is_one_of_a_stream(monkeypatch)
    seen, _stored = await churn(tmp_path / "g3", 100 + seed, parents=True, steps=1000)
    assert seen == 0


async def test_without_parents_chains_lose_their_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "NAMES_PER_COMMIT_MAX", 3)
    seen, _stored = await churn(tmp_path / "g3", 0, parents=False)
    assert seen > 0


async def test_a_block_without_its_parent_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3") as tier:
        assert await put(tier, CHAIN, [3, 4], parents=True) == [Stored.REFUSED] * 2
        assert await put(tier, CHAIN, [4, 0, 1, 2], parents=True) == [Stored.REFUSED] + [Stored.STORED] * 3
        assert await put(tier, CHAIN, [3, 4], parents=True) == [Stored.STORED] * 2
        assert await get(tier, CHAIN[:5]) == [True] * 5
        assert await put(tier, CHAIN, [5, 7], parents=True) == [Stored.STORED, Stored.REFUSED], "another is reserved"


async def test_a_write_whose_slot_was_given_to_another_is_not_published(tmp_path: Path) -> None:
    """Its owner was taken for dead, and goes on."""
    clock = VirtualClock()
    one, other = (
        NewBlock(NAMESPACE.digest + key, BLOCK, Lifetime.of(BUILTIN["24h"], clock.wall()), digest=bytes(16))
        for key in chain_of(NAMESPACE, 1, seed=5) + chain_of(NAMESPACE, 1, seed=6)
    )

    def work(txn: WriteTxn) -> tuple[Stored, Stored]:
        late = txn.reserve(one, clock.wall())
        assert isinstance(late, SlotReservation)
        txn.release(late)
        now = txn.reserve(other, clock.wall())
        assert isinstance(now, SlotReservation) and now.key == late.key and now.serial != late.serial
        return txn.publish(late, one, clock.wall()), txn.publish(now, other, clock.wall())

    async with opened(tmp_path / "g3", 1, clock=clock) as tier:
        assert await tier._store.submit(work, Use.DROP).result(10) == (Stored.FAILED, Stored.STORED)
        assert tier.peek([one.name[32:], other.name[32:]], [0, 1]) == [Miss.ABSENT, None]  # type: ignore[list-item]


async def test_another_s_reservation_is_no_parent(tmp_path: Path) -> None:
    clock = VirtualClock()
    life = Lifetime.of(BUILTIN["24h"], clock.wall())
    names = [NAMESPACE.digest + key for key in CHAIN]
    one, orphan = NewBlock(names[0], BLOCK, life), NewBlock(names[3], BLOCK, life, depth=3, parent=names[2])
    child = NewBlock(names[1], BLOCK, life, depth=1, parent=names[0])

    def work(txn: WriteTxn) -> list[type]:
        found = [txn.reserve(block, clock.wall()) for block in (one, orphan, child)]
        for each in found:
            if isinstance(each, SlotReservation):
                txn.release(each)
        assert found[1] is Stored.REFUSED
        return [type(each) for each in found]

    async with opened(tmp_path / "g3", clock=clock) as tier:
        done = await tier._store.submit(work, Use.DROP).result(10)
        assert done == [SlotReservation, Stored, SlotReservation]


async def test_a_block_never_pushes_out_its_own_parent(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 4) as tier:
        for index in range(4):
            assert await put(tier, CHAIN, [index], parents=True) == [Stored.STORED]
        assert await put(tier, CHAIN, [4], parents=True) == [Stored.FULL]
        assert await get(tier, CHAIN[:5]) == [True] * 4 + [Miss.ABSENT]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Of a store with room for SLOTS blocks."""
    geometry = Geometry(SLOTS * BLOCK, SLOTS * BLOCK, 1)
    index = Index.create(tmp_path / "index", bytes(16), geometry, map_bytes_for(geometry.capacity), Owner.current())
    yield index
    index.check()
    index.close()


def block_of(depth: int, length: int = BLOCK, position: int = 0) -> NewBlock:
    life = Lifetime.of(BUILTIN["24h"], NOW)
    parent = NAMESPACE.digest + CHAIN[depth - 1] if depth else None
    return NewBlock(NAMESPACE.digest + CHAIN[depth], length, life, depth, bytes(16), parent, position=position)


def store(index: Index, block: NewBlock) -> None:
    def work(txn: WriteTxn) -> Stored:
        slot = txn.reserve(block, NOW)
        assert isinstance(slot, SlotReservation)
        return txn.publish(slot, block, NOW)

    assert index.transact(work) is Stored.STORED


def test_a_purge_that_comes_before_the_end_of_a_write_takes_it_back(index: Index) -> None:
    block = block_of(0, position=3)
    slot = index.transact(lambda txn: txn.reserve(block, NOW))
    assert isinstance(slot, SlotReservation)
    index.transact(lambda txn: txn.purged.apply(block.name[:SCOPED_BYTES], mark_below(4)))
    assert index.transact(lambda txn: txn.publish(slot, block, NOW)) is Stored.REFUSED
    assert index.transact(lambda txn: txn.reserve(block, NOW)) is Stored.REFUSED
    assert not index.transact(lambda txn: txn.reservations.all()), "its slot is free again"


def test_a_purged_parent_is_none_though_it_is_not_removed_yet(index: Index) -> None:
    """No reader would come past it."""
    parent, child = block_of(0, position=1), block_of(1, position=5)
    store(index, parent)
    slot = index.transact(lambda txn: txn.reserve(child, NOW))
    assert isinstance(slot, SlotReservation)
    index.transact(lambda txn: txn.purged.apply(parent.name[:SCOPED_BYTES], mark_below(4)))
    assert index.transact(lambda txn: txn.find(parent.name)) is not None
    assert index.transact(lambda txn: txn.publish(slot, child, NOW)) is Stored.REFUSED
    assert index.transact(lambda txn: txn.reserve(child, NOW)) is Stored.REFUSED
    store(index, block_of(0, position=5))
    store(index, child)


async def test_no_slot_is_taken_ahead_below_a_purged_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_write_is_one_of_a_stream(monkeypatch)
    async with opened(tmp_path / "g3", 40) as tier:
        scope, clock = scope_of_key(CHAIN[0]), tier._clock
        assert isinstance(clock, VirtualClock)
        assert await put(tier, CHAIN, [0, 1], parents=True) == [Stored.STORED] * 2
        clock.advance(10.0)
        tier._store.index.purges.record(NAMESPACE.digest + tenant_of(scope), clock.wall())
        clock.advance(10.0)
        assert tier._store.reserved._held, "the control: a slot is held"
        with monkeypatch.context() as patch:
            patch.setattr(removals.Removals, "due_jobs", lambda _self, _index: [])
            assert await put(tier, CHAIN, [2], parents=True) == [Stored.REFUSED]
            assert await put(tier, CHAIN, [0, 1, 2], parents=True) == [Stored.STORED] * 3
        assert await get(tier, CHAIN[:3]) == [True] * 3


def test_a_block_of_another_length_takes_the_place_of_the_old_one(index: Index) -> None:
    store(index, block_of(0))
    other = block_of(0, length=2 * BLOCK)
    assert isinstance(index.transact(lambda txn: txn.reserve(other, NOW)), SlotReservation)
    assert index.transact(lambda txn: txn.find(other.name)) is None


def test_a_living_owner_keeps_its_reservation_and_a_dead_one_s_is_taken_back(index: Index) -> None:
    slots = index.transact(lambda txn: txn.reserve_slots(1, 2))
    here, index.owner = index.owner, replace(index.owner, pid=1, started=0)  # pid 1 lives, but started at another time
    index.transact(lambda txn: txn.reserve_slots(1, 1))
    index.owner = here
    assert index.transact(WriteTxn.reclaim) == 1
    assert index.transact(lambda txn: txn.reservations.all()) == slots


def test_a_spent_budget_reserves_nothing(index: Index) -> None:
    per_day = 24.0 * 64 * 1024
    budget = {"per_day": per_day, "now_s": 1000.0}
    index.transact(lambda txn: txn.budget.charge(int(per_day)), **budget)
    assert index.transact(lambda txn: txn.reserve(block_of(0), NOW), **budget) is Stored.BUDGET
    assert index.transact(lambda txn: txn.reserve_slots(1, 1), **budget) == []
    assert isinstance(index.transact(lambda txn: txn.reserve(block_of(0), NOW)), SlotReservation), "without a bound"


def test_what_was_retained_ends_with_the_block(index: Index) -> None:
    block = block_of(0)
    store(index, block)
    assert index.transact(lambda txn: txn.retain([block.name], Wall(NOW + 60), None, NOW)) == [True]
    index.transact(lambda txn: txn.drop(block.name))
    assert not index.retained(NAMESPACE.digest)
    store(index, block)
    assert not index.transact(lambda txn: txn.must_stay(block.name, NOW))


def test_a_block_that_was_just_published_leaves_for_no_slot_of_a_later_write(index: Index) -> None:
    """Its rank is its parent's, which may be the oldest."""
    for depth in range(SLOTS):
        store(index, block_of(depth))
    assert index.transact(lambda txn: txn.drop(block_of(SLOTS - 1).name))
    last = block_of(SLOTS - 1)
    slot = index.transact(lambda txn: txn.reserve(last, NOW))
    assert isinstance(slot, SlotReservation)
    found = index.transact(lambda txn: (txn.publish(slot, last, NOW), txn.reserve_slots(1, 1)))
    assert found == (Stored.STORED, [])
    assert index.transact(lambda txn: txn.find(last.name)) is not None
