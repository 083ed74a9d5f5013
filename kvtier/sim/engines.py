"""The engines of a fleet: one per machine, which begins and ends with the process that has the cache. What happens to
them step by step, and what is to hold once all is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtier.sim.attach import attach
from kvtier.sim.device import HANG_S
from kvtier.sim.device_faults import DeviceFaults
from kvtier.sim.engine import Engine
from kvtier.sim.history import EngineShape
from kvtier.sim.host import Host
from kvtier.sim.ledger import Ledger, Wrong
from kvtier.sim.loop import VirtualLoop
from kvtier.sim.scheduler import LOAD_S, Scheduler
from kvtier.sim.workers import Workers
from kvtier.tiers.host.slot_table import FILLING, QUARANTINED
from kvtier.tiers.host.tier import HostTier

IDLE_S = 4 * (LOAD_S + HANG_S)
"""Once devices and tiers are well, all requests are answered, and nothing is left behind, within so long."""
_FRESH: Mapping[str, Any] = {"blocks": 4, "short": 5, "tokens": 2, "by_length": True, "kind": "urgent"}

_UNNAMED_MIN = 32
"""Blocks without names are stored if they are a quarter of their pool at most."""


@dataclass
class _Machine:
    """What outlives the process on it is what is wrong with its devices."""

    faults: DeviceFaults = field(default_factory=DeviceFaults)
    engine: Engine | None = None
    driving: asyncio.Task[None] | None = None


class _Told(logging.Handler):
    """Errors that a connector keeps from its engine are promises broken. Of files, some are simulated."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.ERROR)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError):
            self._ledger.broken(f"the connector logs {type(error).__name__}: {error}")


@contextlib.contextmanager
def errors_told(ledger: Ledger) -> Iterator[None]:
    """What connectors log as errors is told to the ledger, and not printed."""
    log, told = logging.getLogger("kvtier.connectors"), _Told(ledger)
    level, propagates = log.level, log.propagate
    log.setLevel(logging.ERROR)
    log.propagate = False
    log.addHandler(told)
    try:
        yield
    finally:
        log.removeHandler(told)
        log.setLevel(level)
        log.propagate = propagates


