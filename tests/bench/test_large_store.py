"""The turnover of a large store replaces every block, and times each transaction."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.bench.tiers import large_store
from kvtier.clock import SystemClock
from kvtier.tiers.disk.tier import DiskTier

BLOCKS = 512


async def test_a_turnover_replaces_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_store, "BATCH_BLOCKS", 32)
    monkeypatch.setattr(large_store, "IN_FLIGHT", 2)
    large_store.fill(tmp_path, BLOCKS)
    path, clock = tmp_path / "large", SystemClock()
    tier = DiskTier([path], large_store._capacity(BLOCKS), large_store._NAMESPACE, clock=clock)
    await tier.open()
    try:
        puts = large_store._Puts(tier, clock)
        await puts.rate(0.01)
        held = tier.usage().blocks
        found = await large_store._turnover(path, puts, held)
        assert found["blocks"] >= held and tier.usage().blocks >= BLOCKS
        old = large_store._keys(b"filled", 0, BLOCKS)
        assert None not in tier.peek(old, range(BLOCKS)), "one is left"
        assert 0 < found["transaction_cpu_ms"]["p50"] <= found["transaction_cpu_ms"]["max"]
        slowest = found["slowest_transaction"]
        assert slowest["cpu_ms"] == found["transaction_cpu_ms"]["max"] > slowest["before_commit_cpu_ms"] > 0
        assert 0 <= slowest["collector_cpu_ms"] < slowest["cpu_ms"]
        assert found["index_bytes_written_per_put"] > 0
        transact = tier._store.index.transact
        assert transact.__func__ is type(tier._store.index).transact, "it is timed no longer"  # type: ignore[attr-defined]
    finally:
        await tier.close(clock.monotonic() + 60)


async def test_a_store_that_shrinks_keeps_half_and_takes_puts_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_store, "BATCH_BLOCKS", 32)
    monkeypatch.setattr(large_store, "IN_FLIGHT", 2)
    monkeypatch.setattr(large_store, "ALONE_S", 0.02)
    large_store.fill(tmp_path, BLOCKS)
    found = await large_store._shrink(tmp_path / "large", BLOCKS // 2, SystemClock())
    assert found["puts"] and BLOCKS // 2 <= found["blocks"] <= large_store._capacity(BLOCKS // 2) // 4096
    assert found["slab_bytes_over_capacity"] <= 1 and found["transactions"]
