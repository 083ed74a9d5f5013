"""Slots are reserved for what is not here or is dead, and for nothing that was purged since the verb began."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier import put as put_module
from kvtier.errors import InvalidRequest
from kvtier.identity.keys import tenant_of
from kvtier.manager.work import WorkUnderWay
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, chain_of, payloads_of
from kvtier.tiers.host.slot_table import KINDS_MAX, SlotTable
from kvtier.times import Wall
from tests.retention.support.requests import BLOCK, NS, opened, put, served

KEYS = list(chain_of(NS, 6))


def test_a_block_whose_time_is_over_is_not_here() -> None:
    """It is computed and stored anew: its old bytes do not get the new terms."""
    clock, brief = VirtualClock(), Terms("brief", ttl=10)
    with opened(clock, []) as cache:
        put(cache, KEYS, retention=brief)
        clock.advance(11)
        slots, reached = cache.manager.reserve(KEYS, 0, 6, brief)
        assert reached == 6 and [slot.index for slot in slots] == list(range(6))
        cache.manager.abort(slots, [slot.generation for slot in slots])
        assert served(cache, KEYS) == 0


@pytest.mark.parametrize(("before", "lost"), [(99.0, False), (100.0, True), (101.0, True)])
def test_a_purge_of_the_moment_in_which_a_verb_began_holds_for_it(before: float, lost: bool) -> None:
    """Clocks stand still for milliseconds: of two events of one moment, the purge is the later."""
    under_way = WorkUnderWay()
    work = under_way.begin(Wall(100.0))
    under_way.purge({tenant_of(KEYS[0]): Wall(before)})
    assert work.lost(KEYS[:1]) is lost


def test_a_chain_longer_than_g2_keeps_its_head() -> None:
    """Without a lower tier its own tail would evict it, and nothing of the chain could be served."""
    with opened(VirtualClock(), [], blocks=4, policy="lru") as cache:
        assert cache.put(KEYS, payloads_of(KEYS, BLOCK), wait=False) == 4
        assert served(cache, KEYS) == 4


def test_a_copy_that_fails_leaves_no_slot_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no")

    with opened(VirtualClock(), []) as cache:
        host = cache.manager.host
        free = len(host._free)
        with monkeypatch.context() as patched:
            patched.setattr(put_module, "copy_in", fails)
            with pytest.raises(MemoryError):
                cache.put(KEYS, payloads_of(KEYS, BLOCK))
        assert not host.filling() and len(host._free) == free
        put(cache, KEYS)
        assert served(cache, KEYS) == 6


def test_a_reservation_that_is_interrupted_leaves_no_slot_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C on the caller's thread: nobody else could store or load these blocks any more."""
    calls, stamp_all = [], SlotTable.stamp_all

    def interrupted(self: SlotTable, *arguments: Any) -> None:
        stamp_all(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    keys = list(chain_of(NS, 40))  # two slices
    with opened(VirtualClock(), [], blocks=64) as cache:
        with monkeypatch.context() as patched:
            patched.setattr(SlotTable, "stamp_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.put(keys, payloads_of(keys, BLOCK))
        assert not cache.manager.host.filling() and len(cache.manager.host._free) == 64
        put(cache, keys)
        assert served(cache, keys) == 40


def test_a_class_of_its_own_for_each_request_costs_no_slot() -> None:
    """A column tells 65,536 names apart: the next one failed every put, with its slots reserved."""
    with opened(VirtualClock(), []) as cache:
        table = cache.manager.host.index.table
        for number in range(KINDS_MAX):
            table.kind_of(f"made up {number}")
        put(cache, KEYS, retention=Terms("one more", ttl=60))
        assert served(cache, KEYS) == 6 and len(table.names) == KINDS_MAX


def test_a_request_of_an_id_that_is_none_stores_nothing() -> None:
    """It failed when its blocks were counted, and these stayed pinned."""
    with opened(VirtualClock(), []) as cache:
        wrong: Any = ["7"]
        with pytest.raises(InvalidRequest, match="id must be a string"):
            cache.put(KEYS, payloads_of(KEYS, BLOCK), request_id=wrong)
        assert not cache.stats()["g2"]["pinned"] and not served(cache, KEYS)
        for ids in ({"request_id": wrong}, {"compared_with": wrong}):
            with pytest.raises(InvalidRequest, match="id must be a string"):
                cache.get(KEYS, **ids)
