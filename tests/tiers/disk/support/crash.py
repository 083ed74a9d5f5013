"""Cycles of: a process works on a store, is killed, another looks at what is left.

    python -m tests.tiers.disk.support.crash DIRECTORY CYCLES SEED [sabotage]

This process forks a worker per cycle, which works until it kills itself at a named point or is killed from
outside, then an inspector, which opens the store and compares it with what the worker reported as durable
through a pipe. Prints one JSON object; exits with 1 at the first thing that is wrong. `sabotage` makes blocks
visible before they are written: the control, which must fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  (before the forks, so that no worker has to)

from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import recovery, write
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.purge_log import PurgeLog
from kvtier.tiers.disk.shrink import Shrink
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slot_health import SlotHealth
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono
from tests.tiers.disk.support.store import BLOCK, get, opened, put, slabs

NAMESPACE = sample_namespace(BLOCK)
CAPACITY = 64
CHAINS = [chain_of(NAMESPACE, 4, seed) for seed in range(24)]
RECENT = 6  # stores whose blocks must have survived: all but the victims of what may have come after
POINTS = (
    "open:begin", "open:end", "transact:begin", "transact:saved", "transact:end", "attach:begin", "attach:end",
    "write:begin", "write:half", "write:end", "sync:begin", "sync:end",
)  # fmt: skip
_REPORT = struct.Struct("<BB")  # verb, chain
DURABLE, EVICTING = 1, 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(point: str, hit: int) -> None:
    """Make this process kill itself at the `hit`-th passing of `point`, or of any if it is "any"."""
    left = [hit]

    def pass_by(name: str) -> None:
        if point in ("any", name):
            left[0] -= 1
            if left[0] == 0:
                die()

    def around(owner: Any, verb: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, verb)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            pass_by(f"{name}:begin")
            result = original(*args, **kwargs)
            pass_by(f"{name}:end")
            return result

        setattr(owner, verb, wrapped)

    around(Index, "transact", "transact")
    around(Slab, "sync", "sync")
    around(Slab, "_attach", "attach")
    around(recovery, "open_index", "open")
    around(recovery, "rejoin", "rejoin")
    around(PurgeLog, "record", "purge")
    around(PurgeLog, "settle", "settle")
    around(SlotHealth, "try_place", "trial")
    around(Shrink, "_cut", "cut")
    save = WriteTxn.save

    def save_then_pass(self: WriteTxn) -> None:
        save(self)
        pass_by("transact:saved")

    WriteTxn.save = save_then_pass  # type: ignore[method-assign]
    write_slab = Slab.write

    def write_in_halves(self: Slab, segment: int, offset: int, pieces: Any) -> None:
        pass_by("write:begin")
        if point in ("any", "write:half"):
            write_slab(self, segment, offset, [pieces[0][: len(pieces[0]) // 2]])
            pass_by("write:half")
        write_slab(self, segment, offset, pieces)
        pass_by("write:end")

    Slab.write = write_in_halves  # type: ignore[method-assign]


def publish_too_early() -> None:
    """The mistake that the order of a write is there to avoid."""
    batch, held = write.WriteBatch, dict[write.WriteBatch, list[int]]()
    jobs, publish = batch.jobs, batch._publish

    def jobs_later(self: write.WriteBatch, places: Sequence[int], deadline: Mono) -> list[Any]:
        held.setdefault(self, list(places))
        self._synced.set_result(dict.fromkeys(slot.segment for slot in self._reserved.values()))
        return []

    async def publish_first(self: write.WriteBatch, deadline: Mono) -> None:
        reserved = dict(self._reserved)
        await publish(self, deadline)
        published, self._reserved = dict(self._results), reserved
        try:
            await self._store.io.write(jobs(self, held.pop(self), deadline)).wait()
        finally:
            self._results, self._reserved = published, {}

    batch.jobs, batch._publish = jobs_later, publish_first  # type: ignore[method-assign]


async def work(path: Path, seed: int, report: int, steps: int = 200) -> None:
    """Store, read, touch and evict until killed; say what is durable when it is, and what may go before it does."""
    rng = random.Random(seed)
    if seed % 2:  # every write counts as one of a stream: it reserves for the next one, too
        write.STREAM_BYTES_MIN, write.STREAM_SHARE = 4 * BLOCK, 8
    async with opened(path, CAPACITY) as tier:

        async def one(mine: list[int]) -> None:
            for _ in range(steps):
                number = rng.choice(mine)
                chain = CHAINS[number]
                dice = rng.random()
                if dice < 0.7:
                    if all(one.durable for one in await put(tier, chain, parents=True)):
                        os.write(report, _REPORT.pack(DURABLE, number))
                elif dice < 0.85:
                    assert Miss.CORRUPT not in await get(tier, chain)
                elif dice < 0.95:
                    os.write(report, _REPORT.pack(EVICTING, number))
                    await tier.evict(chain)
                else:
                    tier.touch(chain, tier._clock.wall())

        await asyncio.gather(one(list(range(0, 24, 2))), one(list(range(1, 24, 2))))


async def inspect(path: Path, durable: list[int]) -> None:
    """Raise AssertionError unless the store is whole and has what it must have."""
    async with opened(path, CAPACITY, clock=VirtualClock()) as tier:
        tier.check()
        assert not tier._store.index.has_reservations(), "a dead owner's slots were not taken back"
        assert tier.usage().blocks <= CAPACITY
        for number, chain in enumerate(CHAINS):
            found = await get(tier, chain)
            assert set(found) <= {True, Miss.ABSENT}, f"chain {number}: {found}"
            if number in durable:
                assert found == [True] * 4, f"chain {number} was durable, now {found}"
            elif True in found:
                length = found.index(Miss.ABSENT) if Miss.ABSENT in found else 4
                assert set(found[length:]) <= {Miss.ABSENT}, f"chain {number} has no head: {found}"
        assert not (path / "index.damaged").exists(), "the index had to be made anew"
    assert sum(file.stat().st_size for file in slabs(path)) <= CAPACITY * BLOCK


def fork(run: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def recent(reports: bytes) -> list[int]:
    """The chains that must be there: reported durable lately and not evicted since."""
    order: list[int] = []
    for verb, number in _REPORT.iter_unpack(reports[: len(reports) // _REPORT.size * _REPORT.size]):
        if number in order:
            order.remove(number)
        if verb == DURABLE:
            order.append(number)
    return order[-RECENT:]


def main(path: Path, cycles: int, seed: int, sabotage: bool) -> int:
    rng = random.Random(seed)
    killed: Counter[str] = Counter()
    reported = 0
    for cycle in range(cycles):
        point = rng.choice(POINTS) if rng.random() < 0.6 else "random"
        hit = 1 if point.startswith(("open", "attach")) else rng.randrange(1, 12)
        reader, writer = os.pipe()

        def worker(point: str = point, hit: int = hit, cycle: int = cycle, writer: int = writer) -> None:
            if sabotage:
                publish_too_early()
            if point != "random":
                plant(point, hit)
            asyncio.run(work(path, seed * 1_000_003 + cycle, writer))

        pid = fork(worker)
        os.close(writer)
        if point == "random":
            time.sleep(rng.uniform(0.0, 0.05))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed[point] += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
            print(f"cycle {cycle}: the worker failed by itself", file=sys.stderr)
            return 1
        reports = b""
        while chunk := os.read(reader, 1 << 16):
            reports += chunk
        os.close(reader)
        durable = recent(reports)
        reported += len(durable)
        pid = fork(lambda durable=durable: asyncio.run(inspect(path, durable)))  # type: ignore[misc]
        _, status = os.waitpid(pid, 0)
        if status:
            print(f"cycle {cycle}, killed at {point} {hit}, seed {seed}: see above", file=sys.stderr)
            return 1
    print(json.dumps({"cycles": cycles, "killed": killed, "durable_checked": reported}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["sabotage"]))
