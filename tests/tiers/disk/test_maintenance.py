"""inspect, verify, scrub, gc and resize, on live and dead stores."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.errors import ConfigError, FormatError
from kvtier.identity.keys import scope_of
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace
from kvtier.tiers.disk.diagnosis import Ailment
from kvtier.tiers.disk.maintenance import NICENESS, looking_after
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall
from tests.tiers.disk.support.damage import flip
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put, shrunk, slabs

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)


def damage(path: Path, number: int) -> None:
    """Flip a bit of one block of CHAIN."""
    (slab,) = slabs(path)
    flip(slab, slab.read_bytes().index(payload_of(CHAIN[number], BLOCK)) + 17)


async def test_inspect_tells_namespaces_scopes_and_room(tmp_path: Path) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, clock=clock) as tier:
        await put(tier, CHAIN[:4])
        await put(tier, chain_of(NAMESPACE, 2, 1, scope_of("tenant")), terms=Terms("short", ttl=60))
        clock.advance(61)
        for live in (True, False):
            if not live:
                await tier.close(clock.monotonic() + FAR_S)
            with looking_after([path], clock) as maintenance:
                seen = maintenance.inspect()
            assert (seen["blocks"], seen["bytes"], seen["capacity_bytes"]) == (6, 6 * BLOCK, 16 * BLOCK)
            (one,) = seen["namespaces"]
            assert one["fields"] == NAMESPACE.fields()
            assert (one["blocks"], one["scopes"], one["expired"]) == (6, 2, 2)
        await tier.open()


async def test_verify_finds_and_scrub_removes(tmp_path: Path) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, clock=clock) as tier:
        await put(tier, CHAIN)
        steps: list[tuple[int, int]] = []
        with looking_after([path], clock) as maintenance:
            assert maintenance.verify(lambda done, total: steps.append((done, total))).sound
            damage(path, 2)
            found = maintenance.verify()
            assert (found.blocks, found.bad, found.removed, found.sound) == (8, 1, 0, False)
            found = maintenance.scrub()
            assert (found.bad, found.removed, found.raced) == (1, 1, 0)
            assert maintenance.verify().sound
        assert steps[-1] == (8, 8)
        assert await get(tier, CHAIN) == [True, True, Miss.ABSENT, *[True] * 5]


async def test_reading_all_gives_way_to_those_who_use_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On threads of low priority; the caller's, and the store's own, keep theirs."""
    seen: set[int] = set()
    read = Slab.read

    def note_and_read(slab: Slab, segment: int, offset: int, into: Sequence[memoryview]) -> None:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        read(slab, segment, offset, into)

    async with opened(tmp_path / "g3") as tier:
        await put(tier, CHAIN)
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        with monkeypatch.context() as patched, looking_after([tmp_path / "g3"], VirtualClock()) as maintenance:
            patched.setattr(Slab, "read", note_and_read)
            assert maintenance.verify().sound
            assert seen == {max(NICENESS, before)}
            seen.clear()
            assert await get(tier, CHAIN) == [True] * 8
            assert seen == {before}
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


async def test_gc_deletes_what_is_expired(tmp_path: Path) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, clock=clock) as tier:
        await put(tier, CHAIN[:4], terms=Terms("short", ttl=60))
        await put(tier, CHAIN[4:])
        clock.advance(61)
        with looking_after([path], clock) as maintenance:
            assert maintenance.gc() == {"reclaimed_slots": 0, "deleted_blocks": 4}
            assert maintenance.gc()["deleted_blocks"] == 0
        assert tier.usage().blocks == 4


@pytest.mark.parametrize("blocks", [4, 7, 16, 40])
async def test_resize_keeps_what_fits(tmp_path: Path, blocks: int) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, clock=clock) as tier:
        await put(tier, CHAIN)
    with looking_after([path], clock, capacity=blocks * BLOCK) as maintenance:
        assert maintenance.shrink() == max(0, 8 - blocks)
        assert maintenance.verify().sound
        assert maintenance.inspect()["capacity_bytes"] == blocks * BLOCK
    assert sum(file.stat().st_size for file in slabs(path)) <= blocks * BLOCK
    async with opened(path, blocks, clock=clock) as tier:
        assert await get(tier, CHAIN) == [True] * min(8, blocks) + [Miss.ABSENT] * max(0, 8 - blocks)
        await put(tier, chain_of(NAMESPACE, blocks, seed=3))
        assert tier.usage().blocks == blocks


