"""Fleets of replicas on one bucket, in virtual time by the real code of G4 (`kvtier.testing.fleet`).

    python benchmarks/fleet.py [--fleets 1:3600,10:3600,100:3600,1000:3600] [--sweep UNITS]
        [--sweepers 1,10] [--save DIR]

`--fleets` has the replicas and the virtual seconds of each fleet. Every replica writes a unit a minute and has its turn
every ten seconds. Then a new replica opens beside it. Results are told after an eighth, a quarter and half of the time,
too. Per fleet:

    requests_per_minute       of a replica in the second half, but for those that carry payload: mean and most
    by_verb                   the mean by kind of request
    deltas_max                in the bucket at the end of any turn
    known_after_60_s          share of the units of an hour before it opened, and of its first minute, that the new
                              replica has in its index at the end of that minute
    oldest_unknown_s          the age of the oldest that it has not
    new_replica_requests      in that minute

`--sweep`: so many dead units of 16 blocks lie in the bucket, and replicas that know none of them delete them.
`index_bytes` are those of a replica's memory per unit that it knows, once it knows as many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from hashlib import shake_128
from itertools import islice
from pathlib import Path
from typing import Any

from kvtier.bench.record import record, save
from kvtier.checksum import DIGEST_BYTES
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SCOPE_BYTES, SHARED, BlockKey
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing.fleet import STEP_S, Fleet
from kvtier.testing.replica import NS, Replica
from kvtier.testing.virtual_bucket import StoredObject, VirtualServer
from kvtier.tiers.objects import catalogue, deltas
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.delta_format import parse
from kvtier.tiers.objects.frame import Frame, header_bytes_of
from kvtier.tiers.objects.hints import UnitHint, UnitHints, prints_of
from kvtier.tiers.objects.index import ObjectIndex
from kvtier.times import Wall

NAME = "fleet"
EVERY_S = 60.0
"""Between two units of one replica."""
KNOWN_S = 3600.0
BLOCKS = 16
SWEEP_HOURS_MAX = 48.0


@lru_cache(maxsize=4096)
def _parsed(raw: bytes, namespace: bytes, keyring: Keyring) -> list[UnitHint]:
    """Each delta is parsed once, and not by each of a thousand replicas: it is the most of their work."""
    return list(parse(raw, namespace, keyring))


class _Pages:
    """Pages of listings, each made once until the bucket changes: a thousand replicas ask for the same."""

    def __init__(self, server: VirtualServer) -> None:
        self._server, self._state, self._pages = server, (0, 0), dict[tuple[str, str], list[Stat]]()

    def page(self, make: Callable[[str, str], list[Stat]], prefix: str, after: str) -> list[Stat]:
        state = self._server.versions, len(self._server.objects)
        if state != self._state:
            self._state, self._pages = state, {}
        found = self._pages.get((prefix, after))
        if found is None:
            found = self._pages[prefix, after] = make(prefix, after)
        return found


class _Shelf:
    """The hints of all units, each once, with a number."""

    def __init__(self) -> None:
        self.hints: list[UnitHint] = []
        self.numbers: dict[bytes, int] = {}  # by the hash of the block
        self._names: dict[int, int] = {}  # by the fingerprint of the name

    def number(self, hint: UnitHint) -> int:
        number = self.numbers.get(hint.last_hash)
        if number is None:
            number = self.numbers[hint.last_hash] = len(self.hints)
            self.hints.append(hint)
        return number

    def named(self, fingerprint: int, name: Callable[[BlockKey], int]) -> int:
        """-1: there is none."""
        for number in range(len(self._names), len(self.hints)):
            self._names[name(self.hints[number].last)] = number
        return self._names.get(fingerprint, -1)


class _Known(UnitHints):
    """One replica's hints, which are on the fleet's shelf: here is only whether the replica has each. Of its own a
    thousand replicas would have 18 GB after an hour. For units of one block, whose hints are the same to all."""

    def __init__(self, shelf: _Shelf, fingerprint: Callable[[BlockKey], int]) -> None:
        self._shelf, self._has = shelf, bytearray()
        super().__init__(1, fingerprint)

    def learn(self, hint: UnitHint) -> bool:
        """`ObjectIndex.learn`."""
        number = self._shelf.number(hint)
        if number >= len(self._has):
            self._has.extend(bytes(1024 + number - len(self._has)))
        elif self._has[number]:
            return False
        self._has[number] = 1
        self._count(hint, 1)
        return True

    def put(self, hint: UnitHint) -> None:
        self.learn(hint)

    def _if_known(self, number: int) -> UnitHint | None:
        return self._shelf.hints[number] if 0 <= number < len(self._has) and self._has[number] else None

    def find(self, first: BlockKey, key: BlockKey, depth: int, but: Container[BlockKey] = ()) -> UnitHint | None:
        hint = self._if_known(self._shelf.numbers.get(key[SCOPE_BYTES:], -1))
        return hint if hint is not None and hint.holds(key, depth) and key not in but else None

    def knows(self, last: BlockKey) -> bool:
        return self.find(last, last, 0) is not None

    def named(self, fingerprint: int) -> UnitHint | None:
        return self._if_known(self._shelf.named(fingerprint, self._fingerprint))

    def drop(self, last: BlockKey) -> None:
        hint = self.find(last, last, 0)
        if hint is not None:
            self._has[self._shelf.numbers[hint.last_hash]] = 0
            self._count(hint, -1)

    def sample(self, rng: random.Random) -> UnitHint | None:
        number = self._has.find(1, rng.randrange(len(self._has) or 1))
        return self._if_known(self._has.find(1) if number < 0 else number)


def _share(fleet: Fleet) -> None:
    """What all replicas compute alike is computed once."""
    deltas.parse = _parsed
    for module, name in (
        (deltas, "stamp_us"),
        (catalogue, "stamp_us"),
        (catalogue, "window_of"),
        (catalogue, "writer_of"),
    ):
        if not hasattr(getattr(module, name), "cache_info"):
            setattr(module, name, lru_cache(maxsize=1 << 17)(getattr(module, name)))
    shelf, pages = _Shelf(), _Pages(fleet.server)
    for replica in fleet.replicas:
        index, make = replica.store.index, replica.bucket._page
        index._hints = known = _Known(shelf, replica.store.names.fingerprint)
        index.learn = known.learn  # type: ignore[method-assign]
        replica.bucket._page = partial(pages.page, make)  # type: ignore[method-assign]


async def of_fleet(count: int, seconds: float) -> AsyncIterator[dict[str, Any]]:
    """What is found after an eighth, a quarter, half and all of the time: the last may take hours."""
    began = time.process_time()
    fleet = Fleet(count, EVERY_S)
    _share(fleet)
    await fleet.run(seconds / 16)
    for part in (8, 4, 2, 1):
        before, verbs, started = fleet.requests(), _verbs(fleet), fleet.server.clock.monotonic()
        written = len(fleet.written)
        await fleet.run(seconds / part / 2)
        minutes = (fleet.server.clock.monotonic() - started) / 60
        spent = [(after - then) / minutes for after, then in zip(fleet.requests(), before, strict=True)]
        by_verb = _verbs(fleet)
        by_verb.subtract(verbs)
        by_verb["put"] -= len(fleet.written) - written
        yield {
            "virtual_s": seconds / part,
            "units": len(fleet.written),
            "requests_per_minute": {"mean": round(sum(spent) / count, 2), "most": round(max(spent), 2)},
            "by_verb": {verb: round(asked / count / minutes, 2) for verb, asked in sorted(by_verb.items()) if asked},
            "deltas_max": fleet.deltas_max,
            **await _newcomer(fleet),
            "cpu_s": round(time.process_time() - began),
        }


async def _newcomer(fleet: Fleet) -> dict[str, Any]:
    """Opens beside the fleet, for a minute."""
    opened, new = fleet.server.clock.wall(), fleet.newcomer()
    for _ in range(round(60 / STEP_S)):
        await new.turn()
        await fleet.step()
    await new.turn()
    return {
        "known_after_60_s": round(fleet.known(new, opened - KNOWN_S), 4),
        "oldest_unknown_s": round(max(_unknown_ages(fleet, new, opened - KNOWN_S), default=0.0)),
        "new_replica_requests": dict(sorted(new.bucket.requests.items())),
    }


def _unknown_ages(fleet: Fleet, replica: Replica, since: float) -> list[float]:
    now = fleet.server.clock.wall()
    units = ((now - at, first, last) for at, first, last in fleet.written if at >= since)
    return [age for age, first, last in units if replica.store.known(first, last, 0) is None]


def _verbs(fleet: Fleet) -> Counter[str]:
    return sum((replica.bucket.requests for replica in fleet.replicas), Counter[str]())


class Unit(StoredObject):
    """The object of a unit of which only the header is ever read, made anew each time: a million would take 4 GiB."""

    def __init__(self, number: int, life: Lifetime) -> None:
        self.number, self.etag, self.used, self.modified = number, f'"{number}"', life.last_use, life.born
        self.listed, self._life = None, life

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return frame_of(self.number, self._life).encode(Keyring.public())

    @property
    def size(self) -> int:
        return header_bytes_of(BLOCKS) + BLOCKS * NS.block_bytes


def frame_of(number: int, life: Lifetime) -> Frame:
    """The header of unit `number`. Pure."""
    raw = shake_128(number.to_bytes(8)).digest(HASH_BYTES * BLOCKS)
    hashes = tuple(raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES))
    return Frame(NS.digest, SHARED, 0, NS.block_bytes, hashes, (bytes(DIGEST_BYTES),) * BLOCKS, life)


async def of_sweep(units: int, sweepers: int) -> dict[str, Any]:
    """Replicas that open on a bucket of dead units: virtual hours until all are gone, and requests for it."""
    began, server = time.process_time(), VirtualServer()
    replicas = [Replica(server, seed, stride=BLOCKS, number=seed) for seed in range(sweepers)]
    life, names = Lifetime.of(Terms("t", ttl=300.0), server.clock.wall()), replicas[0].store.names
    frames = ((number, frame_of(number, life)) for number in range(units))
    server.fill({names.unit(frame.keys[-1]): Unit(number, life) for number, frame in frames})
    server.clock.advance(3600.0)
    opened = server.clock.monotonic()
    while any(names.is_unit(name) for name in islice(server.objects, 1000)):
        for replica in replicas:
            await replica.turn()
        server.clock.advance(STEP_S)
        if server.clock.monotonic() - opened > SWEEP_HOURS_MAX * 3600:
            break
    hours = (server.clock.monotonic() - opened) / 3600
    asked = [replica.bucket.requests.total() for replica in replicas]
    return {
        "units": units,
        "virtual_hours": round(hours, 2),
        "left": sum(names.is_unit(name) for name in server.objects),
        "requests_per_replica_and_minute": round(sum(asked) / sweepers / (hours * 60), 1),
        "cpu_s": round(time.process_time() - began),
    }


def index_bytes(units: int) -> float:
    """Of resident memory per unit in the index of one replica. Run in a process of its own."""
    index = ObjectIndex(BLOCKS, Replica(VirtualServer(), stride=BLOCKS).store.names.fingerprint)
    life = Lifetime.of(BUILTIN["24h"], Wall(1e9))
    before = _resident()
    for number in range(units):
        hashes = frame_of(number, life).hashes
        index.learn(UnitHint(SHARED, 0, hashes[-1], prints_of(hashes), life, 0, 1 << 20))
    return round((_resident() - before) / units, 1)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def _tell(
    found: AsyncIterator[dict[str, Any]], count: str, fleets: dict[str, Any], told: Callable[[], None]
) -> None:
    async for fleets[count] in found:
        told()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", default="1:3600,10:3600,100:3600,1000:3600")
    parser.add_argument("--sweep", type=int, default=1_000_000)
    parser.add_argument("--sweepers", default="1,10", help="how many replicas sweep, in a run of each number")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {"unit_every_s": EVERY_S, "fleets": {}, "sweeps": {}}

    def told() -> None:
        print(json.dumps(results, indent=2), flush=True)
        if given.save:
            save(record(NAME, ["python", *sys.argv], results), given.save)

    if given.sweep:
        with ProcessPoolExecutor(1) as apart:
            results["index_bytes_per_unit"] = apart.submit(index_bytes, given.sweep).result()
        for sweepers in given.sweepers.split(","):
            results["sweeps"][sweepers] = asyncio.run(of_sweep(given.sweep, int(sweepers)))
            told()
    for fleet in filter(None, given.fleets.split(",")):
        count, seconds = fleet.split(":")
        asyncio.run(_tell(of_fleet(int(count), float(seconds)), count, results["fleets"], told))


if __name__ == "__main__":
    main()
