"""Work of one replica beside its callers': deltas, records of uses, sweeping. Each at its time, never twice at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.objects.sweep import Sweeper

log = logging.getLogger(__name__)

RECORD_S = 30.0
"""Between two searches for uses that are worth recording in the bucket."""

TASK_S = 30.0
"""Bound on one task."""


class Background:
    """Starts tasks on the tier's event loop; their failures are ignored, since the work comes due again."""

    def __init__(self, store: ObjectStore, sweeper: Sweeper, clock: Clock) -> None:
        self._store = store
        self._sweeper = sweeper
        self._clock = clock
        self._record_at = clock.monotonic() + RECORD_S
        self.failed = 0  # tasks that ended with an error that is not the bucket's
        self.writing: asyncio.Task[None] | None = None
        self.polling: asyncio.Task[None] | None = None

    @property
    def _recording_due(self) -> bool:
        return self._clock.monotonic() >= self._record_at

    def start_due(self) -> None:
        """Start what is due and does not run."""
        if self._store.deltas.publishing_due or self._sweeper.due or self._recording_due:
            self.writing = self._start(self.writing, self._write)
        if self._store.deltas.polling_due:
            self.polling = self._start(self.polling, self._store.deltas.poll)

    def _start(self, last: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def bounded() -> None:
            try:
                async with asyncio.timeout(TASK_S):
                    await work()
            except (TierError, TimeoutError):
                pass
            except Exception:
                self.failed += 1
                log.exception("g4: work in the background failed")

        if last is not None and not last.done():
            return last
        return asyncio.get_running_loop().create_task(bounded())

    async def _write(self) -> None:
        if self._store.deltas.publishing_due:
            await self._store.deltas.publish()
        if self._recording_due:
            self._record_at = self._clock.monotonic() + RECORD_S
            await self._store.record_uses()
        if self._sweeper.due:
            await self._sweeper.page()

    async def wait(self) -> None:
        """Until a task that publishes or records has ended."""
        if self.writing is not None and not self.writing.done():
            await asyncio.wait([self.writing])

    async def cancel(self) -> None:
        """End all tasks."""
        for task in (self.writing, self.polling):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