@pytest.mark.parametrize("blocks", [5, 64])
async def test_a_changed_capacity_in_the_configuration_is_a_resize(tmp_path: Path, blocks: int) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    async with opened(path, blocks) as tier:
        await shrunk(tier)
        assert await get(tier, CHAIN) == [True] * min(8, blocks) + [Miss.ABSENT] * max(0, 8 - blocks)
        assert sum(file.stat().st_size for file in slabs(path)) <= blocks * BLOCK
        await put(tier, chain_of(NAMESPACE, blocks, seed=3))
        assert tier.usage().blocks == blocks


async def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), looking_after([tmp_path / "nothing"], VirtualClock()):
        pass
    with pytest.raises(FormatError), looking_after([tmp_path], VirtualClock()):
        pass
    assert list(tmp_path.iterdir()) == []


def _run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    code = ended.value.code
    return code if isinstance(code, int) else 0


async def test_the_commands_speak_json_and_say_by_their_status_what_they_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "g3"

    def out(*words: object) -> tuple[int, Any]:
        status = _run(*words, path, "--json")
        return status, json.loads(capsys.readouterr().out)

    async with opened(path) as tier:
        await put(tier, CHAIN)
    assert out("inspect")[1]["blocks"] == 8
    assert out("verify")[0] == 0
    assert out("g3", "doctor")[0] == 0, "too little was written to judge"
    monkeypatch.setattr("kvtier.tiers.disk.diagnosis.JUDGED_FROM_BYTES", 0)
    status, ailments = out("g3", "doctor")
    assert status == 1, "8 blocks of 4 KiB in a put of their own are written at a high price"
    named = {one["name"]: one for one in ailments["ailments"]}
    assert named["write amplification"]["remedy"]
    assert not named["write budget left"]["remedy"]
    assert not named["stopped reader"]["remedy"]
    damage(path, 3)
    status, found = out("verify")
    assert (status, found["sound"], found["bad"]) == (1, False, 1)
    assert out("scrub")[0] == 1
    assert out("scrub", "--rate", "1GiB/s")[0] == 0
    status, result = out("gc", "--resize", "16KiB", "--yes")
    assert (status, result["capacity_bytes"]) == (0, 16384)
    for verb in ("inspect", "verify", "scrub", "gc"):
        assert _run(verb, path) in (0, 1)
        assert capsys.readouterr().out
    assert _run("inspect", tmp_path / "nothing") == 2


async def test_the_doctor_names_bad_places_and_what_each_size_of_blocks_holds(tmp_path: Path) -> None:
    path, blocks, large = tmp_path / "g3", (128 << 20) // BLOCK, sample_namespace(2 * BLOCK)
    async with opened(path, blocks) as tier:
        await put(tier, CHAIN)

        def found() -> dict[str, Ailment]:
            with looking_after([path], VirtualClock()) as care:
                return {one.name: one for one in care.diagnose()}

        well = await asyncio.to_thread(found)
        assert well["bad places"] == Ailment("bad places", "none")
        assert not well["fragmentation"].remedy, "a segment is left for another size"
        async with opened(path, blocks // 2, block_bytes=2 * BLOCK, namespace=large) as other:
            await put(other, chain_of(large, 8))
        await tier._store.submit(lambda txn: txn.segments.bad.add(1, 2, 100, 2, Wall(0.0))).result()
        ill = await asyncio.to_thread(found)
    assert ill["bad places"].figure == "1, of 8192 bytes, on path 1" and ill["bad places"].remedy
    for size in (BLOCK, 2 * BLOCK):
        assert ill[f"slots of {size} bytes"].figure == "1 segments, 50% of the capacity, 0% of it in use"
    assert ill["fragmentation"].figure.startswith("100%") and ill["fragmentation"].remedy
