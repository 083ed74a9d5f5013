"""Verbs that wait for the tiers below: for so long in all, and what is purged meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.connectors.transformers import PrefixCache
from tests.connectors.transformers.support.models import generate, prompt

torch = pytest.importorskip("torch")


def turn(prefixes: PrefixCache, model: Any, ids: Any, **options: Any) -> None:
    cache, _ = prefixes.fetch(ids, **options)
    output = generate(model, ids, cache)
    prefixes.store(output, cache, attention_mask=torch.ones_like(output), **options)
    prefixes.check()


def test_a_store_in_parts_waits_once(config: Any, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part waited for as long as all of them may: minutes, where the tiers below took a block at a time."""
    ids = prompt(200)
    with PrefixCache(config(g1=2), model, clock=clock, tiers=[]) as prefixes:
        cache, _ = prefixes.fetch(ids)
        output = generate(model, ids, cache)
        offload, wait, waits = prefixes._traffic._offload, prefixes._traffic._wait, []

        def stuck(limit: int, ahead: int) -> int:
            """Space for a block comes after three seconds of each wait."""
            return offload(1, ahead) if waits and waits.pop() else 0

        def slow(deadline: Any, version: int) -> bool:
            left = deadline - clock.monotonic()
            clock.advance(max(0.0, min(left, 3.0)))
            waits.append(left >= 3)
            return bool(left > 0)

        monkeypatch.setattr(prefixes._traffic, "_offload", stuck)
        monkeypatch.setattr(prefixes._traffic, "_wait", slow)
        began = clock.monotonic()
        prefixes.store(output, cache, attention_mask=torch.ones_like(output), timeout=7.0)
        assert clock.monotonic() - began == 7.0
        monkeypatch.setattr(prefixes._traffic, "_offload", offload)
        monkeypatch.setattr(prefixes._traffic, "_wait", wait)
        prefixes.check()


def test_a_fetch_in_parts_waits_once(config: Any, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is longer than G2 comes in parts."""
    ids = prompt(200)
    with PrefixCache(config(g1=64, g2=2), model, clock=clock) as prefixes:
        turn(prefixes, model, ids)
        assert prefixes.flush().pending == 0
        get, waits = prefixes.cache.get, []

        def slow(chain: Any, timeout: float, **named: Any) -> Any:
            hit = get(chain, max(timeout, 1.0), **named)
            waits.append(min(timeout, 1.0))
            clock.advance(waits[-1])
            return hit

        for limit_s in (30.0, 2.5):
            prefixes.pool.evict()
            with monkeypatch.context() as patch:
                patch.setattr(prefixes.cache, "get", slow)
                assert prefixes.fetch(ids, timeout=limit_s)[1] > 64
            assert sum(waits) <= limit_s and len(waits) > 3
            waits.clear()


def test_a_purge_under_an_offload_leaves_nothing_of_it(
    config: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may wait for seconds, and a flush, too: by then G2 may have forgotten the purge, which is over."""
    ids = prompt(100)
    with PrefixCache(config(), model, tiers=[], tails=4) as prefixes:
        for salt in ("alice", "bob"):
            turn(prefixes, model, ids, salt=salt)
        pick, purges = prefixes.pool.pick, []

        def late(*arguments: Any, **named: Any) -> Any:
            picked = pick(*arguments, **named)
            if not purges:
                purges.append(prefixes.cache.purge("alice"))
                prefixes.cache.submit(prefixes.cache.manager._purger.forget()).result(10)
            return picked

        monkeypatch.setattr(prefixes.pool, "pick", late)
        assert prefixes.flush().pending == 0 and purges and not prefixes.pool.dirty
        prefixes.pool.evict()
        assert prefixes.fetch(ids, salt="alice")[1] == 0 and prefixes.fetch(ids, salt="bob")[1] == 96
        prefixes.check()
