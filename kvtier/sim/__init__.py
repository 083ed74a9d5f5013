"""A simulator of whole fleets: the real cache and manager of several machines over virtual time, disks and one bucket.

    history = make_history(17, "safety")
    played = play(history)             # the same each time
    shrink(played)                  # where it failed: with as few steps as fail

One seed is one history: puts, gets, an engine's requests, purges, pins; faults of disks and bucket, clocks that are
wrong, kills, restarts. "safety" checks that nothing wrong, purged or expired is served and no bound is passed;
"liveness" also that everything works again once all is well. `kvtier sim` runs many.
"""

from kvtier.sim.history import History, make_history
from kvtier.sim.run import Played, play, shrink

__all__ = ["Played", "History", "make_history", "play", "shrink"]
