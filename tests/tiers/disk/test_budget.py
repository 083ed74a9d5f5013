"""A day's writes are bounded for a directory: over restarts, processes and kinds of writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.identity.keys import scope_of
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import budget, store
from kvtier.tiers.disk.budget import DAY_S, Allowance, Balance
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.trials import Trial, begin_trials, drop_unreadable, end_trial
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall
from tests.tiers.disk.support.store import FAR_S, put
from tests.tiers.disk.support.subprocesses import ROOT, environment

MIB = 1 << 20
PER_DAY = 240.0 * MIB
HOUR_S = DAY_S / 24
LARGE = 1 * MIB
NAMESPACE = sample_namespace(LARGE)
BOOT = bytes(16)


def tier_at(path: Path, clock: VirtualClock, per_day: float = PER_DAY) -> DiskTier:
    return DiskTier([path], 32 * LARGE, NAMESPACE, clock=clock, write_budget=per_day)


async def put_all(tier: DiskTier, seeds: Iterator[int], tries: int) -> list[Stored]:
    """Lone puts of new blocks, until one is refused."""
    results: list[Stored] = []
    for _ in range(tries):
        results += await put(tier, chain_of(NAMESPACE, 1, next(seeds)))
        if results[-1] is not Stored.STORED:
            break
    return results


def test_a_bucket_fills_with_time_of_one_boot_and_holds_an_hour() -> None:
    now = Allowance(PER_DAY, BOOT, 1000.0, 0)
    assert Balance().level_at(now) == pytest.approx(1000 * 22 / 24 * PER_DAY / DAY_S), "boot and time are 0"
    assert Balance(0.0, 1000.0 - DAY_S, BOOT).level_at(now) == PER_DAY / 24
    assert Balance(5.0, 0.0, b"b" * 16).level_at(now) == 5.0, "time of another boot"
    assert Balance(5.0, 2000.0, BOOT).level_at(now) == 5.0, "a clock that went back"
    assert Balance(-1e18, 1000.0, BOOT).level_at(now) == -PER_DAY
    assert Balance(PER_DAY / 24, 1000.0, BOOT).allows(now, 1 << 60), "a full bucket allows any size"
    assert not Balance(100.0, 1000.0, BOOT).allows(now, 101)


async def test_a_day_writes_no_more_than_its_budget_over_restarts(tmp_path: Path) -> None:
    path, clock, seeds = tmp_path / "g3", VirtualClock(), iter(range(10_000))
    stored, spent = 0, []
    for _ in range(25):
        tier = tier_at(path, clock)
        await tier.open()
        results = await put_all(tier, seeds, 40)
        assert results[-1] is Stored.BUDGET
        stored += results.count(Stored.STORED)
        spent.append(tier.usage().written_bytes)
        tier.check()
        await tier.close(clock.monotonic() + FAR_S)
        clock.advance(HOUR_S)
    assert spent[-1] - spent[0] <= PER_DAY, "more than a day's budget was written in a day"
    assert spent[-1] >= 0.8 * PER_DAY, "the budget is not used"
    assert stored * LARGE < spent[-1], "writes of the index are not counted"


async def test_processes_share_the_budget_and_a_crash_counts_what_was_leased(tmp_path: Path) -> None:
    path, clock, seeds = tmp_path / "g3", VirtualClock(), iter(range(1000))
    one = tier_at(path, clock)
    await one.open()
    await one.flush(clock.monotonic() + FAR_S)  # from here on the bucket fills
    assert await put_all(one, seeds, 2) == [Stored.BUDGET], "an unknown balance is none"
    clock.advance(HOUR_S)
    index = one._store.index
    arguments = {"per_day": PER_DAY, "now_s": clock.monotonic()}
    before = index.balance().level_at(index.allowance(**arguments))
    slots = index.transact(lambda txn: txn.reserve_slots(LARGE // 4096, 3), **arguments)
    assert len(slots) == 3, "never written to: as if the process were killed"
    assert index.balance().level <= before - 3 * LARGE
    results = await put_all(one, seeds, 20)
    assert results[-1] is Stored.BUDGET
    assert len(results) <= PER_DAY / 24 / LARGE - 3
    refused = one._store.tick
    assert await put_all(one, seeds, 5) == [Stored.BUDGET]
    assert one._store.tick == refused, "a put that the budget refuses costs a write of the index"
    await one.close(clock.monotonic() + FAR_S)


async def test_a_spent_budget_holds_back_uses_and_removals_but_no_purge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "IDLE_S", 0.01)
    path, clock, seeds = tmp_path / "g3", VirtualClock(), iter(range(1000))
    tier = tier_at(path, clock)
    await tier.open()
    await tier.flush(clock.monotonic() + FAR_S)  # from here on the bucket fills
    clock.advance(HOUR_S)
    tenant = chain_of(NAMESPACE, 1, scope=scope_of("tenant"))
    assert await put(tier, tenant) == [Stored.STORED]
    await put_all(tier, seeds, 20)
    while tier._store.may_write(budget.COMMIT_BYTES):
        await tier._store.submit(lambda txn: None).result()
    tier.touch(chain_of(NAMESPACE, 1, 0), clock.wall())
    await tier.flush(clock.monotonic() + FAR_S)
    assert tier._store.touches, "a use was written although the budget is spent"
    assert await tier.purge(scope_of("tenant"), clock.wall()) == 1
    clock.advance(HOUR_S)
    await tier.flush(clock.monotonic() + FAR_S)
    assert not tier._store.touches
    tier.check()
    await tier.close(clock.monotonic() + FAR_S)


async def test_a_kill_after_a_commit_leaves_nothing_unpaid(tmp_path: Path) -> None:
    clock = VirtualClock()
    tier = tier_at(tmp_path / "g3", clock)
    await tier.open()
    await tier.flush(clock.monotonic() + FAR_S)
    opened = tier._store
    wrote: list[int] = []

    def rewrite(txn: WriteTxn) -> None:
        wrote.append(budget.thread_written() or 0)
        for number in range(400):  # 800 KiB of pages of their own, far more than COMMIT_BYTES
            txn._txn.put(b"mtest%d" % number, bytes([len(wrote)]) * 1900)

    base, charged = opened.index.balance().written, []
    for _ in range(5):
        await opened.submit(rewrite).result()
        charged.append(opened.index.balance().written - base)  # what another process finds if this one is killed now
    written = [later - wrote[0] for later in wrote[1:]]  # with the commit itself; the first had no like before it
    for paid, cost in list(zip(charged, written, strict=False))[1:]:
        assert paid >= 0.9 * cost - budget.COMMIT_BYTES, "the last commit is not paid for"
    await tier.close(clock.monotonic() + FAR_S)


async def test_slots_that_were_reserved_ahead_and_not_used_are_paid_back(tmp_path: Path) -> None:
    clock = VirtualClock()
    tier = tier_at(tmp_path / "g3", clock)
    await tier.open()
    await tier.flush(clock.monotonic() + FAR_S)  # from here on the bucket fills
    clock.advance(HOUR_S)
    opened = tier._store
    slots = await opened.submit(lambda txn: txn.reserve_slots(LARGE // 4096, 4)).result()
    level = opened.index.balance().level
    opened.reserved.give_back(slots, unused=True)
    await opened.submit(lambda txn: None).result()
    assert opened.index.balance().level > level + 3 * LARGE
    await tier.close(clock.monotonic() + FAR_S)


async def test_trials_of_bad_places_are_paid_for(tmp_path: Path) -> None:
    clock, chain = VirtualClock(), chain_of(NAMESPACE, 2)
    tier = tier_at(tmp_path / "g3", clock)
    await tier.open()
    await tier.flush(clock.monotonic() + FAR_S)  # the bucket fills from the first transaction on
    clock.advance(HOUR_S)
    assert await put(tier, chain) == [Stored.STORED] * 2
    name, wall_s = tier._prefix + chain[0], clock.wall()
    ((raw, _),) = tier._store.index.find([name])
    assert raw is not None
    before = tier.usage().written_bytes
    trial = await tier._store.submit(lambda txn: drop_unreadable(txn, name, raw, 2, wall_s)).result()
    assert isinstance(trial, Trial)
    assert tier.usage().written_bytes - before >= LARGE

    def again(txn: WriteTxn) -> list[Trial]:
        end_trial(txn, trial, sound=False)
        txn.budget.charge(int(PER_DAY))
        return begin_trials(txn, Wall(wall_s + DAY_S))

    assert await tier._store.submit(again).result() == [], "the budget is spent"
    tier.check()
    await tier.close(clock.monotonic() + FAR_S)


async def test_without_a_budget_writes_are_counted_all_the_same(tmp_path: Path) -> None:
    clock = VirtualClock()
    tier = tier_at(tmp_path / "g3", clock, 0.0)
    await tier.open()
    assert await put_all(tier, iter(range(20)), 20) == [Stored.STORED] * 20
    usage = tier.usage()
    assert usage.stored_bytes == 20 * LARGE
    assert 20 * LARGE < usage.written_bytes < 40 * LARGE
    await tier.close(clock.monotonic() + FAR_S)


def test_a_thread_that_cannot_count_its_writes_is_charged_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_IO", tmp_path / "nothing")
    assert budget.thread_written() is None


KILLED = """
import asyncio, itertools, json, os, sys
from pathlib import Path
from kvtier.clock import SystemClock
from kvtier.testing import chain_of
from tests.tiers.disk.support.store import put
from tests.tiers.disk.test_budget import LARGE, NAMESPACE, DiskTier

