"""A request's usage, as APIs with prompt caches report it."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.config import Config
from kvtier.connectors.control import Controls
from kvtier.connectors.feedback import Feedback, usage_of
from kvtier.identity.keys import SHARED
from kvtier.testing import chain_of, sample_namespace

TOKENS = 16
CONTROLS = Controls(Config())


@pytest.mark.parametrize(
    ("raw", "cached", "right"),
    [
        ({"retention": "1h"}, {"g1": 0}, {"1h": 160}),
        ({"retention": "5m"}, {"g1": 32, "g2": 16, "g3": 48}, {"5m": 64}),
        ({"retention": "5m", "ranges": [[0, 96, "1h"], [96, 128, "24h"]]}, {"g1": 48}, {"1h": 48, "24h": 32, "5m": 32}),
        ({"retention": "5m", "store": False}, {"g2": 16}, {}),
        ({"retention": "5m"}, {"g1": 160}, {}),
    ],
)
def test_cached_tokens_by_tier_and_the_rest_by_class(
    raw: dict[str, Any], cached: dict[str, int], right: dict[str, int]
) -> None:
    used = usage_of(CONTROLS.parse({**raw, "usage": True}), 10, TOKENS, cached)
    total = sum(cached.values())
    by_tier = {tier: count for tier, count in cached.items() if count}
    assert used == {"cached_tokens": total, "by_tier": by_tier, "cache_creation": right}
    assert "store" in raw or total + sum(right.values()) == 160


def test_only_who_asks_is_told() -> None:
    feedback, prompt = Feedback(TOKENS, 0.5), chain_of(sample_namespace(), 4)
    silent = feedback.of("a", SHARED, CONTROLS.parse({}), prompt, {"g2": 16}, None, 1)
    assert silent == {"tokens_read": {"g2": 16}}
    asked = feedback.of("b", SHARED, CONTROLS.parse({"usage": True, "retention": "1h"}), prompt, {"g2": 16}, None, 1)
    assert asked["usage"] == {
        "cached_tokens": 32,
        "by_tier": {"g1": 16, "g2": 16},
        "cache_creation": {"1h": 32},
    }
    refused = CONTROLS.parse({"usage": "yes"})
    assert not refused.store and not refused.usage, "parameters that cannot be read: not cached, with a warning"
