"""Errors and interrupts in the middle of fetch and store: a copy keeps its memory, and no slot stays taken."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from kvtier import cache as byte_cache
from kvtier.connectors.transformers import PrefixCache
from kvtier.errors import TierError
from kvtier.kernels.copy import Lane
from kvtier.tiers.device.torch_pool import DevicePool
from tests.connectors.transformers.support.models import generate, prompt

torch = pytest.importorskip("torch")


def turn(prefixes: PrefixCache, model: Any, ids: Any) -> tuple[Any, int]:
    cache, hit = prefixes.fetch(ids)
    output = generate(model, ids, cache)
    prefixes.store(output, cache, attention_mask=torch.ones_like(output))
    prefixes.check()
    return output, hit


def stop_in_the_wait(pool: DevicePool, lane: Lane, patch: pytest.MonkeyPatch) -> Event:
    """The next wait for a copy is interrupted; copies on this lane start with the event that is returned."""
    engine: Any = pool._engine
    launch, started = engine._mover.launch, Event()

    class After:
        query = staticmethod(started.is_set)

    def late(on: Lane, moves: Any, gate: Any, behind: Any, show: Any) -> Any:
        return launch(on, moves, engine._mover.gate(After()) if on is lane else gate, behind, show)

    def wait(*_: object) -> bool:
        patch.setattr(engine, "wait", own)
        raise KeyboardInterrupt

    own = engine.wait
    patch.setattr(engine._mover, "launch", late)
    patch.setattr(engine, "wait", wait)
    return started


def nothing_is_taken(prefixes: PrefixCache) -> bool:
    pool, host = prefixes.pool, prefixes.cache.manager.host
    return not pool._copying and not any(pool._refs) and not host.quarantined and not host.stale_messages


def test_an_interrupted_store_leaves_its_memory_to_the_copy(
    config: Any, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots of G2 were free again while it wrote to them, and another block's bytes were written over."""
    ids = prompt(200)
    with PrefixCache(config(), model, clock=clock, tiers=[]) as prefixes:
        cold, _ = turn(prefixes, model, ids)
        turn(prefixes, model, prompt(100, seed=9))
        clock.advance(10)
        pool, host = prefixes.pool, prefixes.cache.manager.host
        dirty = pool.dirty
        started = stop_in_the_wait(pool, Lane.STORE, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            prefixes.step()
        flying = pool._engine.stats().in_flight  # type: ignore[union-attr]
        assert flying and host.quarantined == flying == len(pool._copying), "and the other run is dirty again"
        assert prefixes.step() == 0 and pool.dirty == dirty - flying
        started.set()
        assert pool.recovered() and pool.dirty == dirty
        clock.advance(10)
        assert prefixes.step() == dirty and nothing_is_taken(prefixes)
        pool.evict()
        output, hit = turn(prefixes, model, ids)
        assert hit == 192 and torch.equal(output, cold)


def test_an_interrupted_load_leaves_its_memory_to_the_copy(
    config: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots of G1 were nobody's, for good."""
    ids = prompt(200)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        cold, _ = turn(prefixes, model, ids)
        prefixes.flush()
        prefixes.pool.evict()
        started = stop_in_the_wait(prefixes.pool, Lane.LOAD, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            prefixes.fetch(ids)
        assert sum(prefixes.pool._refs) == 12
        started.set()
        assert prefixes.pool.recovered() and nothing_is_taken(prefixes)
        output, hit = turn(prefixes, model, ids)
        assert hit == 192 and torch.equal(output, cold)


def test_a_copy_that_the_device_does_not_take_costs_hits_only(
    config: Any, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as one that does not end: its slots were taken for good, in G1 and in G2."""
    ids = prompt(200)
    with PrefixCache(config(), model, clock=clock, tiers=[]) as prefixes:
        cold, _ = turn(prefixes, model, ids)
        prefixes.flush()
        prefixes.pool.evict()

        def refuse(*_: object) -> Any:
            raise TierError("g1", "record event", "out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(prefixes.pool._engine, "store", refuse)
            patch.setattr(prefixes.pool._engine, "load", refuse)
            output, hit = turn(prefixes, model, ids)
            assert hit == 192 and torch.equal(output, cold), "G2's bytes, straight onto the device"
            turn(prefixes, model, prompt(100, seed=9))
            clock.advance(10)
            dirty = prefixes.pool.dirty
            assert prefixes.step() <= 1 and nothing_is_taken(prefixes), "G2 has one of them already"
            assert prefixes.pool.dirty >= dirty - 1 > 0
        clock.advance(10)
        assert prefixes.step() >= dirty - 1 and nothing_is_taken(prefixes)


def test_a_block_that_cannot_be_written_gives_its_slot_back(
    config: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting a block takes device memory, which may have run out."""
    ids = prompt(100)

    def write(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with PrefixCache(config(), model, tiers=[]) as prefixes:
        cache, _ = prefixes.fetch(ids)
        output = generate(model, ids, cache)
        with monkeypatch.context() as patch:
            patch.setattr(prefixes, "_write", write)
            with pytest.raises(torch.OutOfMemoryError):
                prefixes.store(output, cache, attention_mask=torch.ones_like(output))
        assert nothing_is_taken(prefixes) and prefixes.pool.resident == 0
        assert prefixes.store(output, cache, attention_mask=torch.ones_like(output)) == 7


def test_a_cache_that_cannot_be_opened_leaves_none_open(
    config: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process could not open its G3 for itself again, and kept G2's memory."""
    opened: list[Any] = []
    own = byte_cache.open

    def attach(*_: object) -> None:
        raise TierError("g1", "open", "no libcuda")

    monkeypatch.setattr(byte_cache, "open", lambda *args, **named: opened.append(own(*args, **named)) or opened[-1])
    monkeypatch.setattr(DevicePool, "attach", attach)
    with pytest.raises(TierError, match="no libcuda"):
        PrefixCache(config(), model)
    assert opened[0].manager.closed


def test_a_close_that_is_interrupted_releases_everything(
    config: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = PrefixCache(config(), model, tiers=[])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prefixes._traffic, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prefixes.close()
    assert prefixes.cache.manager.closed and prefixes.pool._engine is None
