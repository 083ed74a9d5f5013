"""Work of one replica beside its callers': deltas, records of uses, sweeping. Each at its time, never twice at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.supervisor import Service, Supervisor
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.sweep import Sweeper
from kvtier.times import Mono

RECORD_S = 30.0
"""Between two searches for uses that are worth recording in the bucket."""

TIDY_S = 900.0
"""Between two deletions of old deltas and ended pins, about, however long the sweeper's pass takes. Of a fleet that
started together not all delete the same ten thousand names at once."""

TASK_S = 30.0
"""Bound on one task."""


class _Chore:
    """Work that a task of its own does once whenever it is asked for. `done`: the end of the last that was."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._asked = PerLoop(asyncio.Event)
        self.done: asyncio.Future[None] | None = None

    def ask(self) -> None:
        """Have it done soon, unless it is being done."""
        if self.done is None or self.done.done():
            self.done = asyncio.get_running_loop().create_future()
            self._asked().set()

    async def run(self) -> None:
        """For ever. The bucket's failures end one time; any other error is raised."""
        while True:
            await self._asked().wait()
            self._asked().clear()
            try:
                async with asyncio.timeout(TASK_S):
                    await self._work()
            except (TierError, TimeoutError):
                pass  # it comes due again
            finally:
                if self.done is not None and not self.done.done():
                    self.done.set_result(None)


class Background:
    """The tasks, on the tier's event loop, under a supervisor of their own; the work of one that failed comes due
    again. Made once; `start` and `close` as often as the tier."""

    def __init__(self, store: ObjectStore, sweeper: Sweeper, clock: Clock) -> None:
        self._store = store
        self._sweeper = sweeper
        self._clock = clock
        self._record_at = clock.monotonic() + RECORD_S
        self._tidy_at = clock.monotonic() + sweeper.about(TIDY_S)
        self.supervisor = Supervisor(clock)
        self._write = _Chore(self._publish_and_record)
        self._sweep = _Chore(self._tidy_and_sweep)
        self._learn = _Chore(self._learn_pins_and_deltas)

    @property
    def writing(self) -> asyncio.Future[None] | None:
        """The end of the last time that something was recorded or published; None before the first."""
        return self._write.done

    @property
    def sweeping(self) -> asyncio.Future[None] | None:
        """The end of the last time that something was swept; None before the first."""
        return self._sweep.done

    @property
    def polling(self) -> asyncio.Future[None] | None:
        """The end of the last time that deltas were read; None before the first."""
        return self._learn.done

    def start(self, service: Service) -> None:
        """Begin, on the running loop. `service` is out while a task keeps failing."""
        self.supervisor.start("g4 writing", self._write.run, service)
        self.supervisor.start("g4 sweeping", self._sweep.run, service)
        self.supervisor.start("g4 learning", self._learn.run, service)

    @property
    def _recording_due(self) -> bool:
        return self._clock.monotonic() >= self._record_at

    @property
    def _tidying_due(self) -> bool:
        return self._clock.monotonic() >= self._tidy_at

    def start_due(self) -> None:
        """Have done what is due."""
        if self._store.deltas.publishing_due or self._recording_due:
            self._write.ask()
        if self._sweeper.due or self._tidying_due:
            self._sweep.ask()
        if self._store.deltas.polling_due or not self._store.pins.settled:
            self._learn.ask()

    async def _learn_pins_and_deltas(self) -> None:
        failed: TierError | None = None
        try:
            await self._store.pins.settle()
        except TierError as error:  # one pin that cannot be read must not keep deltas from being
            failed = error
        if self._store.deltas.polling_due:
            await self._store.deltas.poll()
        if failed is not None:
            raise failed

    async def _publish_and_record(self) -> None:
        failed: TierError | None = None
        try:
            if self._store.deltas.publishing_due:
                await self._store.deltas.publish()
        except TierError as error:  # a full bucket takes no delta, but may take a record of a use
            failed = error
        if self._recording_due:
            self._record_at = self._clock.monotonic() + RECORD_S
            await self._store.renewer.record_uses()
        if failed is not None:
            raise failed

    async def _tidy_and_sweep(self) -> None:
        # In a task of its own: recording may take all of TASK_S each time, where a use is a unit that is written anew.
        if self._tidying_due:
            self._tidy_at = self._clock.monotonic() + self._sweeper.about(TIDY_S)
            await self._sweeper.tidy()
        if self._sweeper.due:
            await self._sweeper.page()

    async def wait(self) -> None:
        """Until what was last asked to be published or recorded is."""
        if self.writing is not None and not self.writing.done():
            await asyncio.wait([self.writing])

    async def close(self, deadline: Mono) -> None:
        """End all tasks, and whoever waits for them."""
        await self.supervisor.close(deadline)
        for chore in (self._write, self._sweep, self._learn):
            if chore.done is not None and not chore.done.done():
                chore.done.set_result(None)
