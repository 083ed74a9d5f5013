"""The queues below G2 under plain load: workers that live, forks that are stored, tiers that are full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvtier.clock import Clock, SystemClock
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, scope_of, scope_of_key
from kvtier.manager.hierarchy import ManagerLimits
from kvtier.manager.manager import Manager
from kvtier.manager.write_behind import ChainBatch
from kvtier.policies.policy import make_policy
from kvtier.retention.terms import BUILTIN, Depth
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payload_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.objects.writer import ObjectWriter
from kvtier.tiers.protocol import Miss, Sealed, Stored, Tier
from kvtier.times import Mono
from tests.manager.support.steps import StepLock, TurnSteps
from tests.support.waiting import until

BLOCK = 4096
NS = sample_namespace(BLOCK)


@asynccontextmanager
async def managed(
    slots: int, lower: Sequence[Tier], clock: Clock, *, write_rate: float = 0.0, lock: StepLock | None = None
) -> AsyncIterator[Manager]:
    host = HostTier(Arena(BLOCK, 1, slots * BLOCK), make_policy("lru", slots))
    limits = ManagerLimits(queue_fraction=1.0, close_s=5.0, write_rate=write_rate)
    manager = Manager(host, lower, clock, limits, lock=cast("Any", lock))
    await manager.start()
    try:
        yield manager
    finally:
        await manager.close()


def store(manager: Manager, chain: Sequence[BlockKey], start: int = 0) -> list[int]:
    """Store what there is room for; returns the depths that no queue accepted."""
    slots, _ = manager.reserve(chain, start, len(chain), BUILTIN["24h"])
    for slot in slots:
        slot.pieces[0][:] = payload_of(slot.key or b"", BLOCK)
    return manager.commit(chain, slots, [slot.generation for slot in slots])


async def test_a_batch_s_slots_may_be_another_chain_s_once_they_are_unpinned() -> None:
    """All slots of a batch are given to a chain at another depth before the tier's answer is dealt with."""
    clock = SystemClock()
    lower = [MemoryTier(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)]
    chain = chain_of(NS, 4)
    async with managed(4, lower, clock) as manager:
        unpin = manager.hierarchy.unpin

        def unpin_and_reuse(holds: Sequence[Hold]) -> None:
            unpin(holds)
            for slot, _ in holds:
                if slot.key in chain and not slot.pins:
                    with manager.lock:
                        manager.host.drop(slot.key)
                        slot.index = 60  # as the slot's next tenant would have it

        manager.hierarchy.unpin = unpin_and_reuse  # type: ignore[method-assign]
        assert store(manager, chain) == []
        flushed = await manager.flush(clock.monotonic() + 5)
        manager.hierarchy.unpin = unpin  # type: ignore[method-assign]
        assert flushed.durable["g3"] == 4 and flushed.pending == 0
        assert store(manager, chain_of(NS, 4, seed=2)) == []
        flushed = await manager.flush(clock.monotonic() + 5)
        assert flushed.durable["g3"] == 8 and flushed.durable["g4"] >= 4 and flushed.pending == 0, "the workers live"


class Held(MemoryTier):
    """Writes wait until `go`; `tried` counts the blocks, `writes` has those of each write."""

    def __init__(self, clock: Clock, answer: Stored | None = None) -> None:
        super().__init__(NS, clock)
        self.go = asyncio.Event()
        self.tried = 0
        self.writes: list[list[BlockKey]] = []
        self._answer = answer

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        self.tried += len(blocks)
        self.writes.append([block.key for block in blocks])
        if self._answer is not None:
            return [self._answer] * len(blocks)
        await self.go.wait()
        return await super().write(blocks, deadline)


