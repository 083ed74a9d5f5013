"""One copy engine made of one per part of a pool (`kvtier.connectors.sglang.pool`), for copies that belong together.

Blocks are numbered by `block_of`. A ticket is over when it is over in every part. Used from one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.connectors.sglang.pool import Places, place_of
from kvtier.kernels.copy import Ack, CopyEngine, Moves, Outcome
from kvtier.kernels.mover import Lane
from kvtier.kernels.pump import Pump

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    lane: Lane
    open: dict[int, int] = field(default_factory=dict)  # the ticket of each part that is not over


class PartEngines:
    """See the module. Owns the engines. `place` has the parts of a layer of the model, and its place in each."""

    def __init__(self, engines: Sequence[CopyEngine | Pump], place: Callable[[int], Places]) -> None:
        self._engines = engines
        self._place = place
        self._tickets = 0
        self._jobs: dict[int, _Job] = {}
        self._tickets_of: dict[tuple[int, int], int] = {}  # by part, and its ticket
        self._acks: list[Ack] = []

    @property
    def ready(self) -> bool:
        return all(engine.ready for engine in self._engines)

    def store(self, moves: Moves) -> int:
        """As `CopyEngine.store`."""
        return self._begin(Lane.STORE, moves)

    def load(self, moves: Moves) -> int:
        """As `CopyEngine.load`."""
        return self._begin(Lane.LOAD, moves)

    def _begin(self, lane: Lane, moves: Moves) -> int:
        """Raises what the first part's engine raises, which has changed nothing then. What a later one raises comes as
        an acknowledgement: the copies of those before it are under way."""
        parts, pages = place_of(moves.blocks)
        job, refused = _Job(lane), list[Moves]()
        for part in np.unique(parts).tolist():
            mine = parts == part
            its = Moves(pages[mine], moves.slots[mine], moves.generations[mine])
            engine = self._engines[part]
            try:
                job.open[part] = (engine.store if lane is Lane.STORE else engine.load)(its)
            except Exception:
                if not job.open:
                    raise
                log.exception("a part of a copy is refused")
                refused.append(its)
        self._tickets += 1
        ticket = self._tickets
        self._jobs[ticket] = job
        self._tickets_of.update(dict.fromkeys(job.open.items(), ticket))
        self._acks += [Ack(ticket, lane, its, Outcome.REFUSED, last=False) for its in refused]
        if not job.open:  # no moves
            del self._jobs[ticket]
            self._acks.append(Ack(ticket, lane, moves, Outcome.DONE, last=True))
        return ticket

    def poll(self) -> list[Ack]:
        """As `CopyEngine.poll`; moves name the pages of their part."""
        for part, engine in enumerate(self._engines):
            for ack in engine.poll():
                ticket = self._tickets_of.get((part, ack.ticket))
                if ticket is None:
                    continue
                job = self._jobs[ticket]
                if ack.last:
                    del job.open[part], self._tickets_of[part, ack.ticket]
                if over := not job.open:
                    del self._jobs[ticket]
                self._acks.append(Ack(ticket, ack.lane, ack.moves, ack.outcome, last=over))
        acks, self._acks = self._acks, []
        return acks

    def _of(self, tickets: Iterable[int], part: int) -> list[int]:
        jobs = [job for ticket in tickets if (job := self._jobs.get(ticket)) is not None]
        return [theirs for job in jobs if (theirs := job.open.get(part)) is not None]

    def wait(self, tickets: Iterable[int], timeout_s: float) -> bool:
        """As `CopyEngine.wait`, over all parts together."""
        asked, until = list(tickets), time.monotonic() + timeout_s
        over = [
            engine.wait(self._of(asked, part), max(0.0, until - time.monotonic()))
            for part, engine in enumerate(self._engines)
        ]
        return all(over)

    def cancel(self, ticket: int) -> None:
        """As `CopyEngine.cancel`, in every part."""
        for part, engine in enumerate(self._engines):
            for theirs in self._of([ticket], part):
                engine.cancel(theirs)

    def fence(self, ticket: int, layer: int) -> None:
        """As `CopyEngine.fence`, of a layer of the model: behind its own parts. A forward comes to every layer."""
        for part, place in self._place(layer):
            for theirs in self._of([ticket], part):
                self._engines[part].fence(theirs, place)

    def close(self, timeout_s: float) -> bool:
        """As `CopyEngine.close`."""
        until = time.monotonic() + timeout_s
        ends = [engine.close(max(0.0, until - time.monotonic())) for engine in self._engines]  # each of them
        return all(ends)
