"""A virtual engine: calls the real connector as vLLM's does, step by step.

    a request comes    → `ask`: its scheduler (`kvtier.sim.scheduler`) has it wait in a queue
    a step is planned  → by the scheduler and the connector
    it runs            → on the workers' virtual devices, with the step before it still under way if that is so planned
    it has run         → its results go to the scheduler

Requests are aborted and preempted, and the prefix cache is reset, between any two of these.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.sim.asked import Asked
from kvtier.sim.ledger import Ledger, Wrong
from kvtier.sim.scheduler import Scheduler
from kvtier.sim.workers import Results

_IDLE_S = (0.001, 0.25)
"""Between steps that compute nothing: the first, and the longest that doubling leads to."""


class Engine:
    """See the module. `scheduler` makes its scheduler, given a way to do something before the next step is planned;
    `ahead`: how many steps are planned while one runs; `told` hears what happens."""

    def __init__(
        self,
        name: str,
        scheduler: Callable[[Callable[[Callable[[], None]], None]], Scheduler],
        ahead: int,
        ledger: Ledger,
        told: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler(self._post)
        self.half, self.workers = self._scheduler.half, self._scheduler.workers
        self._name, self._ahead, self._ledger, self._told = name, ahead, ledger, told
        self._under_way: deque[tuple[Any, asyncio.Task[Results]]] = deque()  # steps
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = asyncio.Event()
        self._idle_s = _IDLE_S[0]
        self._closed = self._wakes = False

    @property
    def requests(self) -> Mapping[str, Asked]:
        """By name."""
        return self._scheduler.requests

    @property
    def loaded(self) -> int:
        """Blocks that loads have brought."""
        return self._scheduler.loaded

    # -- what others do -----------------------------------------------------------------------------------------------

    def ask(self, args: Mapping[str, Any]) -> None:
        self._post(lambda: self._scheduler.arrive(args))

    def abort(self, which: int) -> None:
        """The client of some request goes away."""
        self._post(lambda: self._scheduler.abort(which))

    def preempt(self, which: int) -> None:
        """Take the blocks of some request that runs; of all, if `which` is below 0."""
        self._post(lambda: self._scheduler.preempt_some(which))

    def reset(self, *, running: bool = False) -> None:
        """The engine's own prefix cache, if nobody has blocks of it; those of `running` requests are taken first."""
        if running:
            self.preempt(-1)
        self._post(lambda: self._told(f"reset: {self._scheduler.pool.reset_prefix_cache()}"))

    def _post(self, change: Callable[[], None]) -> None:
        self._inbox.append(change)
        self._woken.set()

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `close`."""
        under_way = self._under_way
        try:
            while not self._closed:
                self._take_inbox()
                if busy := self._steps():
                    under_way.append(await self._begin())
                elif not under_way:
                    self._woken.clear()
                    await self._woken.wait()
                    continue
                if len(under_way) > self._ahead or not busy:
                    await self._end(*under_way[0])
                    under_way.popleft()
            for _, running in under_way:
                await running
            self.workers.close()  # first: what is under way ends
            self.half.close()
        finally:
            for asked in self.requests.values():
                asked.uses.close()

    def _steps(self) -> bool:
        """Whether there is something to do. Woken, an engine steps once."""
        woken, self._wakes = self._wakes, False
        return bool(woken or self.requests or self.half.pending())

    async def _begin(self) -> tuple[Any, asyncio.Task[Results]]:
        output, passes = await self._scheduler.schedule()
        meta = self.half.plan(output)
        self._look()
        running = asyncio.ensure_future(self.workers.execute(meta, passes))
        await asyncio.sleep(0)  # it is launched
        if output.num_scheduled_tokens or meta.loads or meta.stores:
            self._idle_s = _IDLE_S[0]
        else:
            self._idle_s = min(2 * self._idle_s, _IDLE_S[1])
            await asyncio.sleep(self._idle_s)
        return output, running

    async def _end(self, output: Any, running: asyncio.Task[Results]) -> None:
        results = await running
        self._take_inbox()  # vLLM takes aborts before it looks at what a step has brought
        self._scheduler.update(output, results)
        self._look()

    def _look(self) -> None:
        """Whatever is seen to be wrong where nothing may be raised is raised here."""
        if self._ledger.wrong is not None:
            raise self._ledger.wrong

    def close(self) -> None:
        """The engine shuts down; its requests are lost, and `run` ends."""
        self._closed = True
        self._woken.set()

    def wake(self) -> None:
        """Have it step once."""
        self._wakes = True
        self._woken.set()

    # -- what is to hold ----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether steps or copies are under way, or blocks wait for theirs."""
        half: Any = self.half
        return bool(self._under_way or half._stores._storing or len(half._loads) or half._kept or self.workers.busy())

    @property
    def dirty(self) -> bool:
        """Whether it has blocks that are not stored yet."""
        half: Any = self.half
        return bool(half._stores)

    @property
    def stopped(self) -> bool:
        """Whether it stores nothing any more, since its device took too long for a copy."""
        half: Any = self.half
        return bool(half._stores.stopped)

    def describe(self) -> str:
        states = [f"{name} {asked.state}" for name, asked in self.requests.items()]
        half: Any = self.half
        return f"{states}, {len(half._loads)} loads, stores {bool(half._stores)}, {len(half._kept)} kept"

    def check(self) -> None:
        """Idle: nothing is held, nothing is under way."""
        half: Any = self.half
        half.check()
        pool = self._scheduler.pool
        left = {
            "requests": len(self.requests) + len(half._requests),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "loads": len(half._loads),
            "stores": len(half._stores._storing),
            "kept": len(half._kept),
            "copies": int(self.workers.busy()),
        }
        if any(left.values()):
            raise Wrong(f"{self._name} is idle, and something is left: {left}")
