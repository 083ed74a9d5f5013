"""GapDuel: what it learns, what it refuses, what survives a restart."""

from __future__ import annotations

import time

import pytest

from kvtier.errors import CorruptError
from kvtier.policies import gapduel, shadows
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU


def looping(users: int, length: int, rounds: int) -> list[tuple[float, list[bytes]]]:
    """Every user comes back in turn: LRU below the whole set hits nothing."""
    chains = [[b"%d-%d" % (user, depth) for depth in range(length)] for user in range(users)]
    return [(float(turn), chains[turn % users]) for turn in range(users * rounds)]


def test_a_loop_that_does_not_fit_is_served_from_the_part_that_does(make_owner):
    requests = looping(users=40, length=50, rounds=60)
    lru = make_owner(LRU(1000), 1000)
    duel = make_owner(GapDuel(1000), 1000)
    assert lru.run(requests) == 0
    assert duel.run(requests) > 20  # the ceiling is near 50 %, and it has to learn first
    assert duel.policy.refused > 0


def test_what_it_would_refuse_can_pass_through(make_owner):
    """Where blocks must go through this tier to reach deeper ones, none is refused and the hits are the same."""
    requests = looping(users=40, length=50, rounds=60)
    strict, passing = make_owner(GapDuel(1000), 1000), make_owner(GapDuel(1000, refuses=False), 1000)
    hits = strict.run(requests)
    for now, chain in requests:
        passing.request(now, chain)
        assert chain[-1] in passing.resident
        passing.policy.check(passing.resident)
    assert passing.policy.refused > 0
    assert 100 * passing.hits / passing.references > hits - 1


def test_where_everything_fits_it_is_lru(make_owner, make_sessions):
    requests = make_sessions(4, 800, 30)
    everything = len({key for _, chain in requests for key in chain})
    duel, lru = make_owner(GapDuel(everything), everything), make_owner(LRU(everything), everything)
    assert [duel.request(*r) for r in requests] == [lru.request(*r) for r in requests]
    assert duel.policy.stats()["switches"] == 0


@pytest.mark.parametrize("capacity", [9, 80, 500])
def test_shadows_hold_what_they_count(capacity, make_owner, make_sessions):
    owner = make_owner(GapDuel(capacity), capacity)
    for number, (now, chain) in enumerate(make_sessions(6, 700, 40)):
        owner.request(now, chain)
        if number % 10 == 0:
            owner.policy.check(owner.resident)
    for shadow in owner.policy._duel.shadows:
        assert 0 < shadow.used_blocks <= capacity


def test_the_first_shadow_hits_what_lru_hits(make_owner, make_sessions):
    """Equal but for ties in time, so times are made distinct here."""
    requests = [(now + number * 1e-3, chain) for number, (now, chain) in enumerate(make_sessions(7, 900, 40))]
    duel, lru = GapDuel(120), make_owner(LRU(120), 120)
    for now, chain in requests:
        duel.reference(chain, 0, now)
        (reference,) = duel._waiting
        floors = []
        duel.train()
        assert reference.blocks == len(chain) and not floors
        lru.request(now, chain)
    assert sum(s.used_blocks for s in duel._duel.shadows[:1]) == len(lru.resident)
    # The score fades only a little over so few references: undo it in the other's sum.
    fading, window = 0.0, duel._duel._window
    again = make_owner(LRU(120), 120)
    for now, chain in requests:
        fading = fading * 2.718281828459045 ** (-len(chain) / window) + again.request(now, chain)
    assert duel._duel.scores[0] == pytest.approx(fading)


def test_shadows_may_lag_behind_without_growing(make_owner, make_sessions):
    from kvtier.policies.gapduel import LAG_MAX

    policy = GapDuel(100)
    for now, chain in make_sessions(8, 500, 30):
        policy.reference(chain, 0, now)
        assert len(policy._waiting) <= LAG_MAX
    policy.train()
    assert not policy._waiting


def test_blocks_that_arrive_before_they_are_named_do_not_confuse_the_shadows():
    policy = GapDuel(10)
    chain = [b"a", b"b", b"c"]
    for key in chain:
        policy.insert(key)
    for now in range(3):
        policy.reference(chain, 3, float(now))
        policy.check(set(chain))
    assert policy._duel.shadows[0].used_blocks == 3


