"""The copy engine: block copies between a device pool and host slots, ordered, cancellable, never a wrong byte.

    store  device block → host slot          load  host slot → device block

A command names (block, slot, generation) triples and gets a ticket; `poll` moves the queue on and returns
acknowledgements, which name the same triples. Between a command and its acknowledgement the memory on both
sides belongs to the copy: the manager keeps such slots quarantined and frees them on the acknowledgement,
which a cancelled copy gets too, when nothing touches its memory any more. The engine refuses:

    stale   a store must name a newer generation than any command for that slot before, a load none older
    taken   a slot that is being filled; a slot to fill that is being read; a block that is being loaded

Order: a copy starts after the event it was given (the compute that filled the block, the last reader of it);
a load into a block whose store is still reading waits for that store, and a store waits for a load into its block.
Priority: loads go first. While any load waits or flies, only a small window of store bytes may fly.

The engine only keeps order and runs anywhere; a `Mover` makes the copies (`kvtier.kernels.cpu`, `kvtier.kernels.cuda`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.errors import CapacityError, ClosedError, InvalidRequest, TierError
from kvtier.kernels.ack import Ack, Outcome
from kvtier.kernels.limits import MIB, CopyLimits
from kvtier.kernels.mover import Event, Flight, Gate, Lane, Mover, Moves, Shown, State, launched, state_of

__all__ = ["MIB", "Ack", "CopyEngine", "Event", "Lane", "CopyLimits", "Moves", "Outcome", "Stats"]

_LIMITS = CopyLimits()
_LOADS_FIRST = (Lane.EXPEDITED, Lane.LOAD, Lane.STORE)

_UNENDED: list[CopyEngine] = []
"""Engines that were closed with a copy in flight: their memory, on both sides, is the copy's until the process ends."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since the start, and what is waiting now (moves)."""

    stored_bytes: int
    loaded_bytes: int
    refused: int
    aborted: int
    failed: int
    queued: int
    in_flight: int
    quarantined: int  # cancelled or lost, not acknowledged
    broken: str


@dataclass(slots=True, eq=False)
class _Chunk:
    """A part of a command: launched, throttled and acknowledged as one. Numbered in order of arrival."""

    number: int
    job: _Job
    moves: Moves
    behind: tuple[int, ...]  # chunks, all older, that use the same device blocks
    flight: Flight | None = None
    lost: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    ticket: int
    lane: Lane
    gate: Gate
    shown: Shown | None = None
    unlaunched: int = 0
    open: int = 0
    cancelled: bool = False
    chunks: list[_Chunk] = field(default_factory=list)


def _unseen(flight: Flight, last: bool) -> None:
    """Nobody asks for the flights of this command."""


