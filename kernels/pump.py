"""A copy engine on a thread of its own: opening it, and every call that enqueues a copy, cost the caller nothing.

    caller's thread     mark · load · store · cancel · poll        a command is a recorded event and a place in a queue
    pump's thread       open, then each tick: commands, launches, acknowledgements

Submitting copies takes the driver half a microsecond per descriptor, and a full launch queue holds the caller until the
forward before it is over: neither may happen to the thread that launches the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvtier.errors import KVTierError
from kvtier.kernels.copy import MIB, Ack, CopyEngine, CopyLimits, Event, Lane, Moves, Outcome
from kvtier.kernels.mover import Gate

log = logging.getLogger(__name__)

LIMITS = CopyLimits(load_window_bytes=512 * MIB, store_window_bytes=512 * MIB)
"""Of an engine under a pump: what the link moves between two ticks, a few times over. Short windows keep a later, more
urgent copy from waiting behind earlier ones."""

_TICK_S = 0.5e-3
_MOST_TICK_S = 4e-3  # while nothing ends: the copies wait for a forward
_IDLE_S = 1.0
_MOST_ERRORS = 3


class Pump:
    """Opens and drives a `CopyEngine`. Its methods are the caller's, from one thread; none waits but `close`.

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
            self._acknowledge([Ack(ticket, lane, moves, Outcome.REFUSED, last=True)])
            return ticket
        self._post(partial(self._begin, ticket, lane, moves, engine.gate(after)))
        return ticket

    def _post(self, command: Callable[[CopyEngine], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def _acknowledge(self, acks: list[Ack]) -> None:
        with self._changed:
            self._acks += acks

    # On the pump's thread

    def _begin(self, ticket: int, lane: Lane, moves: Moves, gate: Gate, engine: CopyEngine) -> None:
        try:
            theirs = engine.store(moves, gate=gate) if lane is Lane.STORE else engine.load(moves, gate=gate)
        except Exception as error:  # each leaves everything as it was
            log.warning(
                "a copy of %d blocks is refused: %s", len(moves), error, exc_info=not isinstance(error, KVTierError)
            )
            gate.close()
            self._acknowledge([Ack(ticket, lane, moves, Outcome.REFUSED, last=True)])
            return
        self._ticket_of[theirs], self._engines_of[ticket] = ticket, theirs

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
