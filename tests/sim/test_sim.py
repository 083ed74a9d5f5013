"""Whole fleets, simulated: every promise holds in every history, the same seed is the same history, and a planted bug
is found, and shrunk to a few steps."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvtier.cache import AsyncCache
from kvtier.errors import InvalidRequest, TierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Terms
from kvtier.sim import History, Played, make_history, play, shrink
from kvtier.sim.client import Client
from kvtier.sim.history import Step
from kvtier.sim.ledger import Ledger, Wrong
from kvtier.sim.world import NAMESPACE
from kvtier.supervisor import Supervisor
from kvtier.testing import chain_of, verification_off
from kvtier.tiers.host.refusals import Refusals
from kvtier.tiers.host.tier import HostTier

HISTORIES = Path(__file__).parent / "histories"
SEEDS = (0, 1, 11, 16, 23, 42)
"""In the last four purges are owed by several tiers at once, in the order that these are gone through."""
DIGESTS = f"from kvtier.sim import make_history, play; print([play(make_history(seed)).digest for seed in {SEEDS}])"


def failures(mode: str, seeds: range) -> list[str]:
    """One line for each history that breaks a promise."""
    played = (play(make_history(seed, mode)) for seed in seeds)
    return [f"kvtier sim --mode {mode} --seeds {one.history.seed}: {one.failure}" for one in played if one.failure]


def first_failure(seeds: range, mode: str = "safety") -> Played:
    """Of a planted bug. `seeds` begin with one that shows it; the others are for when histories are made otherwise."""
    for seed in seeds:
        if (one := play(make_history(seed, mode))).failure:
            return one
    raise AssertionError(f"none of {len(seeds)} histories shows it")


@pytest.mark.parametrize("part", range(40))
def test_no_promise_is_broken_in_any_history(part: int) -> None:
    assert not failures("safety", range(50 * part, 50 * (part + 1)))


@pytest.mark.parametrize("part", range(8))
def test_every_fleet_works_again_once_all_is_well(part: int) -> None:
    assert not failures("liveness", range(6 * part, 6 * (part + 1)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mode", "part"), [("safety", part) for part in range(95)] + [("liveness", p) for p in range(5)]
)
def test_no_promise_is_broken_in_a_hundred_thousand_histories(mode: str, part: int) -> None:
    assert not failures(mode, range(1000 * part, 1000 * (part + 1)))


def test_a_seed_is_one_history_whatever_the_process() -> None:
    """Another process, whose sets of strings and bytes have another order, plays the same."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", DIGESTS], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    mine = [play(make_history(seed)).digest for seed in SEEDS]
    assert len(set(mine)) == len(SEEDS)
    assert mine == [play(make_history(seed)).digest for seed in SEEDS]
    assert other.stdout.strip() == str(mine)


def test_the_histories_say_something() -> None:
    played = [play(make_history(seed)) for seed in range(12)]
    assert sum(one.served for one in played) > 150, "blocks are served, and compared"
    said = "\n".join(line for one in played for line in one.lines)
    for word in ("from g4", "from g3", "from g2", "given up", "computed", "preempted", "kill", "purge: ", "pin: "):
        assert word in said, word


@pytest.mark.parametrize("file", sorted(HISTORIES.glob("*.json")), ids=lambda file: file.stem)
def test_histories_that_once_failed_pass(file: Path) -> None:
    assert not play(History.decode(file.read_bytes())).failure


def test_wrong_bytes_would_show() -> None:
    with verification_off():
        one = first_failure(range(9, 300))
    assert "other bytes" in one.failure


def test_a_purged_block_would_show() -> None:
    with mock.patch.object(Refusals, "has_purged", lambda *_: False):
        one = first_failure(range(200))
    assert "purged later" in one.failure


def test_an_expired_block_would_show() -> None:
    with (
        mock.patch.object(Lifetime, "servable", lambda *_: True),
        mock.patch.object(Lifetime, "ends", lambda *_: float("inf")),
    ):
        one = first_failure(range(200))
    assert " for " in one.failure and "is served" in one.failure


def test_a_failing_history_is_shrunk_and_kept() -> None:
    with mock.patch.object(Refusals, "has_purged", lambda *_: False):
        failed = first_failure(range(2, 202))
        small = shrink(failed)
        again = play(History.decode(small.history.encode()))
    assert len(small.history.steps) <= 6 < len(failed.history.steps)
    assert again.failure == small.failure and again.digest == small.digest
    assert not play(small.history).failure, "without the bug it passes"


