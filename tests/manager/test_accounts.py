"""What requests are told about themselves: tokens read by tier, written by class, and why the rest was missing."""

from __future__ import annotations

import math
from typing import Any

import pytest

import kvtier
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.manager.accounts import LOSSES_MAX, OTHER, Accounts, Losses
from kvtier.retention.terms import Terms
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.protocol import Loaded, Miss, Tier
from tests.retention.support.requests import BLOCK, NS, opened, put

T = NS.block_tokens
KEYS = list(chain_of(NS, 8))


def missed(cache: kvtier.Cache, keys: list[bytes], **options: object) -> dict[str, int]:
    with cache.get(keys, **options) as hit:  # type: ignore[arg-type]
        assert hit.account.asked == sum(hit.account.read.values()) + sum(hit.account.missed.values())
        return hit.account.missed


def test_a_request_is_told_what_it_read_and_wrote() -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)]) as cache:
        put(cache, KEYS[:6])
        cache.flush()
        cache.evict("g2")
        cache.prewarm(KEYS[:2])
        with cache.get(KEYS, request_id="r1") as hit:
            assert hit.account.read == {"g2": 2 * T, "g3": 4 * T} and hit.account.missed == {"absent": 2 * T}
        cache.put(KEYS, payloads_of(KEYS[6:], BLOCK), [(0, 7 * T, "1h")], start=6, request_id="r1")
        account = cache.account("r1")
        assert account is not None and account.asked == 8 * T
        assert account.written == {"1h": T, "24h": T}
        assert cache.account("r2") is None
        totals = cache.stats()["requests"]
        assert totals["written_tokens"] == {"24h": 7 * T, "1h": T}
        assert totals["lookups"] == totals["hits"] + sum(totals["misses"].values())


def test_every_reason_has_its_name() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    tier = FaultyTier(MemoryTier(NS, clock, store=store))
    with opened(clock, [tier]) as cache:
        assert missed(cache, KEYS) == {"absent": 8 * T}
        put(cache, KEYS, retention="5m")
        cache.flush()
        cache.evict("g2")
        store.damage(NS.digest + KEYS[3])
        assert missed(cache, KEYS) == {"corrupt": 5 * T}
        assert missed(cache, KEYS) == {"corrupt": 5 * T}, "a later request hears of it, too"
        clock.advance(301)
        assert missed(cache, KEYS) == {"expired": 8 * T}
        fresh = list(chain_of(NS, 4, seed=1))
        put(cache, fresh)
        cache.flush()
        cache.evict("g2")
        cache.manager.lost([BlockKey(key) for key in chain_of(NS, 2, seed=2)], Miss.SPILL_LOST)
        assert missed(cache, list(chain_of(NS, 2, seed=2))) == {"spill_lost": 2 * T}
        tier.faults.append(Fault("read", "hang"))
        assert missed(cache, fresh, timeout=0.05) == {"late": 4 * T}
        assert missed(cache, list(chain_of(NS, 2, seed=3))) == {"no_room": 2 * T}, "its reads hold its share of G2"


def test_what_left_for_others_is_not_called_absent() -> None:
    with opened(VirtualClock(), []) as cache:
        for seed in range(4):
            put(cache, list(chain_of(NS, 8, seed=seed)))
        assert set(missed(cache, KEYS)) == {"evicted"}


def test_a_full_quota_is_named() -> None:
    with opened(VirtualClock(), [], retention={"quota": 0.25}) as cache:
        mine = list(chain_of(NS, 6, scope=scope_of("a")))
        with cache.get(mine):
            assert put(cache, mine) == 4
        assert missed(cache, mine) == {"quota": 2 * T}
        assert cache.stats()["g2"]["refused"] == {"quota": 1}


def test_a_request_is_compared_with_an_earlier_one() -> None:
    with opened(VirtualClock(), []) as cache:
        tokens = list(range(8 * T))
        other = [*tokens[: 5 * T], 9, *tokens[5 * T + 1 :]]
        missed(cache, cache.chain_hashes(tokens), request_id="r1")
        for changed, expected in ((tokens, 8), (other, 5), (tokens[: 3 * T], 3), ([7, *tokens[1:]], 0)):
            with cache.get(cache.chain_hashes(changed), compared_with="r1") as hit:
                assert hit.account.diverged_at == expected
        with cache.get(cache.chain_hashes(tokens), compared_with="nobody") as hit:
            assert hit.account.diverged_at is None


def test_accounts_are_bounded() -> None:
    losses = Losses(4)
    keys = [BlockKey(bytes(40) + n.to_bytes(8, "big")) for n in range(6)]
    for key in keys:
        losses.record(key, Miss.EVICTED)
    assert len(losses) == 4 <= LOSSES_MAX and losses.why(keys[0]) is Miss.ABSENT and losses.why(keys[5]) is Miss.EVICTED
    accounts = Accounts(16, ["24h"])
    for number in range(2000):
        accounts.record_written([f"class-{number}", "24h"], f"r{number}")
    assert accounts.written == {"24h": 2000, OTHER: 2000}
    assert accounts.known("r0") is None and accounts.known("r1999") is not None


