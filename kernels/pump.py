"""A copy engine on a thread of its own: opening it, and every call that enqueues a copy, cost the caller nothing.

    caller's thread     mark · load · store · cancel · poll        a command is a recorded event and a place in a queue
                        fence · wait                               until the pump has launched, or the device has copied
    pump's thread       open, then each tick: commands, launches, acknowledgements

Submitting copies takes the driver half a microsecond per descriptor, and a full launch queue holds the caller until the
forward before it is over: neither may happen to the thread that launches the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvtier.errors import KVTierError, TierError
from kvtier.kernels.copy import MIB, Ack, CopyEngine, CopyLimits, Event, Lane, Moves, Outcome
from kvtier.kernels.mover import Flight, Gate

log = logging.getLogger(__name__)

LIMITS = CopyLimits(load_window_bytes=512 * MIB, store_window_bytes=512 * MIB)
"""Of an engine under a pump: what the link moves between two ticks, a few times over. Short windows keep a later, more
urgent copy from waiting behind earlier ones."""

_TICK_S = 0.5e-3
_MOST_TICK_S = 4e-3  # while nothing ends: the copies wait for a forward
_IDLE_S = 1.0
_MOST_ERRORS = 3
_FENCE_S = 5.0
"""A forward waits for the launch of its loads at most so long; a driver that takes longer does not work any more."""


@dataclass(slots=True)
class _UnderWay:
    """A command that is not over: its flights so far, and whether these are all."""

    flights: list[Flight] = field(default_factory=list)
    whole: bool = False
    hurried: bool = False

    def covers(self, layer: int | None) -> bool:
        return self.whole and all(flight.covers(layer) for flight in self.flights)


class Pump:
    """Opens and drives a `CopyEngine`. Its methods are the caller's, from one thread; none waits but `fence`, `wait`
    and `close`, each within a bound.

    `open_engine` is called on the pump's thread. Commands that come before it has returned, and after it has failed,
    are refused. With `threaded=False` nothing happens but in `tick`.
    """

    def __init__(self, open_engine: Callable[[], CopyEngine], *, threaded: bool = True) -> None:
        self._open_engine = open_engine
        self._engine: CopyEngine | None = None
        self.failure = ""
        self._changed = threading.Condition()
        self._commands: deque[Callable[[CopyEngine], None]] = deque()
        self._acks: list[Ack] = []
        self._under_way: dict[int, _UnderWay] = {}
        self._tickets = 0
        self._ticket_of: dict[int, int] = {}  # the engine's -> ours
        self._engines_of: dict[int, int] = {}  # and back
        self._stop_by = 0.0
        self._closed = self._clean = False
        self._thread = threading.Thread(target=self._run, name="kvtier-copies", daemon=True)
        if threaded:
            self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether commands are taken: the engine is open, and works."""
        return self._engine is not None and self._engine.ready and not self.failure and not self._closed

    def mark(self) -> Event | None:
        """As `CopyEngine.mark`."""
        return self._engine.mark() if self._engine is not None and self.ready else None

    def load(self, moves: Moves, *, after: Event | None = None) -> int:
        """As `CopyEngine.load`, but that errors come as an acknowledgement."""
        return self._give(Lane.LOAD, moves, after)

    def store(self, moves: Moves, *, after: Event | None = None) -> int:
        """As `CopyEngine.store`, but that errors come as an acknowledgement."""
        return self._give(Lane.STORE, moves, after)

    def cancel(self, ticket: int) -> None:
        def command(engine: CopyEngine) -> None:
            if ticket in self._engines_of:
                engine.cancel(self._engines_of[ticket])

        self._post(command)

    def fence(self, ticket: int, layer: int | None = None, timeout_s: float = _FENCE_S) -> None:
        """Order the caller's current stream behind this ticket's copies, or those up to `layer`, as `CopyEngine.fence`.
        Waits for their launch, but for no copy. Raises TierError where they are not launched in time: the stream is not
        ordered behind them then."""
        with self._changed:
            job = self._under_way.get(ticket)
            if job is not None and not job.whole and not job.hurried:
                job.hurried = True
                self._commands.append(partial(self._hurry, ticket))
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: ticket not in self._under_way or job is None or job.covers(layer) or not self.ready, timeout_s
            )
            if job is None or ticket not in self._under_way:
                return
            launched, flights = job.covers(layer), list(job.flights)
        if not launched:
            raise TierError("g1", "fence", self.failure or f"the copies were not launched within {timeout_s:g} s")
        for flight in flights:
            flight.fence(layer)

    def wait(self, tickets: Iterable[int], timeout_s: float) -> bool:
        """Wait until all tickets are over, at most `timeout_s`; whether they are. False at once where nothing ends any
        more. The acknowledgements stay for `poll`."""
        pending = set(tickets)
        with self._changed:
            self._changed.wait_for(lambda: not pending & self._under_way.keys() or not self.ready, timeout_s)
            return not pending & self._under_way.keys()

    def poll(self) -> list[Ack]:
        """The acknowledgements since the last call."""
        with self._changed:
            acks, self._acks = self._acks, []
        return acks

    def close(self, timeout_s: float) -> bool:
        """As `CopyEngine.close`. An engine that is still being opened has copied nothing: it is closed when it is open,
        and keeps the memory until then."""
        with self._changed:
            unopened = self._engine is None
            self._closed, self._stop_by = True, time.monotonic() + timeout_s
            self._changed.notify_all()
        if unopened:
            return True
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(timeout_s + 0.5)
        return self._clean

    def _give(self, lane: Lane, moves: Moves, after: Event | None) -> int:
        self._tickets += 1
        ticket = self._tickets
        engine = self._engine
        if engine is None or not self.ready:
            log.debug("a copy is refused: %s", self.failure or "not open yet")
            self._refuse(ticket, lane, moves)
            return ticket
        try:
            gate = engine.gate(after)
        except KVTierError as error:
            log.warning("a copy of %d blocks is refused: %s", len(moves), error)
            self._refuse(ticket, lane, moves)
            return ticket
        with self._changed:
            self._under_way[ticket] = _UnderWay()
        self._post(partial(self._begin, ticket, lane, moves, gate))
        return ticket

    def _post(self, command: Callable[[CopyEngine], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def _refuse(self, ticket: int, lane: Lane, moves: Moves) -> None:
        self._acknowledge([Ack(ticket, lane, moves, Outcome.REFUSED, last=True)])

    def _acknowledge(self, acks: list[Ack]) -> None:
        with self._changed:
            self._acks += acks
            for ack in acks:
                if ack.last:
                    self._under_way.pop(ack.ticket, None)
            self._changed.notify_all()

    # On the pump's thread

    def _begin(self, ticket: int, lane: Lane, moves: Moves, gate: Gate, engine: CopyEngine) -> None:
        give, shown = engine.store if lane is Lane.STORE else engine.load, partial(self._launched, ticket)
        try:
            theirs = give(moves, gate=gate, shown=shown)
        except Exception as error:  # each leaves everything as it was
            log.warning(
                "a copy of %d blocks is refused: %s", len(moves), error, exc_info=not isinstance(error, KVTierError)
            )
            gate.close()
            self._refuse(ticket, lane, moves)
            return
        self._ticket_of[theirs], self._engines_of[ticket] = ticket, theirs

    def _launched(self, ticket: int, flight: Flight, last: bool) -> None:
        with self._changed:
            if (job := self._under_way.get(ticket)) is None:
                return
            job.whole = job.whole or last
            if flight not in job.flights:
                job.flights.append(flight)
            self._changed.notify_all()

    def _hurry(self, ticket: int, engine: CopyEngine) -> None:
        if ticket in self._engines_of:
            engine.hurry(self._engines_of[ticket])

    def open(self) -> None:
        """Open the engine. What goes wrong is `failure`."""
        try:
            self._engine = self._open_engine()
        except Exception as error:
            log.exception("copies between the device and host memory are off")
            self.failure = str(error) or type(error).__name__

    def tick(self) -> bool:
        """Carry out commands, launch, and collect acknowledgements; whether any of it happened."""
        engine = self._engine
        if engine is None:
            return False
        moved = False
        while self._commands:
            self._commands.popleft()(engine)
            moved = True
        acks = engine.poll()
        for ack in acks:
            if ack.last:
                self._engines_of.pop(self._ticket_of[ack.ticket], None)
        self._acknowledge([Ack(self._ticket_of[a.ticket], a.lane, a.moves, a.outcome, a.last) for a in acks])
        for ack in acks:
            if ack.last:
                del self._ticket_of[ack.ticket]
        return moved or bool(acks)

    def _run(self) -> None:
        self.open()
        errors, pause_s = 0, _TICK_S
        while not self._closed and not self.failure:
            try:
                pause_s = _TICK_S if self.tick() else min(2 * pause_s, _MOST_TICK_S)
            except Exception:  # nobody else would see it
                log.exception("copies between the device and host memory went wrong")
                errors += 1
                if errors >= _MOST_ERRORS:
                    self.failure = "see the log"
            with self._changed:
                if not self.ready:
                    self._changed.notify_all()  # nobody is to wait for what may never end
                if not self._commands and not self._closed:
                    self._changed.wait(pause_s if self._ticket_of else _IDLE_S)
        while not self._closed:  # commands are refused; the engine is closed by the caller's word
            with self._changed:
                self._changed.wait(_IDLE_S)
        self._end()

    def _end(self) -> None:
        engine = self._engine
        if engine is None:
            self._clean = True
            return
        try:
            self.tick()
            self._clean = engine.close(max(0.0, self._stop_by - time.monotonic()))
            self.tick()
        except Exception:
            log.exception("copies between the device and host memory did not end well")
