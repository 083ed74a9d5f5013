"""A day's writes are bounded for a directory: over restarts, processes and kinds of writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.identity.keys import scope_of
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import budget, store
from kvtier.tiers.disk.budget import DAY_S, Allowance, Balance
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.trials import Trial, begin_trials, drop_unreadable, end_trial
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall
from tests.tiers.disk.support.store import FAR_S, opened, put
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


def test_a_full_bucket_allows_any_size_though_a_transaction_pays_in_advance() -> None:
    now = Allowance(PER_DAY, BOOT, 1000.0, budget.IN_ADVANCE_MAX)
    full = PER_DAY / 24
    assert Balance(full, 1000.0, BOOT).allows(now, 1 << 60)
    assert not Balance(full - 1, 1000.0, BOOT).allows(now, int(full))
    assert Balance(5.0 * MIB, 1000.0, BOOT).allows(now, MIB)
    assert not Balance(5.0 * MIB, 1000.0, BOOT).allows(now, MIB + 1), "the transaction will not allow it"
    assert Balance(0.0, 1000.0, BOOT).allows(now_with(-2 * MIB), 2 * MIB), "what was paid too much comes back"
    tiny = Allowance(24.0 * MIB, BOOT, 1000.0, budget.IN_ADVANCE_MAX)
    assert Balance(1.0 * MIB, 1000.0, BOOT).allows(tiny, 2 * MIB), "a bucket smaller than the advance"


def now_with(unpaid: int) -> Allowance:
    """At the same time."""
    return Allowance(PER_DAY, BOOT, 1000.0, 0, unpaid)


class Spending:
    """Commits of one process on an index, of which the test says how many bytes each writes; and what a bucket would
    hold from which just those are taken."""

    def __init__(self, path: Path, per_day: float) -> None:
        self.per_day, self.burst, self.now_s = per_day, per_day / 24, 0.0
        self.index = Index.create(path, bytes(16), Geometry(64 * LARGE, 16 * LARGE, 1), 16 << 20, Owner.current())
        self.kernel = 0
        self.true_level = self.burst
        self.written: list[tuple[float, int]] = []

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.true_level = min(self.burst, self.true_level + seconds * 22 / 24 * self.per_day / DAY_S)

    def allowance(self) -> Allowance:
        return self.index.allowance(self.per_day, self.now_s)

    def may_write(self, size: int) -> bool:
        return self.index.balance().allows(self.allowance(), size)

    def commit(self, size: int, wanted: int) -> bool:
        """A transaction that writes `size` bytes of the index, and leases as many as `wanted` if it may."""

        def work(txn: WriteTxn) -> bool:
            self.kernel += size
            granted = txn.budget.allows(wanted)
            txn.budget.charge(wanted if granted else 0)
            return granted

        granted = self.index.transact(work, per_day=self.per_day, now_s=self.now_s)
        spent = size + wanted * granted
        self.true_level -= spent
        self.written.append((self.now_s, spent))
        return granted


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 60.0, HOUR_S, 20 * HOUR_S]),
        st.sampled_from([20_000, 60_000, 400_000, 1_500_000, 5_000_000]),  # of a commit
        st.sampled_from([0, 4096, 300_000, LARGE, 4 * LARGE, 200 * LARGE]),  # of blocks
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, hours=st.sampled_from([0.5, 1.0, 10.0, 100.0]))
def test_what_is_asked_beforehand_is_what_a_transaction_says_and_what_is_left(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, int, int]],
    hours: float,
) -> None:  # fmt: skip
    """`hours`: MiB that the bucket holds. Whoever is refused, and pays for the next commit what the last one cost,
    would be refused by a count of just what was written; and that never exceeds the budget of a day."""
    spending = Spending(tmp_path_factory.mktemp("g3") / "index", 24 * hours * MIB)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(budget, "thread_written", lambda: spending.kernel)
            spending.commit(0, 0)
            spending.wait(2 * HOUR_S)
            spending.true_level = spending.burst
            commits = 0
            for pause_s, size, wanted in steps:
                spending.wait(pause_s)
                advance, asked = min(max(budget.COMMIT_BYTES, commits), budget.IN_ADVANCE_MAX), max(wanted, 1)
                granted = spending.may_write(asked)
                if not granted:
                    room = spending.true_level - advance
                    assert room < 1 + min(asked, spending.burst - advance), "refused, though there is room"
                    continue
                assert spending.commit(size, asked), "a transaction in vain"
                commits = size
    finally:
        spending.index.close()
    largest = max((size for _at, size in spending.written), default=0)
    for start, _size in spending.written:
        within = sum(size for at, size in spending.written if start <= at < start + DAY_S)
        assert within <= 23 * spending.burst + largest, "more than a day's budget and the write that overdrew it"


async def test_a_day_writes_no_more_than_its_budget_over_restarts(tmp_path: Path) -> None:
    path, clock, seeds = tmp_path / "g3", VirtualClock(), iter(range(10_000))
    stored, spent = 0, []
    for _ in range(25):
        tier = tier_at(path, clock)
        await tier.open()
        await tier.flush(clock.monotonic() + FAR_S)  # from the first of these on the bucket fills
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
    shared = one._store.index
    arguments = {"per_day": PER_DAY, "now_s": clock.monotonic()}
    before = shared.balance().level_at(shared.allowance(**arguments))
    slots = shared.transact(lambda txn: txn.reserve_slots(LARGE // 4096, 3), **arguments)
    assert len(slots) == 3, "never written to: as if the process were killed"
    assert shared.balance().level <= before - 3 * LARGE
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


async def test_a_block_as_large_as_the_bucket_is_stored_once_that_is_full(tmp_path: Path) -> None:
    clock, seeds = VirtualClock(), iter(range(100))
    tier = tier_at(tmp_path / "g3", clock, 24.0 * LARGE)
    await tier.open()
    await tier.flush(clock.monotonic() + FAR_S)  # from here on the bucket fills
    for _ in range(3):
        clock.advance(2 * HOUR_S)
        assert await put_all(tier, seeds, 3) == [Stored.STORED, Stored.BUDGET]
    await tier.close(clock.monotonic() + FAR_S)


async def test_a_bound_ends_with_its_configuration_and_with_its_tier(tmp_path: Path) -> None:
    """It was kept until the process ended: puts were refused for a bound that nobody had any more."""
    clock, seeds = VirtualClock(), iter(range(100))
    async with opened(tmp_path / "g3", 32, block_bytes=LARGE, clock=clock) as tier:
        assert await tier.resize(32 * LARGE, LARGE)
        await put_all(tier, seeds, 2)
        assert await put_all(tier, seeds, 1) == [Stored.BUDGET]
        other = tier_at(tmp_path / "g3", clock, per_day=2 * LARGE)
        await other.open()
        assert await tier.resize(32 * LARGE, 0.0)
        assert await put_all(tier, seeds, 1) == [Stored.BUDGET], "the other tier's bound is the store's, too"
        await other.close(clock.monotonic() + FAR_S)
        assert await put_all(tier, seeds, 4) == [Stored.STORED] * 4


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
