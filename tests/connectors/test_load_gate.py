"""Loading is weighed against prefill by what both cost: over some thousand requests within 5 % of the better of always
and never loading, and over a hundred not far from it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from kvtier.connectors.load_gate import LoadGate, Verdict
from tests.connectors.support.synthetic_engine import Cost, Engine, Replay


def linear(fixed: float, per_block: float, noise: float = 0.05) -> Cost:
    def cost(dice: random.Random, at: float, blocks: int) -> float:
        return max(1e-6, (fixed + per_block * blocks) * dice.gauss(1.0, noise))

    return cost


def then(first: Cost, second: Cost, at: float) -> Cost:
    return lambda dice, now, blocks: (first if now < at else second)(dice, now, blocks)


def sliding(first: Cost, second: Cost) -> Cost:
    """From one to the other, slowly."""
    return lambda dice, now, blocks: (1 - now) * first(dice, now, blocks) + now * second(dice, now, blocks)


def now_and_then(usual: Cost, rare: Cost, share: float) -> Cost:
    return lambda dice, now, blocks: (rare if dice.random() < share else usual)(dice, now, blocks)


def quadratic(fixed: float, per_block: float, per_square: float) -> Cost:
    return lambda dice, now, blocks: (fixed + per_block * blocks + per_square * blocks**2) * dice.gauss(1.0, 0.05)


PREFILL = linear(0.004, 0.002)
CHEAP, DEAR, SLOW = linear(0.002, 0.0001), linear(0.1, 0.004), linear(0.02, 0.0)
ENGINES = {
    "cheap": Engine(PREFILL, CHEAP),
    "dear": Engine(PREFILL, DEAR),
    "far too dear": Engine(PREFILL, linear(2.0, 0.05)),
    "a fixed cost that small hits do not repay": Engine(PREFILL, SLOW),
    "as dear as prefill": Engine(PREFILL, linear(0.0, 0.002)),
    "gets cheap": Engine(PREFILL, then(DEAR, CHEAP, 0.5)),
    "gets dear": Engine(PREFILL, then(CHEAP, DEAR, 0.5)),
    "dear for a while only": Engine(PREFILL, then(DEAR, CHEAP, 0.1)),
    "gets dear slowly": Engine(PREFILL, sliding(CHEAP, DEAR)),
    "gets cheap slowly": Engine(PREFILL, sliding(DEAR, CHEAP)),
    "prefill gets dear": Engine(then(PREFILL, linear(0.02, 0.02), 0.5), linear(0.05, 0.001)),
    "mostly cheap, dear on average": Engine(PREFILL, now_and_then(CHEAP, linear(0.2, 0.0), 0.15)),
    "mostly cheap, cheap on average": Engine(PREFILL, now_and_then(CHEAP, linear(0.25, 0.0), 0.02)),
    "half and half": Engine(PREFILL, now_and_then(CHEAP, DEAR, 0.5)),
    "rare loads that take seconds": Engine(PREFILL, now_and_then(CHEAP, linear(2.0, 0.0), 0.01)),
    "rare prefills that take a second": Engine(now_and_then(PREFILL, linear(1.0, 0.0), 0.02), CHEAP),
    "noisy": Engine(linear(0.004, 0.002, 0.5), linear(0.01, 0.0005, 0.8)),
    "noisy and dear": Engine(linear(0.004, 0.002, 0.5), linear(0.03, 0.002, 0.8)),
    "prefill grows with the square": Engine(quadratic(0.004, 0.001, 0.00004), linear(0.03, 0.0005)),
    "loads hold others up": Engine(PREFILL, CHEAP, others=20, stall=linear(0.0, 0.004)),
    "prefill holds others up": Engine(PREFILL, linear(0.08, 0.002), others=20, stall=linear(0.0, 0.0)),
}
REPLAYS = {
    "large and small": Replay(2000, lambda dice: dice.choice([0, 2, 8, 32, 64]), lambda dice: dice.randrange(1, 24)),
    "small": Replay(2000, lambda dice: dice.choice([0, 1, 2, 4]), lambda dice: dice.randrange(1, 8)),
    "seldom": Replay(2000, lambda dice: dice.choice([0, 0, 0, 0, 48]), lambda dice: dice.randrange(1, 64)),
}


def ratio(engine: str, replay: Replay, seed: int) -> float:
    """What a replay, of which no request is left out, took as a multiple of the better of always and never loading."""
    gated, always, never = ENGINES[engine].costs(replay, seed, LoadGate())
    return gated / min(always, never)


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("engine", ENGINES)
def test_never_more_than_a_twentieth_worse_than_the_better_of_always_and_never(engine: str, replay: str) -> None:
    assert ratio(engine, REPLAYS[replay], seed=0) <= 1.05


@pytest.mark.long
@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_with_other_dice(engine: str, replay: str) -> None:
    for seed in range(1, 5):
        assert ratio(engine, REPLAYS[replay], seed) <= 1.05, seed


def short_replays_pay(requests: int, worst: float, most: float, seed: int) -> None:
    """The worst of all, and most of nine in ten."""
    found = sorted(
        ratio(engine, replace(replay, requests=requests), seed) for engine in ENGINES for replay in REPLAYS.values()
    )
    assert found[-1] <= worst and found[len(found) * 9 // 10] <= most


def test_a_short_replay_pays_little_for_what_it_learns() -> None:
    """A load that is far too dear costs no more than the wait for it."""
    short_replays_pay(120, worst=1.15, most=1.06, seed=0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_short_replays_with_other_dice(seed: int) -> None:
    short_replays_pay(120, worst=1.15, most=1.06, seed=seed)
    short_replays_pay(300, worst=1.08, most=1.04, seed=seed)


def looks_that_bound(requests: int, most: float, compute_s: float, dearer_s: float, saved_s: float) -> list[int] | None:
    """At which of so many hits a gate has to look so that it takes at most `most` times as long as the better of always
    and never loading, on each engine of a family: loads cost `dearer_s` more than computing until some hit, and
    `saved_s` less from then on. None: no gate can. Between two looks it learns nothing, so its looks are the same on
    all engines until one finds loads cheap. It is granted that a single look tells all, without noise."""

    def best(cheap_from: int) -> float:
        """Seconds of the better of both, of the engine whose loads get cheap at this hit."""
        never = requests * compute_s
        return min(never, never + dearer_s * cheap_from - saved_s * (requests - cheap_from))

    looks: list[int] = []
    after = 0  # the first hit since the last look
    while after < requests:
        paid = requests * compute_s + dearer_s * len(looks)
        latest, bound = -1, float(requests)
        for look in range(after, requests + 1):  # one at the end is none
            bound = min(bound, requests + (most * best(look) - paid) / saved_s)
            if look > bound:
                break
            latest = look
        if latest < 0:
            return None
        if latest == requests:
            break
        looks.append(latest)
        after = latest + 1
    return looks


def test_no_gate_keeps_a_twentieth_over_sixty_requests() -> None:
    """A look at a dear load costs as much as a twentieth of forty requests: there are too few for the looks that find
    loads that got cheap in time. Over 2,000 there are enough, and they lie ever further apart."""
    cost = {"compute_s": 0.07, "dearer_s": 0.142, "saved_s": 0.038}  # 21 blocks found and 12 new, CHEAP and DEAR
    assert looks_that_bound(60, 1.05, **cost) is None and looks_that_bound(60, 1.07, **cost) is not None
    looks = looks_that_bound(2000, 1.05, **cost)
    assert looks is not None and all(later >= 2 * look for look, later in pairwise(looks))


@pytest.mark.parametrize("seed", range(5))
def test_loads_that_get_cheap_soon_are_noticed_in_a_short_replay(seed: int) -> None:
    """The share of its time would pay for a look after its end."""
    assert ratio("dear for a while only", replace(REPLAYS["large and small"], requests=120), seed) <= 1.2


@pytest.mark.parametrize("seed", range(10))
def test_a_look_that_finds_loads_cheap_is_followed_by_others_before_it_is_paid(seed: int) -> None:
    """Of whole prompts of many sizes, one long one that was dear left a debt, so that the next look came after hundreds
    of hits, though the last had found loads cheap. It took three times as long as with every hit loaded."""
    replay = Replay(300, lambda dice: dice.choice([1, 4, 16, 64, 256]), lambda dice: 0)
    assert ratio("dear for a while only", replay, seed) <= 1.1


def test_a_load_is_waited_for_no_longer_than_it_may_save() -> None:
    """And as long as loads take that are worth it: a slow one of these is not given up for little."""
    gate = LoadGate()
    assert 0.05 <= gate.decide("async", 100).patience_s < 1.0, "of what prefill takes nothing is known"
    for blocks in (4, 8, 12, 16) * 5:
        gate.computed(blocks, 0.004 + 0.01 * blocks)
    assert gate.decide("async", 10).patience_s == pytest.approx(0.1, rel=0.02)
    assert gate.decide("async", 10, others=3).patience_s == pytest.approx(0.4, rel=0.02), (
        "they wait for the prefill, too"
    )
    for blocks in (4, 8, 12, 16) * 5:
        gate.loaded(Verdict("async", blocks, True), 0, 0.004 + 0.003 * blocks)
    assert gate.decide("async", 10).patience_s == pytest.approx(0.1 + 0.03, rel=0.2)


def test_it_is_better_than_both_where_neither_is_right() -> None:
    engine, replay = ENGINES["a fixed cost that small hits do not repay"], REPLAYS["large and small"]
    gated, always, never = engine.costs(replay, 7, LoadGate())
    assert gated < 0.97 * min(always, never)


def test_it_looks_at_the_other_choice_within_its_budget_only() -> None:
    gate, looks, spent = LoadGate(), 0.0, 0.0
    for found, new, _, (loading, computing, _, _) in ENGINES["dear"].outcomes(REPLAYS["large and small"], 0):
        verdict = gate.decide("async", found) if found else None
        if verdict is not None and verdict.load:
            looks += loading - computing if verdict.look else 0.0
            gate.loaded(verdict, new, loading)
            spent += loading
        else:
            gate.computed(new + found, computing, verdict)
            spent += computing
    assert 0 < looks <= 0.03 * spent


def test_every_other_hit_is_loaded_until_prefill_is_known() -> None:
    gate = LoadGate()
    assert [gate.decide("async", 4).load for _ in range(4)] == [True, False, True, False], "loads alone tell nothing"


def test_loads_that_are_explained_once_prefill_is_known_have_told_what_they_cost() -> None:
    """Hits that taught prefill counted as loads that did not tell: the next ones were not loaded."""
    gate = LoadGate()
    verdicts = [gate.decide("async", 4) for _ in range(6)]
    gate.loaded(verdicts[0], 0, 0.001)
    for verdict in verdicts[1::2]:
        gate.computed(4, 0.1, verdict)
    assert [gate.decide("async", 4).load for _ in range(3)] == [True] * 3


def test_after_a_restart_little_is_computed_to_learn() -> None:
    """Twenty prompts of which lower tiers have all."""
    replay = Replay(20, lambda dice: dice.choice([1, 1, 2, 4, 8, 12, 17, 26, 31, 44]), lambda dice: 0)
    found = [ENGINES["cheap"].costs(replay, seed, LoadGate()) for seed in range(40)]
    assert sum(one.gated / one.never for one in found) / 40 < 0.38, "0.45 where prefill was learned first"
    dear = [ENGINES["far too dear"].costs(replay, seed, LoadGate()) for seed in range(40)]
    assert sum(one.gated / one.never for one in dear) / 40 < 1.5


def test_a_burst_of_hits_before_any_load_has_ended_is_not_loaded_whole() -> None:
    """What a load costs is not known, and may be dear: a few, and then one of several."""
    gate = LoadGate()
    for _ in range(3):
        gate.computed(10, 0.1)
    assert sum(gate.decide("async", 4).load for _ in range(40)) <= 8


def test_ways_are_weighed_apart() -> None:
    gate = LoadGate()
    for blocks in (4, 8, 12, 16) * 5:
        gate.computed(blocks, 0.01 * blocks)
        gate.loaded(Verdict("sync", blocks, True), 0, 0.001 * blocks)
        gate.loaded(Verdict("lower", blocks, True), 0, 0.1 * blocks)
    assert gate.decide("sync", 8).load and not gate.decide("lower", 8).load


@pytest.mark.parametrize(("fixed_s", "per_block_s", "seen", "asked"), [(0.02, 0.0, 2, 64), (0.0, 0.001, 64, 2)])
def test_loads_of_one_size_do_not_judge_another(fixed_s: float, per_block_s: float, seen: int, asked: int) -> None:
    """They do not tell how much of their time is fixed. A guess that speaks against the others would never be put
    right: they would not be loaded."""
    gate = LoadGate()
    for blocks in (4, 8, 12, 16) * 5:
        gate.computed(blocks, 0.002 * blocks)
        gate.loaded(Verdict("async", seen, True), 0, fixed_s + per_block_s * seen)
    assert gate.decide("async", asked).load


@pytest.mark.parametrize("number", [0, 5, 20, 600])
@pytest.mark.parametrize("what", ["prefill", "load"])
@pytest.mark.parametrize("load", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_a_process_that_stood_still_once_does_not_decide_for_long(load: Cost, what: str, number: int) -> None:
    """Its one sample says little of the next: cheap loads would end for ever, dear ones would go on."""
    replay = REPLAYS["large and small"]

    def stands_still(usual: Cost) -> Cost:
        return lambda dice, at, blocks: usual(dice, at, blocks) + (300.0 if at == number / replay.requests else 0.0)

    engine = Engine(stands_still(PREFILL), load) if what == "prefill" else Engine(PREFILL, stands_still(load))
    gate, decided, loaded = LoadGate(), 0, 0
    for found, new, _, (loading, computing, _, _) in engine.outcomes(replay, 0):
        verdict = gate.decide("async", found) if found else None
        decided += verdict is not None
        if verdict is not None and verdict.load:
            gate.loaded(verdict, new, loading)
            loaded += 1
        else:
            gate.computed(new + found, computing, verdict)
    assert loaded > 0.5 * decided if load is CHEAP else loaded < 0.2 * decided
