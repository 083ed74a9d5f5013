"""Guarantees of many blocks that end at one time."""

from __future__ import annotations

import pytest

from kvtier.retention import guarantees
from kvtier.retention.guarantees import Guarantees
from kvtier.testing import chain_of, sample_namespace
from kvtier.times import Wall

KEYS = list(chain_of(sample_namespace(64), 5))


def test_blocks_of_one_time_end_together_though_they_are_in_several_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are gone leave their table, the latest one or an earlier one; the others end at their time."""
    monkeypatch.setattr(guarantees, "_LOOKED_AT_ONCE", 2)
    promised = Guarantees(5 * 64, 64)
    promised.reserve(KEYS, Wall(100.0))
    promised.drop(KEYS[0])
    promised.drop(KEYS[1])
    assert promised.expire(Wall(99.0)) == []
    assert promised.expire(Wall(101.0)) == KEYS[2:]
    promised.reserve(KEYS, Wall(200.0))
    assert promised.lacking(KEYS) == 0 and not promised.due(Wall(199.0)) and promised.due(Wall(201.0))
