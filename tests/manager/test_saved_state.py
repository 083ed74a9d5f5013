"""What is learned survives a restart, and what is damaged is a fresh start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.manager.saved_state import NOTE_BYTES_MAX
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.testing.memory import MemoryStore

BLOCK = 4096
NS = sample_namespace(BLOCK)


def learn(cache: kvtier.Cache, clock: VirtualClock) -> None:
    for turn in range(2, 12):
        keys = list(chain_of(NS, turn))
        cache.get(keys).release()
        cache.put(keys, payloads_of(keys, BLOCK))
        clock.advance(7)


def policy(cache: kvtier.Cache) -> Any:
    return cache.manager.host.policy


def test_what_the_policy_learned_survives_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    tiers = {"g2": {"capacity": 32 * BLOCK}, "g3": {"path": str(tmp_path), "capacity": 64 * BLOCK}}
    config = kvtier.Config.parse({"tiers": tiers, "policy": "gapduel"})
    with kvtier.open(config, NS, clock=clock) as cache:
        fresh = policy(cache).encode()
        learn(cache, clock)
        cache.manager.host.policy.train()
        learned = policy(cache).encode()
        assert learned != fresh and policy(cache).gap_s == pytest.approx(7, rel=0.1)
    with kvtier.open(config, NS, clock=clock) as cache:
        assert policy(cache).encode() == learned
    with kvtier.open(kvtier.Config.parse({"tiers": tiers, "policy": "lru"}), NS, clock=clock) as cache:
        cache.put(list(chain_of(NS, 2)), payloads_of(chain_of(NS, 2), BLOCK))


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"x" * (NOTE_BYTES_MAX + 1)])
def test_a_damaged_note_is_a_fresh_start(damage: bytes) -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 32 * BLOCK}}})
    with kvtier.open(config, NS, clock=clock, tiers=[MemoryTier(NS, clock, store=store)]) as cache:
        fresh = policy(cache).encode()
        learn(cache, clock)
    store.notes.update(policy=damage, clock=damage)
    with kvtier.open(config, NS, clock=clock, tiers=[MemoryTier(NS, clock, store=store)]) as cache:
        assert policy(cache).encode() == fresh
        learn(cache, clock)
        assert cache.match(list(chain_of(NS, 11))) == 11


@pytest.mark.parametrize("verb", ["read_notes", "write_note", "retained", "retain"])
def test_a_tier_that_remembers_nothing_costs_what_was_learned_only(verb: str) -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    tier = FaultyTier(MemoryTier(NS, clock, store=store), [Fault(verb, "crash")])
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 32 * BLOCK}}})
    with kvtier.open(config, NS, clock=clock, tiers=[tier]) as cache:
        learn(cache, clock)
        assert cache.flush().durable == {"g3": 11}
