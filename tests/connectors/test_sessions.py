"""Sessions: their branches, what a branch that ended leaves, and their bounds."""

from __future__ import annotations

from kvtier.connectors.sessions import BRANCHES_MAX, Sessions
from kvtier.identity.keys import SHARED, scope_of
from kvtier.testing import chain_of, sample_namespace

NS = sample_namespace()
CHAIN, OTHER = chain_of(NS, 9), chain_of(NS, 9, 1)


def test_a_branch_that_goes_on_takes_the_place_of_the_earlier_one() -> None:
    sessions = Sessions()
    for length in (3, 6, 9, 6):
        assert sessions.record(SHARED, "s", CHAIN[:length]) == []
        assert sessions.blocks(SHARED, "s") == CHAIN[: max(length, len(sessions.blocks(SHARED, "s")))]
    assert sessions.latest(SHARED, "s") == tuple(CHAIN)
    sessions.record(SHARED, "s", OTHER)
    assert sessions.latest(SHARED, "s") == tuple(OTHER) and set(sessions.blocks(SHARED, "s")) == {*CHAIN, *OTHER}


def test_of_a_branch_too_many_only_its_own_blocks_are_over() -> None:
    sessions = Sessions()
    branches = [[*CHAIN[:4], *chain_of(NS, 2, seed)] for seed in range(20, 20 + BRANCHES_MAX + 1)]
    for branch in branches[:-1]:
        assert sessions.record(SHARED, "s", branch) == []
    assert sessions.record(SHARED, "s", branches[-1]) == branches[0][4:], "the shared head is of the others, too"
    assert not set(branches[0][4:]) & set(sessions.blocks(SHARED, "s"))


def test_sessions_are_of_their_scope_and_bounded() -> None:
    sessions = Sessions(sessions_max=3, blocks_max=20)
    assert sessions.record(SHARED, "", CHAIN) == [] and len(sessions) == 0
    sessions.record(scope_of("a"), "s", CHAIN)
    assert sessions.latest(SHARED, "s") == () and sessions.blocks(scope_of("b"), "s") == []
    sessions.forget(scope_of("a"), "s")
    sessions.record(SHARED, "s", CHAIN)
    for name in "tuvw":
        sessions.record(SHARED, name, CHAIN[:5])
    assert len(sessions) == 3 and sessions.latest(SHARED, "s") == ()
    sessions.record(SHARED, "w", OTHER)
    assert len(sessions) == 2, "20 blocks of those that rested least"
    sessions.forget(SHARED, "w")
    sessions.forget(SHARED, "w")
    assert len(sessions) == 1


def test_nobodys_flood_forgets_another_tenants_sessions() -> None:
    """By names, and by blocks; a tenant alone may have all."""
    for sessions, chain in ((Sessions(sessions_max=40), CHAIN[:1]), (Sessions(blocks_max=20 * len(CHAIN)), CHAIN)):
        sessions.record(scope_of("a"), "s", OTHER[:3])
        for number in range(200):
            sessions.record(scope_of("b"), f"{number}", chain)
        assert sessions.latest(scope_of("a"), "s") == tuple(OTHER[:3])
        assert sessions.latest(scope_of("b"), "199") == tuple(chain) and sessions.latest(scope_of("b"), "0") == ()
        assert len(sessions) >= 19, "what the others do not use is its"
        for number in range(200):
            sessions.forget(scope_of("b"), f"{number}")
        assert len(sessions) == 1