class CopyEngine:
    """Queues, orders, launches and acknowledges copies. Used from one thread; no call but `wait` and `close` blocks.

    After a LOST flight the engine is broken: it takes no further command, and what was in flight on that lane is
    never acknowledged, because only the end of the process proves that nothing writes there any more.
    """

    def __init__(self, mover: Mover, limits: CopyLimits = _LIMITS) -> None:
        self._mover, self._limits = mover, limits
        self._chunk_moves = {lane: max(1, limits.chunk_of(lane) // mover.block_bytes) for lane in Lane}
        self._waiting: dict[Lane, deque[_Chunk]] = {lane: deque() for lane in Lane}
        self._flying: dict[Lane, deque[_Chunk]] = {lane: deque() for lane in Lane}
        self._flying_moves = dict.fromkeys(Lane, 0)
        self._jobs: dict[int, _Job] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._acks: list[Ack] = []
        self._tickets = self._numbers = 0
        # The chunk that uses a block or slot, by number (0: none), and the highest generation named so far. Several
        # stores may read one block: the youngest is recorded, and stays so when it is cancelled before its launch,
        # since older ones may still be reading (`_last_store_until` finds them).
        self._block_stored_by = np.zeros(mover.blocks, dtype=np.int64)
        self._block_loaded_by = np.zeros(mover.blocks, dtype=np.int64)
        self._slot_stored_by = np.zeros(mover.slots, dtype=np.int64)
        self._slot_loads = np.zeros(mover.slots, dtype=np.int64)
        self._slot_generation = np.full(mover.slots, -1, dtype=np.int64)
        self._newest = self._slot_generation.copy()  # within one command
        self._totals = dict.fromkeys(Outcome, 0)
        self._moved = dict.fromkeys(Lane, 0)
        self._broken = ""
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether commands are taken."""
        return not self._broken and not self._closed

    def mark(self) -> Event | None:
        """A point behind all work so far on the current stream, for commands that come later; None where there is
        none. Like `gate`, from the thread whose stream it is."""
        return self._mover.mark()

    def gate(self, after: Event | None = None) -> Gate:
        """The condition of a command that another thread will give: `after`, else as `mark`. It is that command's."""
        return self._mover.gate(after)

    def store(
        self, moves: Moves, *, after: Event | None = None, gate: Gate | None = None, shown: Shown | None = None
    ) -> int:
        """Copy blocks into slots once `after` (None: all work enqueued so far on the current stream) is over; or, in
        its place, once a `gate` opens that was taken before. `shown` gets the flights as they are launched.

        Returns a ticket; the moves' memory is the engine's until their acknowledgement. Raises InvalidRequest for
        an index out of range or repeated, CapacityError when the queue is full, TierError when broken: in each
        case nothing was changed.
        """
        self._admit(moves, "slot")
        fresh = moves.generations > self._slot_generation[moves.slots]
        fresh &= (self._slot_stored_by[moves.slots] == 0) & (self._slot_loads[moves.slots] == 0)
        return self._submit(Lane.STORE, moves, fresh, after, gate, shown)

    def load(
        self,
        moves: Moves,
        *,
        after: Event | None = None,
        gate: Gate | None = None,
        shown: Shown | None = None,
        expedited: bool = False,
    ) -> int:
        """Copy slots into blocks once `after` is over. Several loads may read one slot. Else as `store`."""
        self._admit(moves, "block")
        fresh = moves.generations >= self._slot_generation[moves.slots]
        fresh &= (self._slot_stored_by[moves.slots] == 0) & (self._block_loaded_by[moves.blocks] == 0)
        # One command may name a slot twice, but not under two generations.
        np.maximum.at(self._newest, moves.slots, moves.generations)
        fresh &= moves.generations == self._newest[moves.slots]
        self._newest[moves.slots] = -1
        return self._submit(Lane.EXPEDITED if expedited else Lane.LOAD, moves, fresh, after, gate, shown)

    def poll(self) -> list[Ack]:
        """Launch chunks that may start, and return the acknowledgements since the last call."""
        self._land()
        self._launch_ready()
        acks, self._acks = self._acks, []
        return acks

    def cancel(self, ticket: int) -> None:
        """Cancel a ticket: waiting chunks are never launched, those in flight end in quarantine. Polls acknowledge both
        later. A ticket that is over or unknown is ignored."""
        job = self._jobs.get(ticket)
        if job is None or job.cancelled:
            return
        job.cancelled = True
        waiting = self._waiting[job.lane]
        grounded = [chunk for chunk in waiting if chunk.job is job]
        self._waiting[job.lane] = deque(chunk for chunk in waiting if chunk.job is not job)
        for chunk in grounded:
            self._unlaunched(chunk)
            self._finish(chunk, Outcome.ABORTED)

    def fence(self, ticket: int, layer: int | None = None) -> None:
        """Order the caller's current stream behind this ticket's copies (those up to `layer`, where the mover copies by
        layer), and launch them now. Only an acknowledgement tells their outcome. A ticket that is over is ignored."""
        self.hurry(ticket)
        job = self._jobs.get(ticket)
        for chunk in job.chunks if job is not None else ():
            if chunk.flight is not None:
                chunk.flight.fence(layer)

    def hurry(self, ticket: int) -> None:
        """Launch this ticket's copies now, beyond the windows."""
        if (job := self._jobs.get(ticket)) is not None:
            self._force(max(chunk.number for chunk in job.chunks))

    def wait(
        self,
        tickets: Iterable[int],
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Poll until all tickets are over, at most `timeout_s`; returns whether they are. The acknowledgements stay for
        the next `poll`."""
        deadline = now() + timeout_s
        pending = set(tickets)
        while True:
            self._land()
            self._launch_ready()
            pending &= self._jobs.keys()
            if not pending:
                return True
            if self._broken or now() >= deadline:
                return False
            sleep(50e-6)

    def close(self, timeout_s: float) -> bool:
        """Cancel everything, wait for copies in flight, and release the mover. False: a copy is still in flight or was
        lost; the memory stays held, and the caller must not reuse it in this process."""
        self._closed = True
        for ticket in list(self._jobs):
            self.cancel(ticket)
        clean = self.wait(list(self._jobs), timeout_s)
        if clean:
            self._mover.close()
        elif self not in _UNENDED:
            _UNENDED.append(self)
        return clean

    def stats(self) -> Stats:
        flying = [chunk for lane in Lane for chunk in self._flying[lane]]
        return Stats(
            stored_bytes=self._moved[Lane.STORE],
            loaded_bytes=self._moved[Lane.LOAD] + self._moved[Lane.EXPEDITED],
            refused=self._totals[Outcome.REFUSED],
            aborted=self._totals[Outcome.ABORTED],
            failed=self._totals[Outcome.FAILED],
            queued=sum(len(chunk.moves) for lane in Lane for chunk in self._waiting[lane]),
            in_flight=sum(len(chunk.moves) for chunk in flying),
            quarantined=sum(len(chunk.moves) for chunk in flying if chunk.job.cancelled or chunk.lost),
            broken=self._broken,
        )

    def check(self) -> None:
        """Assert the invariants: every used block and slot belongs to a live chunk, and the counts agree."""
        live = [chunk for lane in Lane for chunk in (*self._waiting[lane], *self._flying[lane])]
        assert sorted(chunk.number for chunk in live) == sorted(self._chunks), "live chunks and index differ"
        loads = np.zeros_like(self._slot_loads)
        for chunk in live:
            assert chunk.job.ticket in self._jobs, "a live chunk without a job"
            assert all(number < chunk.number for number in chunk.behind), "a chunk behind a younger one"
            if chunk.job.lane is Lane.STORE:
                assert (self._slot_stored_by[chunk.moves.slots] == chunk.number).all(), "slot of a store is not its own"
            else:
                np.add.at(loads, chunk.moves.slots, 1)
                assert (self._block_loaded_by[chunk.moves.blocks] == chunk.number).all(), (
                    "block of a load is not its own"
                )
        assert (loads == self._slot_loads).all(), "loads per slot"
        for users in (self._block_loaded_by, self._slot_stored_by):
            assert set(np.unique(users[users != 0]).tolist()) <= self._chunks.keys(), "used by a dead chunk"
        for lane in Lane:
            assert self._flying_moves[lane] == sum(len(chunk.moves) for chunk in self._flying[lane]), "moves in flight"
            numbers = [chunk.number for chunk in (*self._flying[lane], *self._waiting[lane])]
            assert numbers == sorted(numbers), "a lane out of order"

    # Commands

    def _admit(self, moves: Moves, written: str) -> None:
        """Raise for an invalid command, before anything is changed."""
        if self._closed:
            raise ClosedError("the copy engine is closed")
        if self._broken:
            raise TierError("g2", "copy", self._broken)
        for name, values, count in (
            ("block", moves.blocks, self._mover.blocks),
            ("slot", moves.slots, self._mover.slots),
        ):
            numbers = values.tolist()  # a fraction of what numpy takes for the few moves of a step
            if numbers and (min(numbers) < 0 or max(numbers) >= count):
                raise InvalidRequest(f"moves: {name} out of range 0..{count - 1}")
            if name == written and len(set(numbers)) != len(numbers):
                raise InvalidRequest(f"moves: a {name} is named twice; it can be written once")
        if sum(len(chunk.moves) for chunk in self._chunks.values()) + len(moves) > self._limits.queued_moves:
            raise CapacityError(f"copy engine: more than {self._limits.queued_moves} moves waiting")

    def _submit(
        self,
        lane: Lane,
        moves: Moves,
        fresh: npt.NDArray[np.bool_],
        after: Event | None,
        given: Gate | None,
        shown: Shown | None,
    ) -> int:
        refused = moves.take(~fresh)
        if len(refused):
            moves = moves.take(fresh)
        gate = (given or self._mover.gate(after)) if len(moves) else None  # the last call that can raise
        if gate is None and given is not None:
            given.close()
        self._tickets += 1
        ticket = self._tickets
        if len(refused) or gate is None:
            self._totals[Outcome.REFUSED] += len(refused)
            outcome = Outcome.REFUSED if len(refused) else Outcome.DONE
            self._acks.append(Ack(ticket, lane, refused, outcome, last=gate is None))
        if gate is None:
            return ticket
        job = self._jobs[ticket] = _Job(ticket, lane, gate, shown)
        step = self._chunk_moves[lane]
        for start in range(0, len(moves), step):
            self._enqueue(job, moves.take(slice(start, start + step)))
        if lane is not Lane.STORE:
            # A load must not be held up by the throttle on the store that it is ordered behind.
            self._force(max((number for chunk in job.chunks for number in chunk.behind), default=0))
        self._launch_ready()
        return ticket

    def _enqueue(self, job: _Job, moves: Moves) -> None:
        self._numbers += 1
        number = self._numbers
        if job.lane is Lane.STORE:
            behind = tuple(set(self._block_loaded_by[moves.blocks].tolist()) - {0})
            self._block_stored_by[moves.blocks] = number
            self._slot_stored_by[moves.slots] = number
        else:
            behind = self._last_store_until(int(self._block_stored_by[moves.blocks].max()))
            self._block_loaded_by[moves.blocks] = number
            np.add.at(self._slot_loads, moves.slots, 1)
        self._slot_generation[moves.slots] = moves.generations
        chunk = _Chunk(number, job, moves, behind)
        job.chunks.append(chunk)
        job.open += 1
        job.unlaunched += 1
        self._chunks[number] = chunk
        self._waiting[job.lane].append(chunk)

    def _last_store_until(self, number: int) -> tuple[int, ...]:
        """The youngest live store not younger than chunk `number`: with it, all stores before it are over."""
        live = (*self._flying[Lane.STORE], *self._waiting[Lane.STORE])
        return tuple([chunk.number for chunk in live if chunk.number <= number][-1:])

    # Launching

    def _launch_ready(self) -> None:
        """Loads first, each lane in order, within the windows. The oldest chunk of all can always go."""
        for lane in _LOADS_FIRST:
            while self._waiting[lane] and self._fits(lane) and self._behind_launched(self._waiting[lane][0]):
                self._launch(self._waiting[lane].popleft())

    def _fits(self, lane: Lane) -> bool:
        flying = self._flying_moves[lane] * self._mover.block_bytes
        if flying == 0:
            return True
        return flying + self._chunk_moves[lane] * self._mover.block_bytes <= self._window(lane)

    def _window(self, lane: Lane) -> int:
        if lane is not Lane.STORE:
            return self._limits.load_window_bytes
        loading = any(self._waiting[load] or self._flying[load] for load in (Lane.LOAD, Lane.EXPEDITED))
        return self._limits.store_window_while_loading_bytes if loading else self._limits.store_window_bytes

    def _behind_launched(self, chunk: _Chunk) -> bool:
        return all(number not in self._chunks or self._chunks[number].flight for number in chunk.behind)

    def _force(self, number: int) -> None:
        """Launch every waiting chunk up to `number`, oldest first, beyond the windows."""
        while True:
            heads = [queue[0].number for queue in self._waiting.values() if queue]
            if not heads or min(heads) > number:
                return
            oldest = self._chunks[min(heads)]
            self._launch(self._waiting[oldest.job.lane].popleft())

    def _launch(self, chunk: _Chunk) -> None:
        lane = chunk.job.lane
        older = (self._chunks.get(number) for number in chunk.behind)
        flights = [other.flight for other in older if other is not None and other.flight is not None]
        show = partial(chunk.job.shown or _unseen, last=chunk.job.unlaunched == 1)
        chunk.flight = launched(self._mover, lane, chunk.moves, chunk.job.gate, flights, show)
        show(chunk.flight)
        self._unlaunched(chunk)
        self._flying[lane].append(chunk)
        self._flying_moves[lane] += len(chunk.moves)

    def _unlaunched(self, chunk: _Chunk) -> None:
        """One chunk fewer waits for the job's gate."""
        chunk.job.unlaunched -= 1
        if chunk.job.unlaunched == 0:
            chunk.job.gate.close()

    # Landing

    def _land(self) -> None:
        """Acknowledge what is over. A lane completes in order, so its first pending flight ends the search."""
        for lane in _LOADS_FIRST:
            flying = self._flying[lane]
            while flying:
                chunk = flying[0]
                assert chunk.flight is not None
                state = state_of(chunk.flight)
                if state is State.LOST and not chunk.lost:
                    chunk.lost = True
                    self._break(f"a copy on lane {lane.name.lower()} was lost; restart the process")
                if state in (State.PENDING, State.LOST):
                    break
                flying.popleft()
                self._flying_moves[lane] -= len(chunk.moves)
                failed = Outcome.FAILED if state is State.FAILED else Outcome.DONE
                self._finish(chunk, Outcome.ABORTED if chunk.job.cancelled else failed)

    def _break(self, reason: str) -> None:
        """Take no more commands, and fail the chunks that were not launched."""
        self._broken = self._broken or reason
        for queue in self._waiting.values():
            while queue:
                chunk = queue.popleft()
                self._unlaunched(chunk)
                self._finish(chunk, Outcome.FAILED)

    def _finish(self, chunk: _Chunk, outcome: Outcome) -> None:
        """Release the chunk's blocks and slots and acknowledge it."""
        job, moves = chunk.job, chunk.moves
        if job.lane is Lane.STORE:
            if chunk.flight is not None:
                self._block_stored_by[moves.blocks[self._block_stored_by[moves.blocks] == chunk.number]] = 0
            self._slot_stored_by[moves.slots] = 0
        else:
            self._block_loaded_by[moves.blocks] = 0
            np.subtract.at(self._slot_loads, moves.slots, 1)
        del self._chunks[chunk.number]
        self._totals[outcome] += len(moves)
        if outcome is Outcome.DONE:
            self._moved[job.lane] += len(moves) * self._mover.block_bytes
        job.open -= 1
        if job.open == 0:
            del self._jobs[job.ticket]
        self._acks.append(Ack(job.ticket, job.lane, moves, outcome, last=job.open == 0))
