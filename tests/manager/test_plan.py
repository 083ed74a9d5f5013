"""Planning is a pure function: checked against a search through all prefixes."""

from __future__ import annotations

import math
from operator import add

from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.cost_line import Bound
from kvtier.manager.plan import Costs, Where, make_plan
from kvtier.tiers.protocol import Miss

found: st.SearchStrategy[list[Where]] = st.lists(st.sampled_from(["g2", "g3", "g4"]), max_size=20)
places: st.SearchStrategy[list[Where]] = st.builds(
    add, found, st.lists(st.sampled_from(["g2", "g3", "g4", Miss.ABSENT, Miss.EXPIRED]), max_size=10)
)


@given(places, st.integers(0, 30))
def test_a_hit_is_the_longest_prefix_that_fits(where: list[Where], room: int) -> None:
    plan = make_plan(where, room)
    loads = sorted(index for indices in plan.loads.values() for index in indices)
    assert all(not isinstance(place, Miss) for place in where[: plan.hit])
    assert loads == [index for index in range(plan.hit) if where[index] != "g2"]
    assert plan.hit <= room
    assert all(where[index] == tier for tier, indices in plan.loads.items() for index in indices)
    if plan.hit == len(where):
        assert plan.miss is None
    elif isinstance(where[plan.hit], Miss):
        assert plan.miss is where[plan.hit]
    else:
        assert plan.miss is Miss.NO_ROOM
        assert plan.hit == room


bounds = st.builds(Bound, st.integers(-3, 60), st.integers(-1, 30), st.integers(0, 90) | st.just(math.inf))


@given(places, st.integers(1, 9), bounds, bounds)
@example(where=["g3", "g4"], compute=2, g3=Bound(0, 3), g4=Bound(0, 3))  # both at once take no longer than one
@example(where=["g3"] * 9, compute=2, g3=Bound(8, 1), g4=Bound(0, 0))  # many are worth their wait, where few are not
def test_what_is_slower_than_computing_is_not_loaded(where: list[Where], compute: int, g3: Bound, g4: Bound) -> None:
    plan = make_plan(where, len(where), costs=Costs(compute, {"g3": g3, "g4": g4}))
    free = make_plan(where, len(where))

    def gain(hit: int) -> float:
        counts = [(where[:hit].count("g3"), g3), (where[:hit].count("g4"), g4)]
        return hit * compute - max((bound.at(count) for count, bound in counts if count), default=0)

    best = max(range(free.hit + 1), key=lambda hit: (gain(hit), -hit))
    assert plan.hit == best
    assert plan.hit == free.hit or plan.miss is Miss.SLOWER
    loads = sorted(index for indices in plan.loads.values() for index in indices)
    assert loads == [index for index in range(plan.hit) if where[index] != "g2"]