class Engines:
    """See the module. `bound_s`: after which a purge is in force everywhere; `leapt`: how long all were suspended."""

    def __init__(
        self, shape: EngineShape, loop: VirtualLoop, ledger: Ledger, rng: random.Random, bound_s: float,
        leapt: Callable[[], float], told: Callable[[Host, str], None],
    ) -> None:  # fmt: skip
        self._shape, self._loop, self._ledger, self._rng = shape, loop, ledger, rng
        self._bound_s, self._leapt, self._told = bound_s, leapt, told
        self._machines: dict[int, _Machine] = {}

    def of(self, host: Host) -> _Machine:
        return self._machines.setdefault(host.number, _Machine())

    # -- processes --------------------------------------------------------------------------------------------------

    async def start(self, host: Host) -> None:
        """In the host's process, whose cache is open."""
        assert host.cache is not None
        machine, manager = self.of(host), host.cache.manager
        half = attach(host.cache, host.clock, self._shape, self._ledger)
        workers = Workers(self._shape, machine.faults, random.Random(self._rng.getrandbits(32)), self._ledger)
        for rank in workers.ranks:
            rank.device.owned = partial(_owned, manager.host, self._ledger)
        process = host.process
        name, told = f"e{process}", partial(self._told, host)
        scheduler = partial(
            Scheduler, name, self._shape, half, workers, self._ledger, random.Random(self._rng.getrandbits(32)),
            lambda keys: self._ledger.before(keys, process, manager.hierarchy.proven_at, self._bound_s),
            self._leapt, told,
        )  # fmt: skip
        machine.engine = Engine(name, scheduler, self._shape.ahead, self._ledger, told)
        machine.driving = self._loop.spawn(process, machine.engine.run())

    async def shut(self, host: Host) -> None:
        """In the host's process: its engine ends in good order."""
        machine = self.of(host)
        if machine.engine is not None and machine.driving is not None:
            machine.engine.close()
            await machine.driving
            counted = {name: count for name, count in sorted(machine.engine.half.counters.items()) if count}
            self._told(host, f"its engine ends: {counted}")
        self.killed(host)

    def killed(self, host: Host) -> None:
        """Its process has ended."""
        machine = self.of(host)
        machine.engine = machine.driving = None

    def look(self) -> None:
        """Raise what an engine raised."""
        for machine in self._machines.values():
            if machine.driving is not None and machine.driving.done():
                machine.driving.result()

    # -- what happens -----------------------------------------------------------------------------------------------

    def act(self, host: Host, verb: str, args: dict[str, Any]) -> None:
        """A step of a history, of its machine's engine or devices."""
        machine = self.of(host)
        if verb == "device":
            machine.faults.kind, machine.faults.rate = args["kind"], args["rate"]
        elif (engine := machine.engine) is not None:
            if verb == "ask":
                engine.ask(args)
            elif verb == "abort":
                engine.abort(args["which"])
            elif verb == "preempt":
                engine.preempt(args["which"])
            else:
                engine.reset(running=args["running"])

    # -- what is to hold --------------------------------------------------------------------------------------------

    async def idle(self, host: Host) -> None:
        """All that is wrong with its devices is mended: every request is answered, and nothing is left behind."""
        machine = self.of(host)
        machine.faults.kind = ""
        if (engine := machine.engine) is None:
            return
        ends = self._loop.time() + IDLE_S
        while engine.requests or engine.busy:
            if self._loop.time() > ends:
                raise Wrong(f"the engine of host {host.number} is not idle after {IDLE_S:g} s: {engine.describe()}")
            await asyncio.sleep(0.5)
            self.look()
            if not engine.requests:
                engine.wake()  # an engine without requests has stopped to look for what its copies came to
        engine.check()

    async def copied(self, host: Host) -> None:
        """Every block that waits for a copy has had one, unless G2 has no room for it."""
        if (engine := self.of(host).engine) is None:
            return
        for _ in range(40):
            engine.wake()
            await asyncio.sleep(0.5)
            if not engine.dirty:
                return

    async def works(self, host: Host, scope: int) -> None:
        """A prompt is answered, stored, and loaded when the engine has lost it."""
        engine = self.of(host).engine
        unnamed = not self._shape.caching and self._shape.blocks < _UNNAMED_MIN
        if engine is None or engine.stopped or unnamed:
            return
        prompt = {**_FRESH, "scope": scope, "chain": -1 - host.process}
        await self._answered(host, engine, prompt)
        await self.copied(host)
        engine.reset()
        loaded = engine.loaded
        await self._answered(host, engine, {**prompt, "tokens": 3})
        if engine.loaded == loaded and not self._shape.weighs:
            raise Wrong(f"the engine of host {host.number} does not find what it stored")

    async def _answered(self, host: Host, engine: Engine, args: Mapping[str, Any]) -> None:
        engine.ask(args)
        ends = self._loop.time() + LOAD_S
        await asyncio.sleep(0.01)
        while engine.requests:
            if self._loop.time() > ends:
                raise Wrong(f"the engine of host {host.number} does not answer: {engine.describe()}")
            await asyncio.sleep(0.1)
            self.look()


def _owned(tier: HostTier, ledger: Ledger, store: bool, slot: int, generation: int) -> None:
    """A copy uses a slot of G2, which it has to itself, or with other readers, until it has ended."""
    table = tier._table
    held = table.states[slot] in (FILLING, QUARANTINED) if store else table.pins[slot] > 0
    if not held or table.generations[slot] != generation:
        ledger.broken(f"a {'store' if store else 'load'} uses a slot of G2 that was given away")
