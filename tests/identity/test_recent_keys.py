"""As many blocks are remembered as was said, the latest."""

from __future__ import annotations

from kvtier.identity.keys import BlockKey
from kvtier.identity.recent_keys import RecentKeys


def test_the_latest_blocks_are_remembered() -> None:
    recent, keys = RecentKeys(512), [BlockKey(number.to_bytes(48, "big")) for number in range(3_000)]
    for number, key in enumerate(keys):
        recent.put(keys[0], -1)
        recent.put(key, number)
    assert recent.get(keys[0]) == -1 and recent.get(keys[-1]) == 2_999 and recent.get(keys[1]) is None
    assert 400 <= len(recent) <= 512
