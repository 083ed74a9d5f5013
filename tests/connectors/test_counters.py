"""Counters between two reports, and runs of blocks."""

from __future__ import annotations

from collections import Counter

from kvtier.connectors.counters import EVENTS, TOKENS_READ, Growth, tokens_by_tier


def test_growth_is_reported_once() -> None:
    growth: Growth[str] = Growth()
    totals = Counter(stored=2, late=0)
    assert growth.since_last(totals) == {"stored": 2}
    assert growth.since_last(totals) == {}
    totals.update(stored=1, late=1)
    assert growth.since_last(totals) == {"stored": 1, "late": 1}
    assert growth.since_last({"stored": 1}) == {}, "what shrinks has not grown"
    assert growth.since_last({"stored": 4}) == {"stored": 1}


def test_tokens_are_counted_by_the_tier_of_their_blocks() -> None:
    assert tokens_by_tier(["g2", "g3", "g2"], 16) == {"g2": 32, "g3": 16}
    assert tokens_by_tier([], 16) == {}


def test_the_engines_counters_keep_their_names() -> None:
    assert (TOKENS_READ.name, TOKENS_READ.label) == ("kvtier_tokens_read", "tier")
    assert (EVENTS.name, EVENTS.label) == ("kvtier_events", "event")