def test_what_it_learned_survives_a_restart(make_owner):
    requests = looping(users=40, length=50, rounds=60)
    before = make_owner(GapDuel(1000), 1000)
    before.run(requests)
    after = GapDuel(1000)
    after.restore(before.policy.encode())
    kept = ("rule", "score_0", "score_1", "score_2", "score_3", "gap_s")
    assert {k: after.stats()[k] for k in kept} == {k: before.policy.stats()[k] for k in kept}
    # With what it learned it does better from the first round on than without.
    informed, naive = make_owner(after, 1000), make_owner(GapDuel(1000), 1000)
    first = requests[: 40 * 6]
    assert informed.run(first) > naive.run(first)


def test_a_damaged_state_is_refused_and_changes_nothing():
    policy = GapDuel(10)
    good = policy.encode()
    for bad in (b"", good[:-1], good + b"\0", b"\1" + good[1:], good[:20] + b"\xff" + good[21:]):
        with pytest.raises(CorruptError):
            policy.restore(bad)
    assert policy.encode() == good
    policy.restore(good)


@pytest.mark.parametrize("kind", [LRU, GapDuel])
def test_a_reference_costs_a_bounded_number_of_steps(kind, make_owner):
    """Ten times the blocks cost about ten times the time: nothing on the way grows with what is resident."""

    def seconds(users: int) -> float:
        requests = looping(users, 200, 8)
        owner = make_owner(kind(users * 100), users * 100)
        began = time.process_time()
        owner.run(requests)
        return (time.process_time() - began) / users

    few, many = min(seconds(10) for _ in range(3)), min(seconds(100) for _ in range(3))
    assert many < 4 * few


def test_a_false_alarm_makes_the_next_one_less_likely():
    """Leaving LRU for less than a window raises the lead it takes; staying away for longer lowers it again."""
    duel = GapDuel(10)._duel
    window = duel._window

    def follow(challenger: float, seen: int) -> int:
        duel._references += seen
        duel.scores[:2] = 100.0, challenger
        duel._choose(max(range(4), key=duel.scores.__getitem__))
        return duel.best

    assert follow(100.9, 1) == 0
    assert follow(101.2, 1) == 1
    assert follow(99.9, window // 2) == 0  # back at once, without a lead
    assert follow(101.2, 1) == 0  # what was enough before
    assert follow(101.6, 1) == 1
    assert follow(99.9, 2 * window) == 0  # this time it had paid
    assert follow(101.2, 1) == 1
    for _ in range(20):
        follow(120.0, 1)
        follow(99.9, 1)
    assert follow(109.0, 1) == 0 and follow(111.0, 1) == 1  # bounded


def test_a_long_request_is_replayed_in_steps(monkeypatch):
    """It evicts a thousand runs in each shadow; the scores are those of a replay at once."""
    requests = [[b"%04d %04d" % (number, depth) for depth in range(10)] for number in range(300)]
    long = [b"long %04d" % depth for depth in range(2990)]
    evictions, plain = 0, shadows.Shadow._evict

    def counted(shadow, *rest):
        nonlocal evictions
        evictions += 1
        return plain(shadow, *rest)

    monkeypatch.setattr(shadows.Shadow, "_evict", counted)
    policy, whole = GapDuel(3000), GapDuel(3000)
    for number, chain in enumerate([*requests, *requests[-50:]]):
        for each in (policy, whole):
            each.reference(chain, 0, float(number))
            each.train()
    for each in (policy, whole):
        each.reference(long, 0, 1000.0)
    whole.train()
    evictions, most = 0, 0
    for _ in policy.train_steps():
        most, evictions = max(most, evictions), 0
        for shadow in policy._duel.shadows:
            assert 0 < shadow.used_blocks <= 3000
    assert 0 < max(most, evictions) <= (gapduel.REPLAYED_AT_ONCE + 4) * shadows.EVICTED_AT_ONCE
    assert policy._duel.scores == whole._duel.scores and not policy._waiting
    policy.check(set())
