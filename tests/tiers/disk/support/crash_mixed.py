"""As `crash`, with all that a store does: two sizes of blocks that take space from one another, retained blocks in the
way, purges, bad places and their trials, a store that is opened anew, a budget, neighbours that go on.

    python -m tests.tiers.disk.support.crash_mixed DIRECTORY CYCLES SEED [WORKERS [ENCRYPTED [SHRINKS]]]

A worker kills itself at one of all the points that it passes: before or after a write, half of a write, a sync, a
commit, a purge's record, a trial. In every third cycle other workers use the store meanwhile, WORKERS (2) in all. With
ENCRYPTED half of the workers encrypt, by keys in a directory beside the store. With SHRINKS the capacity is another one
in half of the cycles, and an inspector waits until the store is as small in every other one only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy  # noqa: F401  (before the forks, so that no worker has to)

from kvtier.errors import TierError
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.data_keys import StoredKeys
from kvtier.tiers.disk import gifts, recovery, shrink
from kvtier.tiers.disk.bad_places import bad_places
from kvtier.tiers.disk.guests import Guests, Held
from kvtier.tiers.disk.records import is_encrypted
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.key_directory import KeyDirectory
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall
from tests.tiers.disk.support.bad_medium import BadMedium
from tests.tiers.disk.support.crash import fork, plant
from tests.tiers.disk.support.keys import sample_keyring
from tests.tiers.disk.support.store import get, opened, put, shrunk, slabs

SIZES = (4096, 32768)
PAGES, SEGMENTS = 32, 16
"""Of a segment, of the store: it is cut into no more."""
SEGMENT = PAGES * SIZES[0]
CAPACITY = SEGMENTS * SEGMENT
SHARES = 1.0, 1.0, 0.4, 0.63
"""Of CAPACITY that a store has, where it changes; the last one cuts a segment in two."""
FAR = Wall(3_000_000_000.0)
KEPT_MAX = 8
"""Chains of small blocks that are retained, by each of two workers; further ones retain none."""
WORKERS_MAX = 10
CHAINS_MAX = 64
"""Of a worker."""

_REPORT = struct.Struct("<BH")
TRIED, DURABLE, GOING, PURGED, KEPT, LODGED = range(6)
"""Of a chain: a put began; it is durable; it may go from now on; it is gone; it is durable and retained. LODGED is of
none: something became a guest."""


class Chain(NamedTuple):
    """By the worker that uses it, its size (an index of SIZES) and its number."""

    worker: int
    size: int
    number: int

    @property
    def scope(self) -> Scope:
        return Scope(bytes([self.worker + 1]) * SCOPE_BYTES)

    def keys(self) -> list[BlockKey]:
        namespace = sample_namespace(SIZES[self.size])
        return list(chain_of(namespace, (8, 2)[self.size], self.number, self.scope))


CHAINS = [
    Chain(worker, size, number) for worker in range(WORKERS_MAX) for size in (0, 1) for number in range(CHAINS_MAX // 2)
]


def medium(seed: int) -> BadMedium:
    """Sound, or with one bad page: the same in all cycles of a run."""
    found, rng = BadMedium(), random.Random(seed)
    page = (f"{rng.randrange(SEGMENTS):08x}.slab", rng.randrange(PAGES))
    found.unwritable, found.unreadable = {0: (set(), set()), 1: ({page}, set()), 2: (set(), {page})}[seed % 3]
    return found


@asynccontextmanager
async def both(
    path: Path, clock: VirtualClock, calls: BadMedium, capacity: int, *, encrypts: bool = False
) -> AsyncIterator[list[DiskTier]]:
    recovery.SEGMENT_BYTES_SMALL, shrink.EVICTIONS_PER_TXN = SEGMENT, 4
    gifts.PRICE = 0.02  # space moves often, whatever price is best: moves, and the guests they leave, are at stake
    async with AsyncExitStack() as stack:
        keys = StoredKeys(KeyDirectory(path.with_name("keys")), sample_keyring(), clock) if encrypts else None
        tiers = [
            opened(path, capacity // size, block_bytes=size, clock=clock, calls=calls, keys=keys) for size in SIZES
        ]
        yield [await stack.enter_async_context(tier) for tier in tiers]


async def work(
    path: Path, worker: int, cycle: int, seed: int, capacity: int, report: int, steps: int, *, encrypted: bool = False
) -> None:
    """Use the store until killed; say what is durable when it is, and what may go before it does."""
    rng, clock = random.Random(f"{seed} {cycle} {worker}"), VirtualClock(1_800_000_000.0 + cycle)
    mine = [chain for chain in CHAINS if chain.worker == worker]

    def say(verb: int, chain: Chain) -> None:
        os.write(report, _REPORT.pack(verb, CHAINS.index(chain)))

    lodge = Guests.add

    def lodge_and_say(guests: Guests, held: Held) -> None:
        lodge(guests, held)
        say(LODGED, mine[0])

    Guests.add = lodge_and_say  # type: ignore[method-assign]

    async def one(tiers: list[DiskTier], chain: Chain) -> None:
        tier, keys, dice = tiers[chain.size], chain.keys(), rng.random()
        if dice < 0.7:
            say(TRIED, chain)
            if all(one.durable for one in await put(tier, keys, parents=True)):
                keep = worker < 2 and chain.size == 0 and chain.number < KEPT_MAX
                if keep and all(await tier.retain(keys, FAR)):
                    say(KEPT, chain)
                else:
                    say(DURABLE, chain)
        elif dice < 0.85:
            assert Miss.CORRUPT not in await get(tier, keys) or seed % 3 == 2, "a block was damaged"
        elif dice < 0.93:
            tier.touch(keys, clock.wall())
        elif dice < 0.97:
            say(GOING, chain)
            await tier.release_retained(keys)
            await tier.evict(keys)
        elif dice < 0.98:
            gone = [one for one in mine if one.size == chain.size]
            for other in gone:
                say(GOING, other)
            await tier.purge(chain.scope, clock.wall())
            for other in gone:
                say(PURGED, other)
            clock.advance(0.01)
        elif dice < 0.985:
            tier._store.quarantine("to see it opened anew", damaged=rng.random() < 0.5)
            await asyncio.sleep(1.2)
        else:
            await tier.flush(clock.monotonic() + 10)

    async with both(path, clock, medium(seed), capacity, encrypts=encrypted and rng.random() < 0.5) as tiers:
        tiers[0]._store.limit_writes(None, 1e15, clock.monotonic)
        for _ in range(steps):
            with contextlib.suppress(TierError):  # it is being opened anew
                await one(tiers, rng.choice(mine))
        for _ in range(200):
            if tiers[0]._store.index_in_use is not None:
                break
            await asyncio.sleep(0.05)


class Known:
    """What must be so, by what was reported. Of a cycle's end only the last stores must have survived."""

    def __init__(self) -> None:
        self.kept: set[Chain] = set()
        self.purged: set[Chain] = set()
        self.lodged = 0

    def learn(self, reports: bytes, *, keeps: bool) -> None:
        """`keeps`: whether what is retained stays: not where the store shrinks."""
        self.kept = self.kept if keeps else set()
        for verb, number in _REPORT.iter_unpack(reports[: len(reports) // _REPORT.size * _REPORT.size]):
            chain = CHAINS[number]
            if verb in (TRIED, DURABLE):
                self.purged.discard(chain)
            elif verb == GOING:
                self.kept.discard(chain)
            elif verb == PURGED:
                self.purged.add(chain)
            elif verb == LODGED:
                self.lodged += 1
            elif keeps:
                self.kept.add(chain)


def capacity_in(cycle: int, seed: int, *, shrinks: bool) -> int:
    """The capacity of a cycle: another one in half of them, if it changes."""
    share = random.Random(f"{seed} {cycle // 2}").choice(SHARES) if shrinks else 1.0
    return int(CAPACITY * share) // SIZES[1] * SIZES[1]


async def inspect(
    path: Path, cycle: int, seed: int, capacity: int, known: Known, workers: int = 2, *, encrypted: bool = False
) -> dict[str, int]:
    """Raise AssertionError unless the store is whole and has what it must have. Returns what was seen in it."""
    calls = medium(seed)
    async with both(path, VirtualClock(1_800_000_000.5 + cycle), calls, capacity, encrypts=encrypted) as tiers:
        store = tiers[0]._store
        began = store.index.reach() != store.geometry
        tiers[0].check()
        if cycle % 4 != 2:
            await shrunk(tiers[0])
        with store.index.reading() as txn:
            seen = {"places": len(bad_places(txn)), "shrunk": began}
        reach = store.index.reach()
        seen["shrinks"] = reach != store.geometry
        assert not store.index.has_dead_owners(), "a dead owner's slots were not taken back"
        for chain in CHAINS[: workers * CHAINS_MAX]:
            found = await get(tiers[chain.size], chain.keys())
            allowed = {True, Miss.ABSENT, Miss.PURGED, *([Miss.CORRUPT] if calls.unreadable else [])}
            assert set(found) <= allowed, f"{chain}: {found}"
            if chain in known.purged:
                assert True not in found, f"{chain} was purged, now {found}"
            if chain in known.kept and not calls.unreadable:
                assert set(found) == {True}, f"{chain} was retained, now {found}"
            seen["blocks"] = seen.get("blocks", 0) + found.count(True)
        with store.index.reading() as txn:
            seen["encrypted"] = sum(is_encrypted(raw) for _, raw in store.index.layout.entries(txn))
        assert not list(path.glob("index.damaged*")), "the index had to be made anew"
    files = slabs(path)
    assert len(files) <= reach.segments and sum(file.stat().st_size for file in files) <= reach.capacity
    assert reach.capacity == capacity or seen["shrinks"]
    return seen


def _read_all(reader: int) -> bytes:
    said = b""
    while chunk := os.read(reader, 1 << 16):
        said += chunk
    os.close(reader)
    return said


def main(path: Path, cycles: int, seed: int, workers: int = 2, encrypted: int = 0, shrinks: int = 0) -> int:
    rng, known, total = random.Random(seed), Known(), Counter[str]()
    reach = CAPACITY
    for cycle in range(cycles):
        capacity = capacity_in(cycle, seed, shrinks=bool(shrinks))
        keeps = capacity >= reach
        hit, readers, pids = rng.randrange(1, 1200 if keeps else 100), [], []
        for worker in range(workers if cycle % 3 == 2 else 1):
            reader, writer = os.pipe()

            def run(
                worker: int = worker, writer: int = writer, hit: int = hit, cycle: int = cycle, capacity: int = capacity
            ) -> None:
                if worker == 0:
                    plant("any", hit)
                steps = 200 if worker == 0 else 60
                asyncio.run(work(path, worker, cycle, seed, capacity, writer, steps, encrypted=bool(encrypted)))

            pids.append(fork(run))
            os.close(writer)
            readers.append(reader)
        for pid, reader in zip(pids, readers, strict=True):
            said = _read_all(reader)
            _, status = os.waitpid(pid, 0)
            total["killed"] += os.WIFSIGNALED(status)
            if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
                print(f"cycle {cycle}, seed {seed}: a worker failed by itself", file=sys.stderr)
                return 1
            known.learn(said, keeps=keeps)
        reader, writer = os.pipe()

        def look(writer: int = writer, cycle: int = cycle, capacity: int = capacity) -> None:
            seen = asyncio.run(inspect(path, cycle, seed, capacity, known, workers, encrypted=bool(encrypted)))
            os.write(writer, json.dumps(seen).encode())

        pid = fork(look)
        os.close(writer)
        said = _read_all(reader)
        _, status = os.waitpid(pid, 0)
        if status:
            print(f"cycle {cycle}, killed at point {hit}, seed {seed}: see above", file=sys.stderr)
            return 1
        seen = json.loads(said)
        reach = CAPACITY if seen["shrinks"] else capacity
        total.update(seen)
        total["kept"] += len(known.kept)
    print(json.dumps({"cycles": cycles, "guests": known.lodged, **total}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