def test_a_block_goes_down_when_enough_requests_have_wanted_it() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    tiers: list[Tier] = [MemoryTier(NS, clock, store=store)]
    with opened(clock, tiers, offload={"store_threshold": 2}) as cache:
        assert put(cache, KEYS) == 8
        cache.flush()
        assert not store.entries
        put(cache, list(chain_of(NS, 4, seed=1)))
        cache.get(KEYS[:6]).release()
        assert cache.flush().durable == {"g3": 6}
        cache.get(KEYS).release()
        assert cache.flush().durable == {"g3": 8} and cache.stats()["requests"]["dropped"] == 0


def test_a_request_that_finds_a_part_counts_once() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    with opened(clock, [MemoryTier(NS, clock, store=store)], offload={"store_threshold": 3}) as cache:
        assert put(cache, KEYS[:4]) == 4
        cache.get(KEYS).release()  # the second to want them
        cache.flush()
        assert not store.entries
        cache.get(KEYS).release()
        assert cache.flush().durable == {"g3": 4}


def test_what_the_engine_has_itself_is_wanted_too() -> None:
    """Or the heads of chains, which never leave its memory, would never go down, and nothing below them."""
    clock, store = VirtualClock(), MemoryStore.empty()
    with opened(clock, [MemoryTier(NS, clock, store=store)], offload={"store_threshold": 2}) as cache:
        assert put(cache, KEYS) == 8
        cache.manager.pin(KEYS, 3).release()
        assert cache.flush().durable == {"g3": 8}
        other = list(chain_of(NS, 4, seed=1))
        assert put(cache, other) == 4
        cache.submit(cache.manager.promote(other, clock.monotonic() + 9, 3)).result().release()
        assert cache.flush().durable == {"g3": 12}


def test_short_prompts_stay_in_ram() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    with opened(clock, [MemoryTier(NS, clock, store=store)], offload={"min_prefix": 4 * T}) as cache:
        assert put(cache, list(chain_of(NS, 3, seed=1))) == 3
        assert put(cache, KEYS[:3]) == 3
        cache.flush()
        assert not store.entries
        assert put(cache, KEYS) == 8
        assert cache.flush().durable == {"g3": 8}, "its head goes down with it"


def test_a_wait_that_many_blocks_share_does_not_make_them_slower() -> None:
    """As after a restart, when short prompts come first: reads of a young process take long, whatever their size."""
    clock = VirtualClock()

    class Far(MemoryTier):
        async def read(self, *asked: Any) -> list[Loaded | Miss]:
            clock.advance(0.01)
            return await super().read(*asked)

    with opened(clock, [Far(NS, clock)]) as cache:
        put(cache, KEYS)
        cache.flush()
        cache.computed(8 * T, 0.024)
        for _ in range(3):
            cache.evict("g2")
            missed(cache, KEYS[:1])
        for _ in range(2):
            cache.evict("g2")
            assert missed(cache, KEYS) == {}
        cache.evict("g2")
        assert missed(cache, KEYS[:1]) == {"slower": T}


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)]) as cache:
        put(cache, KEYS)
        cache.flush()
        cache.evict("g2")
        cache.computed(8 * T, 0.008)
        for seconds in (0.08, 0.16):
            began = clock.monotonic()
            cache.manager.lower["g3"].read_cost.began()
            clock.advance(seconds)
            cache.manager.lower["g3"].read_cost.ended(int(100 * seconds), began, clock.monotonic())
        assert missed(cache, KEYS) == {"slower": 8 * T}
        clock.advance(61)
        assert missed(cache, KEYS) == {}, "a tier that was slow is tried again"
        for tokens, seconds in ((0, 1.0), (math.inf, 1.0), (T, math.inf), (T, -1.0), (math.nan, 1.0)):
            with pytest.raises(kvtier.InvalidRequest, match="tokens and seconds must be positive"):
                cache.computed(tokens, seconds)  # type: ignore[arg-type]


def test_a_time_that_no_engine_takes_is_not_weighed() -> None:
    """Infinite once, the mean was no number from then on, and nothing was loaded any more."""
    with opened(VirtualClock(), []) as cache:
        for tokens, seconds in ((1, 0.0), (1e-300, 1e300), (1, 1e308), (1e-3, 60.0)):
            cache.computed(tokens, seconds)  # type: ignore[arg-type]
            assert cache.manager.promoter.costs() is None
        cache.computed(T, 0.5)
        cache.computed(1, 1e308)
        costs = cache.manager.promoter.costs()
        assert costs is not None and costs.compute_s == 0.5


def test_a_prefix_is_warmed_for_a_request_to_come() -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)]) as cache:
        put(cache, KEYS)
        cache.flush()
        cache.evict("g2")
        before = cache.stats()["requests"]["lookups"]
        assert cache.prewarm(KEYS) == 8 and cache.prewarm(list(chain_of(NS, 2, seed=9))) == 0
        assert cache.stats()["requests"]["lookups"] == before
        with cache.get(KEYS) as hit:
            assert hit.tiers == ["g2"] * 8


def test_a_foreign_class_is_counted_without_its_name() -> None:
    with opened(VirtualClock(), []) as cache:
        put(cache, KEYS, retention=Terms("tenant-7-secret", ttl=60))
        assert cache.stats()["requests"]["written_tokens"] == {OTHER: 8 * T}