async def test_forks_of_a_prompt_whose_blocks_are_being_written_are_stored() -> None:
    """Each fork leaves the prompt in the midst of a batch that another worker is writing."""
    clock = SystemClock()
    tier = Held(clock)
    prompt = chain_of(NS, 8, seed=1)
    forks = [[*prompt[:depth], *chain_of(NS, 8, seed=depth)[depth:]] for depth in range(1, 8)]
    async with managed(128, [tier], clock) as manager:
        assert store(manager, prompt) == []
        for fork in forks:
            assert store(manager, fork) == []
        await asyncio.sleep(0.05)
        tier.go.set()
        flushed = await manager.flush(clock.monotonic() + 10)
        refused = manager.demoter.queues["g3"].refused
        assert not refused["orphan"] and flushed.dropped == 0
        for chain in (prompt, *forks):
            assert tier.peek(chain, range(8)) == [None] * 8


async def test_what_waits_one_behind_the_other_is_one_write() -> None:
    """Sixteen prompts of one block, and one that grows by a block ten times, while both writers wait for the tier."""
    clock = SystemClock()
    tier = Held(clock)
    growing = chain_of(NS, 10, seed=100)
    async with managed(128, [tier], clock) as manager:
        for seed in range(16):
            assert store(manager, chain_of(NS, 1, seed)) == []
            await asyncio.sleep(0)
        for length in range(1, 11):
            assert store(manager, growing[:length], length - 1) == []
        await asyncio.sleep(0.05)
        tier.go.set()
        flushed = await manager.flush(clock.monotonic() + 10)
        assert (flushed.durable["g3"], flushed.dropped, flushed.pending) == (26, 0, 0)
        assert len(tier.writes) <= 4 and [key for write in tier.writes for key in write if key in growing] == growing
        assert tier.peek(growing, range(10)) == [None] * 10


async def test_no_hold_and_no_turn_grows_with_what_waits() -> None:
    """While engines decode many batches of a block wait: each is looked at, and answered for."""

    async def longest(prompts: int) -> Counter[str]:
        clock, lock = SystemClock(), StepLock()
        tier = Held(clock)
        async with managed(512, [tier], clock, lock=lock) as manager:
            for seed in range(prompts):
                assert store(manager, chain_of(NS, 1, seed)) == []
            lock.most.clear()
            with TurnSteps() as turns:
                tier.go.set()
                assert await manager.demoter.queues["g3"].drained(clock.monotonic() + 30)
            return turns.most | lock.most

    few, many = await longest(64), await longest(256)
    grown = {where: (few[where], steps) for where, steps in many.items() if steps > 1.5 * few[where] + 80}
    assert not grown


async def test_a_write_has_blocks_of_one_scope_and_none_twice() -> None:
    """A data key that is missing fails a whole write, and so it fails one tenant's."""
    clock = SystemClock()
    tier = Held(clock)
    one, two = scope_of("one"), scope_of("two")
    async with managed(128, [tier], clock) as manager:
        queue = manager.demoter.queues["g3"]
        chains = [chain_of(NS, 2, seed, scope) for seed, scope in enumerate((one, one, one, one, two, two, one))]
        for chain in chains:
            assert store(manager, chain) == []
        again = chains[-1]
        for _ in range(2):
            with manager.lock:
                slots = [manager.host.pin(key, clock.wall()) for key in again]
                assert queue.enqueue(ChainBatch.of(again, [slot for slot in slots if slot is not None])) == 2
        await asyncio.sleep(0.05)
        tier.go.set()
        assert await queue.drained(clock.monotonic() + 10)
        for write in tier.writes:
            assert len({scope_of_key(key) for key in write}) == 1 and len(set(write)) == len(write)
        assert sum(again[0] in write for write in tier.writes) == 3
        assert all(tier.peek(chain, range(2)) == [None] * 2 for chain in chains)


