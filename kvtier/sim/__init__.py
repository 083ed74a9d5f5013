"""A simulator of whole fleets: the real cache and manager of several machines over virtual time, disks and one bucket.

    plan = make_plan(17, "safety")
    outcome = play(plan)             # the same each time
    shrink(outcome)                  # where it failed: with as few steps as fail

One seed is one history: puts, gets, an engine's requests, purges, pins; faults of disks and bucket, clocks that are
wrong, kills, restarts. "safety" checks that nothing wrong, purged or expired is served and no bound is passed;
"liveness" also that everything works again once all is well. `kvtier sim` runs many.
"""

from kvtier.sim.plan import Plan, make_plan
from kvtier.sim.run import Outcome, play, shrink

__all__ = ["Outcome", "Plan", "make_plan", "play", "shrink"]
