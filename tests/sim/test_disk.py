"""Fleets whose G3 is the real one, on disks that lose what was not synced: every promise holds, the same seed is the
same history, and planted bugs of G3 are found."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from kvtier.sim import Played, make_history, play
from kvtier.sim.real_disk import RealDisk
from kvtier.testing import verification_off
from kvtier.tiers.disk.bad_places import BadPlaces
from kvtier.tiers.disk.preallocate import Preallocator
from kvtier.tiers.disk.purge_log import PurgeLog
from kvtier.tiers.disk.shared_sync import SharedSyncs
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write import WriteBatch
from kvtier.tiers.disk.write_txn import WriteTxn

SEEDS = [("safety", 0), ("safety", 1), ("liveness", 0), ("engines", 4)]
DIGESTS = (
    "from kvtier.sim import make_history, play; "
    f"print([play(make_history(seed, mode, disk='real')).digest for mode, seed in {SEEDS}])"
)


def failures(mode: str, seeds: range) -> list[str]:
    """One line for each history that breaks a promise."""
    played = (play(make_history(seed, mode, disk="real")) for seed in seeds)
    return [
        f"kvtier sim --disk real --mode {mode} --seeds {one.history.seed}: {one.failure}"
        for one in played
        if one.failure
    ]


@pytest.mark.parametrize("part", range(6))
def test_no_promise_is_broken_with_real_disks(part: int) -> None:
    assert not failures("safety", range(10 * part, 10 * (part + 1)))


@pytest.mark.parametrize("part", range(4))
def test_every_fleet_with_real_disks_works_again_once_all_is_well(part: int) -> None:
    assert not failures("liveness", range(5 * part, 5 * (part + 1)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mode", "part"), [("safety", part) for part in range(16)] + [("liveness", part) for part in range(4)]
)
def test_no_promise_is_broken_with_real_disks_in_ten_thousand_histories(mode: str, part: int) -> None:
    assert not failures(mode, range(500 * part, 500 * (part + 1)))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_promise_is_broken_with_engines_over_real_disks_in_a_hundred_histories() -> None:
    assert not failures("engines", range(100))


def test_an_engine_reads_from_a_real_disk() -> None:
    one = play(make_history(13, "engines", disk="real"))
    assert not one.failure
    assert any("'tokens_read_g3': " in line for line in one.lines)


def test_a_seed_is_one_history_whatever_the_process() -> None:
    """With threads, files and an index of its own another process plays the same."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    words = [sys.executable, "-c", DIGESTS]
    other = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=True)
    mine = [play(make_history(seed, mode, disk="real")).digest for mode, seed in SEEDS]
    assert len(set(mine)) == len(SEEDS)
    assert other.stdout.strip() == str(mine)


def test_the_histories_say_something() -> None:
    played = [play(make_history(seed, disk="real")) for seed in range(8)]
    assert sum(one.served for one in played) > 100, "blocks are served, and compared"
    said = "\n".join(line for one in played for line in one.lines)
    for word in ("from g3", "'power': True", "'power': False", "'kind': 'full'", "'kind': 'hang'", "'kind': 'bad'"):
        assert word in said, word


def no_sync(write: WriteBatch) -> None:
    """A write publishes its blocks at once."""
    write._synced.set_result(dict.fromkeys(slot.segment for slot in write._reserved.values()))


async def compare_nothing(*_: object) -> None:
    """Nobody compares the index with the disk."""


async def purge_nothing(*_: object) -> int:
    return 0


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """The same, where nobody compares the index with the disk: what is served must tell."""
    with mock.patch.object(WriteBatch, "_sync", no_sync), mock.patch.object(RealDisk, "compare", compare_nothing):
        yield


def forgiven(syncs: SharedSyncs, segment: int) -> None:
    """A sync that says nothing of its failure."""
    with contextlib.suppress(OSError), syncs._store.moving():
        syncs._store.slab.sync(segment)


BUGS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str, range, str]] = {
    "other bytes are let pass": (verification_off, "safety", range(23, 90), "has other bytes"),
    "published before the sync": (
        lambda: mock.patch.object(WriteBatch, "_sync", no_sync), "safety", range(60), "are not durable",
    ),
    "published before the sync, and lost": (unseen, "safety", range(1, 60), "fails its check"),
    "published before the sync, and not found": (unseen, "liveness", range(20), "after a kill"),
    "a purge is not noted": (
        lambda: mock.patch.object(DiskTier, "purge", purge_nothing), "liveness", range(40), "purged later",
    ),
    "a draft keeps its name": (
        lambda: mock.patch.object(Preallocator, "_forget_name", lambda _: None), "liveness", range(4, 60),
        "larger than its capacity",
    ),
    "blocks go with their purge, and nothing is noted": (
        lambda: mock.patch.object(PurgeLog, "record", lambda *_: None), "safety", range(1, 60), "was purged later",
    ),
    "the same, seen over a restart": (
        lambda: mock.patch.object(PurgeLog, "record", lambda *_: None), "liveness", range(20), "was purged later",
    ),
    "slots of dead owners are kept": (
        lambda: mock.patch.object(WriteTxn, "reclaim", lambda *_: 0), "liveness", range(1, 20), "on disk reserved",
    ),
    "a failed sync is forgiven": (
        lambda: mock.patch.object(SharedSyncs, "_sync", forgiven), "safety", range(17, 90), "are not durable",
    ),
    "bad places are used again": (
        lambda: mock.patch.object(BadPlaces, "of", lambda *_: []), "liveness", range(20), "was known to be bad",
    ),
    "files keep their lengths in a smaller store": (
        lambda: mock.patch.object(Slab, "cut", lambda _: iter(())), "safety", range(3, 60), "slab files have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_g3_would_show(bug: str) -> None:
    """The range begins with a seed that shows it; the others are for when histories are made otherwise."""
    plant, mode, seeds, says = BUGS[bug]

    def failed() -> Played:
        for seed in seeds:
            with plant():
                one = play(make_history(seed, mode, disk="real"))
            if one.failure:
                return one
        raise AssertionError(f"none of {len(seeds)} histories shows it")

    assert says in failed().failure
