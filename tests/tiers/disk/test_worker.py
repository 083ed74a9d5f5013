"""G3 in a process of its own: the same tier, and what becomes of it when that process fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.errors import ClosedError, ConfigError, FormatError, TierError
from kvtier.identity.keys import BlockKey, Scope
from kvtier.identity.namespace import Namespace
from kvtier.manager.build import lower_tiers
from kvtier.retention.terms import BUILTIN
from kvtier.testing import VirtualClock, chain_of, check_tier, payload_of, payloads_of, sample_namespace, seal
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.worker import client, given_keys, process, protocol
from kvtier.tiers.disk.worker.client import DiskWorkerClient
from kvtier.tiers.disk.worker.protocol import GivenKey
from kvtier.tiers.disk.worker.shared_arena import SharedArena
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.protocol import Describing, Miss, Notebook, Resizable, Retaining, Stored, Target, Tier
from tests.support.waiting import until
from tests.tiers.disk.support.store import BLOCK, FAR_S
from tests.tiers.disk.support.subprocesses import environment
from tests.tiers.disk.support.worker import SLOTS, Bounced, memory

NAMESPACE = sample_namespace(BLOCK)


@asynccontextmanager
async def opened(path: Path, arena: Arena, blocks: int = 64, clock: Any = None) -> AsyncIterator[DiskWorkerClient]:
    clock = clock or SystemClock()
    tier = DiskWorkerClient([path], blocks * BLOCK, NAMESPACE, clock=clock, arena=arena)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close(tier._clock.monotonic() + FAR_S)


async def put(
    tier: DiskWorkerClient, arena: Arena, chain: Sequence[BlockKey], deadline_s: float = FAR_S
) -> list[Stored]:
    return await Bounced(tier, arena).write(
        seal(chain, range(len(chain)), BLOCK, tier._clock.wall()), tier._clock.monotonic() + deadline_s
    )


async def get(tier: DiskWorkerClient, arena: Arena, chain: Sequence[BlockKey]) -> list[bool | Miss]:
    """True where a block came back with its bytes, else why it did not."""
    buffers = [bytearray(BLOCK) for _ in chain]
    targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
    results = await Bounced(tier, arena).read(chain, targets, tier._clock.monotonic() + FAR_S)
    return [
        result if isinstance(result, Miss) else buffer == payload_of(key, BLOCK)
        for key, buffer, result in zip(chain, buffers, results, strict=True)
    ]


def process_of(tier: DiskWorkerClient) -> subprocess.Popen[bytes]:
    assert tier._worker is not None
    return tier._worker.process


# The tier.


async def test_it_keeps_the_contract_of_a_tier(tmp_path: Path) -> None:
    clock = VirtualClock()
    with memory() as arena:

        def make(namespace: Namespace) -> Bounced:
            return Bounced(
                DiskWorkerClient([tmp_path / "g3"], 64 * 64 * 1024, namespace, clock=clock, arena=arena), arena
            )

        await check_tier(make, clock, block_bytes=BLOCK)


def test_every_verb_of_a_local_tier_is_served() -> None:
    def of(kind: type) -> set[str]:
        return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}

    every = of(Tier) | of(Retaining) | of(Notebook) | of(Describing) | of(Resizable)
    assert every == set(protocol.verbs()) | {"peek", "usage", "check"}
    assert set(protocol.verbs()) <= set(dir(DiskWorkerClient)) and set(protocol.verbs()) <= set(dir(DiskTier))


async def test_retention_and_saved_state_outlive_its_process(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 4)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            await put(tier, arena, chain)
            until_time = tier._clock.wall() + 600
            assert await tier.retain([*chain[:2], chain_of(NAMESPACE, 1, seed=9)[0]], until_time) == [True, True, False]
            await tier.release_retained(chain[1:2])
            await tier.write_note("clock", b"\0note")
            _, purges, _ = await tier.write_contents(0, [], 0)
            assert await tier.write_contents(0, [b"tokens"], purges) == (1, purges, [])
        async with opened(tmp_path / "g3", arena) as tier:
            assert await tier.retained() == {chain[0]: pytest.approx(until_time, abs=1)}
            assert await tier.read_notes("clo") == {"clock": b"\0note"}
            assert await tier.read_contents(0) == (1, [b"tokens"])
            assert await tier.drop_made_after(tier._clock.wall() - 3600) == 4


async def test_a_peek_tells_what_was_seen_and_asks_nobody(tmp_path: Path) -> None:
    chain, other = chain_of(NAMESPACE, 4), chain_of(NAMESPACE, 64, seed=1)
    clock = VirtualClock()
    with memory() as arena:
        async with opened(tmp_path / "g3", arena, blocks=64, clock=clock) as tier:
            gone: list[BlockKey] = []
            tier.subscribe(lambda keys, stored: gone.extend(keys))
            assert tier.peek(chain, range(4)) == [Miss.LATE] * 4
            await put(tier, arena, chain)
            assert tier.peek(chain, [0, 3]) == [None, None]
            clock.advance(client.SEEN_S + 1)
            assert tier.peek(chain, [0, 3]) == [Miss.LATE] * 2, "it was seen too long ago"
            assert await tier.lookup(chain, range(4), clock.monotonic() + FAR_S) == [None] * 4
            assert tier.peek(chain, range(4)) == [None] * 4
            await put(tier, arena, other)
            await until(lambda: len(gone) == 4)
            assert set(gone) == set(chain) and tier.peek(chain, range(4)) == [Miss.LATE] * 4, "evicted for others"
            assert tier.usage().evictions == 4
            await tier.evict(other[:1])
            assert tier.peek(other, [0, 1]) == [Miss.LATE, None]


async def test_memory_that_is_not_the_arenas_is_refused(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 1)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            with pytest.raises(TierError, match="not the arena's memory"):
                await tier.read(chain, [Target(0, (memoryview(bytearray(BLOCK)),))], tier._clock.monotonic() + 1)
            assert await put(tier, arena, chain) == [Stored.STORED]


def test_a_span_names_the_same_bytes_on_both_sides() -> None:
    with memory(2 * BLOCK, ranks=2) as arena:
        here, there = SharedArena(arena.views()), SharedArena.map(arena.fds())
        pieces = arena.pieces(3)
        spans = here.spans((pieces[1], pieces[0][100:200]))
        assert spans == [(1, 3 * arena.slot_bytes, BLOCK), (0, 3 * arena.slot_bytes + 100, 100)]
        there.pieces(spans)[0][:4] = b"left"
        assert bytes(pieces[1][:4]) == b"left"
        size = arena.slots * arena.slot_bytes
        for wrong in [(2, 0, 1), (-1, 0, 1), (0, size, 1), (0, -1, 1), (0, 1, size), (0, 5, -1)]:
            with pytest.raises(ValueError, match="has no"):
                there.pieces([wrong])  # type: ignore[list-item]
        del pieces, here, there


async def test_what_is_wrong_with_the_store_is_said_by_its_own_error(tmp_path: Path) -> None:
    with memory() as arena:
        with pytest.raises(ConfigError, match="smaller than one block"):
            async with opened(tmp_path / "g3", arena, blocks=0):
                raise AssertionError("opened")
        async with opened(tmp_path / "g3", arena) as tier:
            running = process_of(tier)
        assert running.poll() == 0, "closing ends the process"
        marker = tmp_path / "g3" / "STORE.json"
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 2}))
        with pytest.raises(FormatError, match="format 2"):
            async with opened(tmp_path / "g3", arena):
                raise AssertionError("opened")
        with pytest.raises(ClosedError):
            await tier.lookup(chain_of(NAMESPACE, 1), [0], tier._clock.monotonic() + 1)


async def test_what_the_process_warns_of_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memory() as arena:
        async with opened(tmp_path / "g3", arena, blocks=64), opened(tmp_path / "g3", arena, blocks=32):
            await until(lambda: "for as long as others use it" in caplog.text)


# Its process fails.


async def test_a_killed_process_costs_misses_and_is_replaced(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 8)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            await put(tier, arena, chain)
            for _ in range(2):
                old = process_of(tier)
                os.kill(old.pid, signal.SIGSTOP)
                reading = asyncio.create_task(get(tier, arena, chain))
                await until(lambda: "read" in [verb for verb, _ in tier._worker._waiting.values()])
                old.kill()
                with pytest.raises(TierError, match="process ended"):
                    await reading
                with pytest.raises(TierError, match="not started again yet"):
                    await tier.lookup(chain, [0], tier._clock.monotonic() + 1)
                with pytest.raises(TierError):
                    tier.peek(chain, [0])
                await until(lambda: tier._worker is not None)
                assert tier.peek(chain, [0]) == [Miss.LATE]
                assert await get(tier, arena, chain) == [True] * 8
                tier.check()


@pytest.mark.parametrize("left", [0, 2 * 4096])
async def test_an_index_cut_short_under_it_ends_the_process_and_not_its_caller(tmp_path: Path, left: int) -> None:
    """LMDB reads through a map, where a page that is gone is SIGBUS."""
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            chain = chain_of(NAMESPACE, 16)
            assert await put(tier, arena, chain) == [Stored.STORED] * 16
            first = process_of(tier)
            os.truncate(tmp_path / "g3" / "index" / "data.mdb", left)
            end = time.monotonic() + 30
            while True:
                with contextlib.suppress(TierError):
                    stored, found = await put(tier, arena, chain), await get(tier, arena, chain)
                    if stored == [Stored.STORED] * 16 and found == [True] * 16:
                        break
                assert time.monotonic() < end, "the tier did not come back"
                await asyncio.sleep(0.05)
            assert process_of(tier) is not first and first.returncode == -signal.SIGBUS
            assert tier.restarts()["g3 process"] >= 1


async def test_kills_while_writing_leave_whole_blocks_or_none(tmp_path: Path) -> None:
    durable: list[BlockKey] = []
    with memory() as arena:
        async with opened(tmp_path / "g3", arena, blocks=SLOTS) as tier:
            for seed in range(4):
                chain = chain_of(NAMESPACE, 32, seed)
                writing = asyncio.create_task(put(tier, arena, chain))
                await asyncio.sleep(0.002 * seed)
                process_of(tier).kill()
                try:
                    durable += [key for key, result in zip(chain, await writing, strict=True) if result.durable]
                except TierError:
                    pass
                await until(lambda: tier._worker is not None)
                assert await get(tier, arena, durable) == [True] * len(durable), "a durable block is gone or wrong"
                assert set(await get(tier, arena, chain)) <= {True, Miss.ABSENT}
            await until(lambda: tier._worker is not None)
            chain = chain_of(NAMESPACE, 32, 99)
            assert await put(tier, arena, chain) == [Stored.STORED] * 32, "slots of ended processes are in use"
            tier.check()


async def test_a_cancelled_read_ends_a_frozen_process_before_its_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CANCEL_S", 0.2)
    chain = chain_of(NAMESPACE, 4)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            await put(tier, arena, chain)
            running = process_of(tier)
            os.kill(running.pid, signal.SIGSTOP)
            reading = asyncio.create_task(get(tier, arena, chain))
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert running.poll() == -signal.SIGKILL, "it could still write to the blocks' memory"
            looking = asyncio.create_task(get(tier, arena, chain))
            with pytest.raises(TierError):
                await looking
            await until(lambda: tier._worker is not None)
            assert await get(tier, arena, chain) == [True] * 4


async def test_a_cancelled_read_of_a_live_process_costs_nothing_else(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 32)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            await put(tier, arena, chain)
            running = process_of(tier)
            for _ in range(20):
                reading = asyncio.create_task(get(tier, arena, chain))
                await asyncio.sleep(0)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            assert await get(tier, arena, chain) == [True] * 32
            assert process_of(tier) is running


async def test_closing_a_frozen_process_is_bounded(tmp_path: Path) -> None:
    with memory() as arena:
        tier = DiskWorkerClient([tmp_path / "g3"], 64 * BLOCK, NAMESPACE, clock=SystemClock(), arena=arena)
        await tier.open()
        running = process_of(tier)
        os.kill(running.pid, signal.SIGSTOP)
        began = time.monotonic()
        await tier.close(tier._clock.monotonic() + 0.3)
        assert time.monotonic() - began < 20
        assert running.poll() == -signal.SIGKILL


async def test_touches_do_not_pile_up_for_a_frozen_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "UNSENT_BYTES_MAX", 1 << 20)
    chain = chain_of(NAMESPACE, 1000)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            worker = tier._worker
            assert worker is not None
            os.kill(worker.process.pid, signal.SIGSTOP)
            for _ in range(200):
                tier.touch(chain, tier._clock.wall())
            assert worker._writer.transport.get_write_buffer_size() < 2 << 20
            os.kill(worker.process.pid, signal.SIGCONT)
            await put(tier, arena, chain[:4])
            assert await get(tier, arena, chain[:4]) == [True] * 4


async def test_nonsense_from_the_process_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain = chain_of(NAMESPACE, 4)
    with memory() as arena:
        async with opened(tmp_path / "g3", arena) as tier:
            await put(tier, arena, chain)
            worker = tier._worker
            assert worker is not None
            monkey = protocol.verbs()["lookup"].result
            answer = asyncio.get_running_loop().create_future()
            worker._waiting[-1] = ("lookup", answer)
            with pytest.raises(Exception, match="Expected"):
                monkey.decode(protocol.packed({"no": "list"}))
            reader = asyncio.StreamReader()
            reader.feed_data(protocol.frame(protocol.Answer(-1, protocol.packed({"no": "list"}), None)))
            await worker._listen(reader)
            assert "not understood" in caplog.text
            with pytest.raises(TierError):
                await answer
            await until(lambda: tier._worker not in (None, worker))
            assert await get(tier, arena, chain) == [True] * 4


def test_a_process_that_cannot_be_started_leaves_the_tier_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_at(tmp_path)
    for executable in ("/nonexistent/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with kvtier.open(config, NAMESPACE, computes=True) as cache:
            chain = chain_of(NAMESPACE, 2)
            assert cache.put(chain, payloads_of(chain, BLOCK)) == 2
            assert cache.stats()["g3"] == {"health": "out"}
    assert caplog.text.count("g3 is left out") == 2


# In a cache.


def config_at(path: Path) -> kvtier.Config:
    g3 = {"path": str(path / "g3"), "capacity": "16MiB"}
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": "1MiB"}, "g3": g3}})


def test_it_is_for_processes_in_which_a_model_computes(tmp_path: Path) -> None:
    for computes, kind in {False: DiskTier, True: DiskWorkerClient}.items():
        with kvtier.open(config_at(tmp_path), NAMESPACE, computes=computes) as cache:
            assert type(cache.manager.lower["g3"].inner.inner) is kind
    assert isinstance(lower_tiers(config_at(tmp_path), NAMESPACE, SystemClock())[0], DiskTier)


def test_a_cache_lives_through_frozen_and_killed_processes(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 64)
    with kvtier.open(config_at(tmp_path), NAMESPACE, computes=True) as cache:
        tier = cache.manager.lower["g3"].inner.inner
        assert isinstance(tier, DiskWorkerClient)
        cache.put(chain, payloads_of(chain, BLOCK))
        cache.flush()
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            cache.evict("g2")
            os.kill(process_of(tier).pid, blow)
            began = time.monotonic()
            with cache.get(chain, timeout=0.3) as hit:
                assert len(hit) == 0 and hit.miss in (Miss.LATE, Miss.ERROR)
            assert time.monotonic() - began < 20, "a sick process holds nobody up"
            if blow is signal.SIGSTOP:
                os.kill(process_of(tier).pid, signal.SIGCONT)
            for _ in range(200):
                with cache.get(chain) as hit:
                    if len(hit) == 64:
                        assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
                        break
                time.sleep(0.1)
            else:
                raise AssertionError("it did not come back")
        cache.check()


def test_it_ends_with_the_process_that_it_works_for(tmp_path: Path) -> None:
    code = f"""
