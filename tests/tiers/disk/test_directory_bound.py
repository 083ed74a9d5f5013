"""The bytes of a directory, as `du` sees them, over namespaces, kills and time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.errors import ClosedError
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.concurrent_writer import CAPACITY
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put
from tests.tiers.disk.support.subprocesses import ROOT, environment, program

MIB = 1 << 20
NAMESPACE = sample_namespace(BLOCK)


def occupied(path: Path) -> int:
    """Like `du`: every file once, by its blocks."""
    seen = {}
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                status = os.lstat(Path(folder) / name)
            except FileNotFoundError:
                continue
            seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def bound(capacity: int) -> int:
    """docs/operations.md: the capacity, 1,000 bytes of index per 4 KiB block, 20 MiB."""
    return capacity + capacity // BLOCK * 1000 + 20 * MIB


@pytest.mark.parametrize("seconds", [4.0, pytest.param(600.0, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_a_directory_stays_within_its_bound_while_writers_are_killed(tmp_path: Path, seconds: float) -> None:
    rng, path = random.Random(7), tmp_path / "g3"

    def start(seed: int) -> subprocess.Popen[str]:
        words = program("concurrent_writer", path, seconds + 600, seed)
        return subprocess.Popen(
            words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    running, peak, killed = [start(seed) for seed in range(3)], 0, 0
    try:
        while not list(path.glob("slab/*.slab")):
            time.sleep(0.1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.2)
            peak = max(peak, occupied(path))
            if rng.random() < 0.3:
                victim = running.pop(rng.randrange(3))
                victim.send_signal(signal.SIGKILL)
                victim.communicate()
                killed += 1
                running.append(start(100 + killed))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert killed
    assert 0 < peak <= bound(CAPACITY * BLOCK)


@dataclass
class Herd:
    """Processes that turn over one store. `written`: bytes that those that were killed gave to the kernel."""

    path: Path
    blocks: int
    per_day: float
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    started: int = 0
    killed: int = 0
    written: int = 0

    def start(self) -> None:
        self.started += 1
        words = program("churning_writer", self.path, self.blocks, self.per_day, self.started)
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self.running.append(subprocess.Popen(words, cwd=ROOT, env=environment(), text=True, **pipes))

    def kill(self, process: subprocess.Popen[str]) -> None:
        """It must not have ended by itself."""
        self.running.remove(process)
        process.send_signal(signal.SIGSTOP)
        ended = process.poll() is not None
        self.written += 0 if ended else written_by(process)
        process.kill()
        _, told = process.communicate()
        assert not ended, told
        self.killed += 1


def written_by(process: subprocess.Popen[str]) -> int:
    """Bytes that a live process gave to the kernel."""
    lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("wchar"))


@pytest.mark.parametrize("per_s", [0, 8 * MIB], ids=["unbounded", "budget"])
@pytest.mark.parametrize(
    ("seconds", "blocks"),
    [(4.0, 4096), pytest.param(600.0, 65_536, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
    ids=["short", "ten-minutes"],
)
def test_a_store_that_is_turned_over_stays_within_its_bounds_while_writers_are_killed(
    tmp_path: Path, seconds: float, blocks: int, per_s: int
) -> None:
    """What `du` tells, at any time, and what the kernel counts: payloads, index and all, over 2 to 3 processes."""
    rng, herd = random.Random(7), Herd(tmp_path / "g3", blocks, per_s * 86_400.0)
    began = time.monotonic()
    herd.start()
    try:
        while not list(herd.path.glob("slab/*.slab")):
            time.sleep(0.05)
        peak = 0
        while time.monotonic() < began + seconds or herd.killed < 3:
            time.sleep(0.2)
            if len(herd.running) < 3:
                herd.start()
            peak = max(peak, occupied(herd.path))
            one = rng.choice(herd.running)
            if rng.random() < 0.1 and (one.poll() is not None or written_by(one) > 4 * MIB):
                herd.kill(one)
    finally:
        for process in list(herd.running):
            herd.kill(process)
    took_s = time.monotonic() - began
    limit = bound(blocks * BLOCK)
    print(f"{herd.started} processes, {peak} bytes of {limit}, {herd.written} written in {took_s:.0f} s")
    assert blocks * BLOCK // 2 < peak <= limit
    if per_s:
        assert herd.written <= per_s * took_s


async def test_a_thousand_namespaces_share_a_directory(tmp_path: Path) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, 4096, clock=clock) as first:
        tiers = []
        for number in range(1000):
            namespace = sample_namespace(BLOCK, model=f"model-{number}")
            tier = DiskTier([path], 4096 * BLOCK, namespace, clock=clock)
            await tier.open()
            tiers.append((tier, chain_of(namespace, 1)))
        assert await put(tiers[7][0], tiers[7][1]) == [Stored.STORED]
        assert await get(tiers[7][0], tiers[7][1]) == [True]
        assert await get(tiers[8][0], tiers[8][1]) == [Miss.ABSENT]
        await first.flush(clock.monotonic() + FAR_S)
        assert len(first._store.index.rows(b"mnamespace")) == 1001
        for tier, _ in tiers:
            await tier.close(clock.monotonic() + FAR_S)
        assert occupied(path) <= bound(4096 * BLOCK)


def _in_the_child(tier: DiskTier, told: multiprocessing.connection.Connection) -> None:
    verbs = [lambda: tier.peek(chain_of(NAMESPACE, 1), [0]), lambda: tier.usage(), lambda: tier._store]
    answers = []
    for verb in verbs:
        try:
            answers.append(str(verb()))
        except ClosedError:
            answers.append("closed")
    told.send(answers)


async def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3") as tier:
        chain = chain_of(NAMESPACE, 4)
        await put(tier, chain)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_in_the_child, args=(tier, there))
        child.start()
        assert here.recv() == ["closed"] * 3
        child.join()
        assert await get(tier, chain) == [True] * 4
        assert await put(tier, chain_of(NAMESPACE, 4, 1)) == [Stored.STORED] * 4


@pytest.mark.parametrize("jump_s", [-86_400.0 * 400, 86_400.0 * 400])
async def test_a_jump_of_the_wall_clock_neither_stops_nor_frees_writes(tmp_path: Path, jump_s: float) -> None:
    clock = VirtualClock()
    tier = DiskTier([tmp_path / "g3"], 64 * BLOCK, NAMESPACE, clock=clock, write_budget=2400.0 * MIB)
    await tier.open()
    await tier.flush(clock.monotonic() + FAR_S)
    clock.advance(60.0)
    before = tier._store.index.balance().level
    clock.jump_wall(jump_s)
    assert await put(tier, chain_of(NAMESPACE, 4)) == [Stored.STORED] * 4
    assert tier._store.index.balance().level <= before + 60 * 2400 * MIB / 86_400
    await tier.close(clock.monotonic() + FAR_S)
