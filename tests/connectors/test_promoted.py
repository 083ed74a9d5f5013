"""Promotions for requests: where blocks were found, why they end, and who releases their leases."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kvtier.connectors.promoted import Promoted
from kvtier.manager.lease import Lease
from kvtier.tiers.protocol import Miss


def lease_of(tiers: Sequence[str], released: list[Any], miss: Miss | None = Miss.ABSENT) -> Lease:
    slots: Any = [(object(), 0)] * len(tiers)
    return Lease(slots, tiers, miss, released.append)


def test_blocks_were_found_where_the_promotion_says_and_else_in_g2() -> None:
    future: Future[Lease] = Future()
    promoted = Promoted(future, start=2)
    assert (promoted.done, promoted.lease(), promoted.tiers(1, 3)) == (False, None, ["g2"] * 3)
    assert promoted.miss() is promoted.miss(9) is Miss.LATE
    lease = lease_of(["g2", "g3", "g4"], [], Miss.CORRUPT)
    future.set_result(lease)
    assert (promoted.done, promoted.lease()) == (True, lease)
    assert promoted.tiers(1, 5) == ["g2", "g2", "g3", "g4", "g2"]
    assert (promoted.miss(), promoted.miss(5), promoted.miss(4)) == (Miss.CORRUPT, Miss.CORRUPT, None)


@pytest.mark.parametrize("how", ["none", "cancelled", "failed"])
def test_a_promotion_that_brought_nothing_says_nothing(how: str) -> None:
    future: Future[Lease] = Future()
    if how == "cancelled":
        future.cancel()
    elif how == "failed":
        future.set_exception(RuntimeError("gone"))
    promoted = Promoted(None if how == "none" else future)
    assert (promoted.done, promoted.lease(), promoted.miss(0), promoted.tiers(0, 1)) == (True, None, None, ["g2"])
    promoted.abandon()


@pytest.mark.parametrize("ends", ["before", "after"])
def test_an_abandoned_promotion_releases_its_lease_whenever_it_ends(ends: str) -> None:
    released: list[Any] = []
    future: Future[Lease] = Future()
    future.set_running_or_notify_cancel()
    promoted = Promoted(future)
    if ends == "before":
        future.set_result(lease_of(["g3"], released))
    promoted.abandon()
    promoted.abandon(cancel=False)
    if ends == "after":
        assert not released
        future.set_result(lease_of(["g3"], released))
    assert len(released) == 1


def test_abandoning_stops_a_promotion_unless_it_may_go_on() -> None:
    for cancel in (True, False):
        future: Future[Lease] = Future()
        Promoted(future).abandon(cancel=cancel)
        assert future.cancelled() is cancel
