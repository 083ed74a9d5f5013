"""Tiers that do not answer, cancelled or not, and tasks that are killed where they wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from kvtier.manager.manager import Manager
from kvtier.supervisor import Service, Supervisor
from kvtier.testing import MemoryTier
from kvtier.tiers.guard import GuardLimits
from tests.support.waiting import until

STUCK_S = 20.0
"""A test that fails must end, too."""

SHORT = GuardLimits(open_s=0.1, call_s=0.1, purge_s=0.1, evict_s=0.1)


class StubbornTier(MemoryTier):
    """Does not answer the verbs in `stuck` until they leave that set, and does not heed cancellation meanwhile."""

    stuck: frozenset[str] = frozenset()
    ignores_cancellation = True

    def __getattribute__(self, verb: str) -> Any:
        work = super().__getattribute__(verb)
        if verb.startswith("_") or not asyncio.iscoroutinefunction(work):
            return work

        async def call(*arguments: Any) -> Any:
            end = time.monotonic() + STUCK_S
            while verb in self.stuck and time.monotonic() < end:
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    if not self.ignores_cancellation:
                        raise
            return await work(*arguments)

        return call


def hurried(manager: Manager) -> Manager:
    """The manager, with guards that wait a tenth of a second."""
    for tier in manager.lower.values():
        tier.inner.limits = SHORT
    return manager


class Injected(Exception):
    """What a task is killed with."""


class Killed:
    """Runs a coroutine, and throws Injected into it where it waits for the `at`-th time. `struck`: it came to that.
    `runs`: how often one ended by itself."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.struck = False
        self.runs = 0

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        await _Steps(self, work)
        self.runs += 1


class _Steps(Awaitable[None]):
    def __init__(self, killed: Killed, work: Coroutine[Any, Any, None]) -> None:
        self._killed, self._work = killed, work

    def __await__(self) -> Generator[Any, Any, None]:
        killed, step = self._killed, self._work.send
        argument: Any = None
        while True:
            try:
                waited_for = step(argument)
            except StopIteration:
                return
            if not killed.struck and killed.at == 0:
                killed.struck = True
                step, argument = self._work.throw, Injected()
                if waited_for is not None:
                    waited_for._asyncio_future_blocking = False
                continue
            killed.at -= 1
            try:
                argument = yield waited_for
                step = self._work.send
            except BaseException as error:
                step, argument = self._work.throw, error


async def has_ended(task: str) -> None:
    """Wait until the background task of this name has come to its end, also where it was killed and restarted."""
    await until(lambda: all(each.get_name() != task for each in asyncio.all_tasks()))


def kill(supervisor: Supervisor, name: str, killed: Killed) -> None:
    """Have the tasks of that name, started from now on, killed once."""
    start = supervisor.start

    def killing(
        task: str, work: Callable[[], Coroutine[Any, Any, None]], service: Service, every_s: float | None = None
    ) -> None:
        start(task, (lambda: killed.run(work())) if task == name else work, service, every_s)

    supervisor.start = killing  # type: ignore[method-assign]