@pytest.mark.parametrize("wrong", [{"mode": "both"}, {"hosts": 9}, {"steps": 0}])
def test_a_history_that_cannot_be_made_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"mode|hosts|steps"):
        make_history(1, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"seed": "x"}', make_history(1).encode().replace(b'"put"', b'"run"')])
def test_a_file_that_is_no_history_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a history"):
        History.decode(raw)


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (replace(make_history(1), steps=make_history(1, "engines").steps), "without an engine"),
        (replace(make_history(1), engine=make_history(1, "engines").engine), "has an engine"),
        (replace(make_history(1, "engines"), engine=None), "has an engine"),
    ],
)
def test_a_history_whose_engines_do_not_fit_its_mode_is_refused(history: History, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        History.decode(history.encode())


QUIET = replace(
    make_history(0, "liveness"), skews=(0.0, 0.0), tiers=("g3", "g4"), slots=64, disk_blocks=256, purge="strict",
    quota=0.0, steps=(Step(0.1, 0, "match", {"scope": 1, "chain": 1, "blocks": 4, "timeout": None}, 1),),
)  # fmt: skip
"""Two machines, one look-up, and then whether all works."""


async def never(*_: object, **__: object) -> int:
    await asyncio.sleep(1e6)
    return 0


async def late(*_: object, **__: object) -> int:
    await asyncio.sleep(30)
    return 0


async def nothing(*_: object, **__: object) -> int:
    return 0


async def everything(cache: AsyncCache, chain: Sequence[BlockKey], *_: object, **__: object) -> int:
    return len(chain)


async def refused(*_: object, **__: object) -> int:
    raise TierError("g3", "lookup", "broken")


async def left_alone(*_: object, **__: object) -> int:
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    return 0


@pytest.mark.parametrize(
    ("place", "bug", "says"),
    [
        ((AsyncCache, "match"), never, "Wrong: match on host 0 does not end within"),
        ((AsyncCache, "match"), late, "Wrong: match took 30.000 s, and its bound is"),
        ((AsyncCache, "match"), refused, "TierError: g3"),
        ((AsyncCache, "match"), left_alone, "an exception that nobody awaited: .*ZeroDivisionError"),
        ((AsyncCache, "flush"), never, "Wrong: flush on host 0 does not end within"),
        ((AsyncCache, "put"), nothing, "Wrong: host 0 stores 0 of"),
        ((Client, "read_all"), nothing, "Wrong: host 0 finds 0 of .* after they left G2"),
        ((Client, "purge"), nothing, "after their purge"),
        ((Client, "purge"), refused, "Wrong: a purge fails though all is well"),
        ((HostTier, "filling"), lambda tier: [1], "Wrong: host 0 is not well after"),
        ((Supervisor, "restarts"), {"sweep": 1}, "Wrong: background tasks failed on host 0"),
        (("kvtier.sim.loop", "TURNS_MAX"), 50, "Stuck: 50 turns, and no end"),
    ],
)
def test_each_promise_that_is_broken_shows(place: tuple[Any, str], bug: Any, says: str) -> None:
    assert play(QUIET).failure == ""
    owner, name = place
    target = importlib.import_module(owner) if isinstance(owner, str) else owner
    with mock.patch.object(target, name, bug):
        assert re.search(says, play(QUIET).failure)


def test_what_a_cache_claims_is_compared_with_what_may_be_there() -> None:
    now = [1000.0]
    keys = chain_of(NAMESPACE, 2)
    terms = {scope_of_key(keys[0]): Terms("brief", ttl=60.0, max_age=600.0)}
    ledger = Ledger(NAMESPACE.block_bytes, terms, lambda: now[0], spread_s=1.0)

    def claim(after_s: float) -> None:
        now[0] += after_s
        ledger.claimed(keys, 2, ledger.before(keys, 1, -math.inf, math.inf))

    with ledger.using(keys, putting=True):
        claim(1e6)  # it is being put
    claim(60.0)
    with pytest.raises(Wrong, match=r"is said to be here: it was used at .*, for 60\.0 s"):
        claim(2.0)
    with ledger.using(keys), ledger.using(keys):
        claim(0.0)  # somebody else uses it meanwhile, so its time begins anew
    with pytest.raises(Wrong, match="has other bytes"):
        ledger.compare(keys, [b""], ledger.before(keys, 1, -math.inf, math.inf))