import os, time, kvtier
from kvtier.testing import chain_of, payloads_of, sample_namespace
namespace = sample_namespace({BLOCK})
config = kvtier.Config.parse({{"tiers": {{"g2": {{"capacity": "1MiB"}},
    "g3": {{"path": {str(tmp_path / "g3")!r}, "capacity": "16MiB"}}}}}})
cache = kvtier.open(config, namespace, computes=True)
chain = chain_of(namespace, 16)
cache.put(chain, payloads_of(chain, {BLOCK}))
cache.flush()
if os.fork() == 0:
    time.sleep(3600)  # a fork holds the socket, too
print(cache.manager.lower["g3"].inner.inner._worker.process.pid, flush=True)
time.sleep(3600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment(), start_new_session=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    try:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{child}/task").exists() and time.monotonic() < deadline:
            state = Path(f"/proc/{child}/stat").read_text().rsplit(") ", 1)[1][0]
            if state == "Z":
                break
            time.sleep(0.05)
        else:
            assert not Path(f"/proc/{child}").exists(), "it outlives the cache"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()
    chain = chain_of(NAMESPACE, 16)
    with kvtier.open(config_at(tmp_path), NAMESPACE, computes=True) as cache, cache.get(chain) as hit:
        assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)


def test_a_fork_does_not_use_it(tmp_path: Path) -> None:
    with kvtier.open(config_at(tmp_path), NAMESPACE, computes=True) as cache:
        tier = cache.manager.lower["g3"].inner.inner
        pid = os.fork()
        if pid == 0:
            try:
                tier.peek(chain_of(NAMESPACE, 1), [0])
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_signals_to_the_group_do_not_end_it(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 4)
    with kvtier.open(config_at(tmp_path), NAMESPACE, computes=True) as cache:
        tier = cache.manager.lower["g3"].inner.inner
        assert isinstance(tier, DiskWorkerClient)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process_of(tier).pid, number)
        cache.put(chain, payloads_of(chain, BLOCK))
        assert cache.flush().durable == {"g3": 4}