async def main(path, seed, per_day):
    tier = DiskTier([Path(path)], 32 * LARGE, NAMESPACE, clock=SystemClock(), write_budget=per_day)
    await tier.open()
    await tier.flush(1e12)
    await asyncio.sleep(2.0)
    for number in itertools.count(1000 * seed):
        results = await put(tier, chain_of(NAMESPACE, 1, number))
        if str(results[0]) != "stored":
            break
    written = sum(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("wchar"))
    print(json.dumps([written, number - 1000 * seed, str(results[0])]), flush=True)
    os._exit(9)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
"""


def test_what_the_kernel_counts_stays_within_the_budget_over_killed_processes(tmp_path: Path) -> None:
    """3 processes one after another, each killed when it is refused; the bucket fills at 1 MiB per second."""
    per_day = 96.0 * 1024 * MIB
    told = []
    began = time.monotonic()
    for seed in range(3):
        words = [sys.executable, "-c", KILLED, str(tmp_path / "g3"), str(seed), str(per_day)]
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 9, done.stderr
        told.append(json.loads(done.stdout))
    written, stored = sum(one[0] for one in told), sum(one[1] for one in told)
    assert {one[2] for one in told} == {"budget"}
    assert stored >= 3
    assert stored * LARGE < written <= per_day / DAY_S * (time.monotonic() - began)