async def test_no_object_is_stored_whose_parent_could_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one block: G4 sends those of a write side by side."""
    clock = SystemClock()
    tier = ObjectTier(f"file://{tmp_path}", NS, clock=clock, stride=1)
    chain = chain_of(NS, 6)
    send, go = ObjectWriter._send, asyncio.Event()

    async def sent(writer: ObjectWriter, keys: Sequence[BlockKey], *rest: Any) -> Stat | None:
        if keys[-1] == chain[1]:
            raise TierError("g4", "write", "the server is out of order")
        return await send(writer, keys, *rest)

    monkeypatch.setattr(ObjectWriter, "_send", sent)
    async with managed(64, [tier], clock) as manager:
        queue = manager.demoter.queues["g4"]
        write = queue.tier.write

        async def held(blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
            await go.wait()
            return await write(blocks, deadline)

        monkeypatch.setattr(queue.tier, "write", held)
        for length in range(1, 7):
            assert store(manager, chain[:length], length - 1) == []
        await asyncio.sleep(0.05)
        go.set()
        assert await queue.drained(clock.monotonic() + 10)
        assert [miss is None for miss in tier.peek(chain, range(6))] == [True] + [False] * 5
        assert queue.refused["orphan"] == 4


async def test_a_batch_whose_parent_is_refused_in_the_same_write_is_refused() -> None:
    clock = SystemClock()
    tier = Held(clock)
    first, second, chain = chain_of(NS, 2, 1), chain_of(NS, 2, 2), chain_of(NS, 4, 3)
    async with managed(64, [tier], clock) as manager:
        queue = manager.demoter.queues["g3"]
        position = queue._position
        queue._position = lambda batch: None if batch.depths == (1, 2) else position(batch)
        assert store(manager, first) == [] == store(manager, second)
        await asyncio.sleep(0)
        for stop, start in ((1, 0), (3, 1), (4, 3)):
            assert store(manager, chain[:stop], start) == []
        tier.go.set()
        assert await queue.drained(clock.monotonic() + 10)
        assert (queue.refused["purged"], queue.refused["orphan"]) == (2, 1)
        assert [miss is None for miss in tier.peek(chain, range(4))] == [True, False, False, False]


async def test_a_parent_that_is_waited_for_in_vain_costs_only_its_descendants() -> None:
    """The others of the write are looked up with time of their own."""
    clock = SystemClock()

    class Asking(Held):
        async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
            await asyncio.sleep(0.01)
            return await super().lookup(chain, wanted, deadline)

    tier = Asking(clock)
    stuck, other = chain_of(NS, 2, 1), chain_of(NS, 2, 2)
    async with managed(64, [tier], clock) as manager:
        queue = manager.demoter.queues["g3"]
        tier.go.set()
        assert store(manager, other[:1]) == []
        assert await queue.drained(clock.monotonic() + 10)
        tier.go.clear()
        queue._limits = replace(queue._limits, write_deadline_s=0.5)
        assert store(manager, stuck[:1]) == []
        await until(lambda: stuck[:1] in tier.writes)
        assert store(manager, stuck, 1) == [] == store(manager, other, 1)
        await until(lambda: queue.refused["orphan"])
        tier.go.set()
        assert await queue.drained(clock.monotonic() + 10)
        assert tier.peek(stuck, range(2)) == [None, Miss.ABSENT] and queue.refused["orphan"] == 1
        assert tier.peek(other, range(2)) == [None, None]


async def test_short_strides_that_wait_are_a_write_each(tmp_path: Path) -> None:
    """An object has the blocks of one chain."""
    clock = SystemClock()
    async with managed(64, [ObjectTier(f"file://{tmp_path}", NS, clock=clock, stride=4)], clock) as manager:
        chains = [chain_of(NS, 2, seed) for seed in range(6)]
        for chain in chains:
            store(manager, chain)
        flushed = await manager.flush(clock.monotonic() + 10)
        assert (flushed.durable["g4"], flushed.pending) == (12, 0)


async def test_each_batch_of_a_write_is_given_its_own_answers() -> None:
    clock = SystemClock()

    class Choosing(Held):
        async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
            await super().write(blocks, deadline)
            return [Stored.BUDGET if block.key in refused else Stored.STORED for block in blocks]

    tier, chains = Choosing(clock), [chain_of(NS, 2, seed) for seed in range(8)]
    refused = {chains[4][1], chains[5][0], chains[5][1]}
    answers: dict[BlockKey, Stored] = {}
    async with managed(64, [tier], clock) as manager:
        queue = manager.demoter.queues["g3"]
        finished = queue._finished

        def finish(batch: ChainBatch, results: list[Stored]) -> None:
            answers.update(zip(batch.keys, results, strict=True))
            finished(batch, results)

        queue._finished = finish
        for chain in chains:
            assert store(manager, chain) == []
        await asyncio.sleep(0.05)
        tier.go.set()
        assert await queue.drained(clock.monotonic() + 10)
    keys = [key for chain in chains for key in chain]
    assert answers == {key: Stored.BUDGET if key in refused else Stored.STORED for key in keys}
    assert max(map(len, tier.writes)) > 2, "some had several batches"


async def test_every_batch_of_a_write_is_answered_for_though_one_answer_is_an_error() -> None:
    clock = SystemClock()
    tier = Held(clock)
    async with managed(64, [tier], clock) as manager:
        queue = manager.demoter.queues["g3"]
        finished, failing = queue._finished, [chain_of(NS, 1, 5)[0]]

        def finish(batch: ChainBatch, results: list[Stored]) -> None:
            finished(batch, results)
            if batch.last in failing:
                raise ZeroDivisionError

        queue._finished = finish
        for seed in range(12):
            assert store(manager, chain_of(NS, 1, seed)) == []
        tier.go.set()
        assert await queue.drained(clock.monotonic() + 10)
        assert all(not slot.pins for seed in range(12) if (slot := manager.host.index.at(chain_of(NS, 1, seed), 0)))
        assert manager.demoter.durable["g3"] == 12


async def test_a_full_tier_is_offered_each_block_once_in_a_while() -> None:
    """A conversation of 400 turns over a tier that has no room: every block is tried, not every block at every turn."""
    clock = SystemClock()
    tier = Held(clock, Stored.FULL)
    chain = chain_of(NS, 400)
    async with managed(512, [tier], clock) as manager:
        began = clock.monotonic()
        for length in range(1, 401):
            store(manager, chain[:length])
            await asyncio.sleep(0)
        await manager.flush(clock.monotonic() + 10)
        seconds = clock.monotonic() - began
        assert tier.tried <= 400 * (2 + seconds)


async def test_chains_that_grow_are_one_piece_of_work_and_none_is_forgotten() -> None:
    """5,000 chains and a long one that grows block by block reach a tier of strides that is slow."""
    clock = SystemClock()
    lower = [MemoryTier(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)]
    growing = chain_of(NS, 40, seed=0)
    async with managed(8192, lower, clock) as manager:
        coalescer = manager.demoter._coalescer
        assert coalescer is not None
        for length in range(2, 41, 2):
            coalescer.add(growing, length)
        for seed in range(1, 2001):
            coalescer.add(chain_of(NS, 2, seed=seed), 2)
        await asyncio.sleep(0)
        assert coalescer.pending() == 2 * 2001 and not manager.demoter.queues["g4"].refused


async def test_g3_is_written_at_the_configured_rate() -> None:
    """By the injected clock: a second's burst passes at once, the rest as the bucket fills."""
    clock = VirtualClock()
    tier = MemoryTier(NS, clock)
    async with managed(64, [tier], clock, write_rate=4.0 * BLOCK) as manager:
        began = clock.monotonic()
        for seed in range(8):
            assert store(manager, chain_of(NS, 4, seed)) == []
        assert await manager.demoter.queues["g3"].drained(began + 1000)
        took_s = clock.monotonic() - began
    assert took_s == pytest.approx(7.0, abs=0.1), "28 blocks after the burst, 4 a second"


async def test_blocks_that_the_budget_refuses_are_counted_and_the_queue_lives() -> None:
    clock = SystemClock()

    class Spent(MemoryTier):
        async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
            return [Stored.BUDGET] * len(blocks)

    async with managed(16, [Spent(NS, clock)], clock) as manager:
        assert store(manager, chain_of(NS, 4)) == []
        queue = manager.demoter.queues["g3"]
        assert await queue.drained(clock.monotonic() + 5)
        assert queue.refused["budget"] == 4