def test_terms_and_salts_travel(tmp_path: Path) -> None:
    assert BUILTIN["5m"].ttl == 300
    with kvtier.open(config_at(tmp_path), NAMESPACE, computes=True) as cache:
        mine, other = (cache.chain_hashes(range(64), salt=salt) for salt in ("a", "b"))
        for keys in (mine, other):
            cache.put(keys, payloads_of(keys, BLOCK), "5m")
        cache.flush()
        assert cache.purge("a") >= 4
        cache.evict("g2")
        assert cache.match(mine) == 0 and cache.match(other) == 4


async def test_a_close_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    with memory() as arena:
        for turns in range(1, 4):
            tier = DiskWorkerClient([tmp_path / "g3"], 64 * BLOCK, NAMESPACE, clock=SystemClock(), arena=arena)
            await tier.open()
            running = process_of(tier)
            closing = asyncio.create_task(tier.close(tier._clock.monotonic() + 20))
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            await until(lambda running=running: running.poll() is not None)  # type: ignore[misc]


def test_keys_are_those_that_came_with_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_keys, "KEYS_MAX", 2)
    keys, scopes = given_keys.GivenKeys(), [Scope(bytes([number]) * 16) for number in range(3)]
    keys.give([GivenKey(scope, bytes(32), 1.0) for scope in scopes])
    assert keys.peek(scopes[0]) is Miss.NO_KEY, "others came"
    assert keys.obtain(scopes[2]).created == 1.0
    keys.give([GivenKey(scopes[2], b"", 0.0)])
    with pytest.raises(TierError, match="without its tenant's key"):
        keys.obtain(scopes[2])
