"""A history as it is played: machines and their processes, one bucket, one virtual time. Promises are checked
all along.

Real are the cache, the manager with its policies, and the G4 tier; bucket, clocks, threads and callers are virtual. The
disk is `kvtier.testing.MemoryTier` over what survives a process, or the real G3 over a virtual drive.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Coroutine, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from kvtier.cache import AsyncCache
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.retention.trusted_clock import SETTLE_S, deletion_time
from kvtier.sim.client import GRACE_S, Client, cancelled
from kvtier.sim.configuration import BOUND_S, CLOSE_S, config_of
from kvtier.sim.engines import Engines
from kvtier.sim.history import ENGINE_VERBS, History, Step
from kvtier.sim.host import Host
from kvtier.sim.kernel import Kernel
from kvtier.sim.ledger import Ledger, Wrong, bytes_of
from kvtier.sim.loop import OUTSIDE, LoopClock, VirtualLoop
from kvtier.sim.prompts import NAMESPACE, SHORT, UNTOUCHED, chain_of_step, fresh_chain
from kvtier.testing.clock import SkewedClock
from kvtier.testing.virtual_bucket import VirtualServer

QUIET_S = 10.0
LONGEST_S = 320.0
"""No call takes longer."""
HEALED_S = 90.0
"""After so long in good link_faults everything works again."""


class World:
    """`log`: what happened, a line each; `digest` of it and of the scheduler's turns tells two histories apart."""

    def __init__(
        self, history: History, loop: VirtualLoop, kernel: Kernel | None = None, folder: Path = Path("/simulated")
    ) -> None:
        """`kernel`, where G3 is to be the real one, with files below `folder`."""
        self.history = history
        self._loop = loop
        self._rng = random.Random(f"world {history.seed}")
        clock = LoopClock(loop)
        self.server = VirtualServer(clock=clock)
        self.hosts = [
            Host(
                number, SkewedClock(clock, ahead_s), self.server, random.Random(self._rng.getrandbits(32)), kernel,
                folder / f"host{number}", history.disk_blocks,
            )
            for number, ahead_s in enumerate(history.skews)
        ]  # fmt: skip
        self._config = config_of(history)
        self._fresh = UNTOUCHED if history.quota else 1  # a scope whose guaranteed blocks do not fill its quota
        self._leapt = 0.0
        self._processes = OUTSIDE
        self._running: list[asyncio.Task[None]] = []
        self._beside_tasks: list[asyncio.Task[None]] = []
        self.ledger = Ledger(NAMESPACE.block_bytes, SHORT, loop.time, history.spread_s + GRACE_S)
        self.log: list[str] = []
        self._hash = hashlib.sha256()
        self._engines: Engines | None = None
        if history.engine is not None:
            rng = random.Random(f"engines {history.seed}")
            self._engines = Engines(
                history.engine, loop, self.ledger, rng, self._bound_s, lambda: self._leapt, self.tell
            )

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:32]

    @property
    def _bound_s(self) -> float:
        return BOUND_S if self.history.purge == "strict" else inf

    def tell(self, host: Host | None, what: str) -> None:
        """An event of the history."""
        line = f"{self._loop.time() - 1000:.4f} {'-' if host is None else host.number} {what}"
        self.log.append(line)
        self._hash.update(f"{self._loop.turns} {line}\n".encode())

    async def run(self) -> None:
        """Raises Wrong, or whatever a cache raised."""
        for host in self.hosts:
            await self._start(host)
        for step in self.history.steps:
            await asyncio.sleep(step.gap)
            self._reap()
            host = self.hosts[step.host % len(self.hosts)]
            change = getattr(self, f"_{step.verb}", None)
            if change is not None:
                self.tell(host, f"{step.verb} {step.args}")
                await change(host, step.args)
            elif self._engines is not None and step.verb in ENGINE_VERBS:
                self.tell(host, f"{step.verb} {step.args}")
                self._engines.act(host, step.verb, step.args)
            elif host.cache is not None:
                self._launch(host, step)
        await self._ended(self.hosts)
        if self.history.mode == "liveness":
            await self._recovers()
        if self._engines is not None:
            await self._engines_recover(self._engines)
        for host in self.hosts:
            await self._look(host)
        for host in self.hosts:
            await self._close(host)
        if self._loop.errors:
            raise Wrong(f"an exception that nobody awaited: {self._loop.errors[0]}")

    # -- calls ------------------------------------------------------------------------------------------------------

    def _client(self, host: Host) -> Client:
        assert host.cache is not None
        return Client(
            host.cache, host.process, self.ledger, lambda: self._leapt, lambda told: self.tell(host, told),
            self._bound_s,
        )  # fmt: skip

    def _launch(self, host: Host, step: Step) -> None:
        """Begin a step's call, and cancel it some turns later, if it says so."""
        self.tell(host, f"{step.verb} {step.args}")
        call = partial(self._client(host).do, step.verb, step.args, random.Random(step.seed))
        task = self._loop.spawn(host.process, cancelled(call, step.args.get("cancel")))
        task.set_name(f"{step.verb} on host {host.number}")
        self._running.append(task)

    def _reap(self) -> None:
        """Raise what a call that has ended raised, or an engine, or a neighbour."""
        if self._engines is not None:
            self._engines.look()
        for tasks in (self._running, self._beside_tasks):
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled():
                    task.result()

    async def _ended(self, hosts: Sequence[Host]) -> None:
        """All calls of these hosts' processes have returned."""
        processes, ends = {host.process for host in hosts}, self._loop.time() + LONGEST_S
        while True:
            self._reap()
            running = [task for task in self._running if task.process in processes]  # type: ignore[attr-defined]
            if not running:
                return
            if self._loop.time() >= ends:
                raise Wrong(f"{running[0].get_name()} does not end within {LONGEST_S:g} s")
            await asyncio.wait(running, timeout=ends - self._loop.time(), return_when=asyncio.FIRST_COMPLETED)

    async def _within(self, host: Host, work: Coroutine[Any, Any, Any], seconds: float, what: str) -> Any:
        """The result of work in a host's process, which must end in time."""
        task = self._loop.spawn(host.process, work)
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise Wrong(f"{what} on host {host.number} does not end within {seconds:g} s")
        return task.result()

    # -- processes --------------------------------------------------------------------------------------------------

    async def _start(self, host: Host) -> None:
        cache = self._boot(host)
        await self._within(host, cache.__aenter__(), 120.0, "opening")
        host.cache = cache
        if self._engines is not None:
            await self._within(host, self._engines.start(host), GRACE_S, "the start of the engine")
        self.tell(host, "opened")
        await self._compared(host)

    def _boot(self, host: Host) -> AsyncCache:
        self._processes += 1
        self.ledger.restarted(host.process, self._processes)
        return host.boot(self._processes, self._config, NAMESPACE, partial(self.tell, host))

    async def _close(self, host: Host) -> None:
        if host.cache is None:
            return
        await self._compared(host)
        cache, host.cache = host.cache, None
        if self._engines is not None:
            await self._within(host, self._engines.shut(host), CLOSE_S, "the end of the engine")
        if host.neighbour is not None:
            await self._within(host, host.neighbour.close(), CLOSE_S, "closing the neighbour")
        flushed = await self._within(host, cache.close(), CLOSE_S + GRACE_S, "closing")
        self.tell(host, f"closed, {flushed.pending} pending")
        await self._ended([host])  # of callers, some hold leases
        host.cut_off()
        self._loop.kill(host.process)

    async def _kill(self, host: Host, args: dict[str, Any]) -> None:
        """`again`: the next process is killed, too, so long after it began to open its cache. `power`: the machine
        stops, and its disk loses what was not synced."""
        await self._compared(host)
        cache, host.cache = host.cache, None
        host.disk_blocks = args.get("disk_blocks", host.disk_blocks)
        self._end(host, cache)
        if args.get("power"):
            host.lose_power()
        await asyncio.sleep(args["down"])
        if "again" in args:
            cache = self._boot(host)
            self._loop.spawn(host.process, cache.__aenter__())
            await asyncio.sleep(args["again"])
            self._end(host, cache)
            if args.get("power"):
                host.lose_power()
        await self._start(host)

    def _end(self, host: Host, cache: AsyncCache | None) -> None:
        """Nothing of the host's process runs any more, and its memory is gone."""
        host.cut_off()
        self._loop.kill(host.process)
        if self._engines is not None:
            self._engines.killed(host)
        for tasks in (self._running, self._beside_tasks):
            tasks[:] = [task for task in tasks if task.process != host.process]  # type: ignore[attr-defined]
        if cache is not None:
            cache.manager.host.arena.close()
        host.check_disk()

    async def _compared(self, host: Host) -> None:
        """What a real G3 says to have is on its disk."""
        if host.real is not None:
            await self._within(host, host.real.compare(), GRACE_S, "a look at the disk")

    async def _stop(self, host: Host, args: dict[str, Any]) -> None:
        """A clean end, with calls under way."""
        await self._close(host)
        host.disk_blocks = args.get("disk_blocks", host.disk_blocks)
        await asyncio.sleep(args["down"])
        await self._start(host)

    # -- what happens to machines -----------------------------------------------------------------------------------

    async def _bucket(self, host: Host, args: dict[str, Any]) -> None:
        host.link_faults.kind, host.link_faults.rate = args["kind"], args["rate"]

    async def _disk(self, host: Host, args: dict[str, Any]) -> None:
        host.break_disk(args)

    async def _beside(self, host: Host, args: dict[str, Any]) -> None:
        """Another model uses the store. Nobody waits for it."""
        if host.neighbour is not None and host.cache is not None:
            told = partial(self.tell, host)
            self._beside_tasks.append(self._loop.spawn(host.process, host.neighbour.do(args, told)))

    async def _heal(self, host: Host, args: dict[str, Any]) -> None:
        await self._compared(host)
        host.heal()

    async def _land(self, host: Host, args: dict[str, Any]) -> None:
        """Writes that were not answered arrive."""
        late, host.link_faults.late = host.link_faults.late, []
        self._rng.shuffle(late)
        for name, data, used in late:
            if name not in self.server.objects:
                self.server.put(name, data, used)

    async def _damage(self, host: Host, args: dict[str, Any]) -> None:
        """Bits flip in an object, and in a block on the disk."""
        if names := [name for name in self.server.names if "/units/" in name]:
            there = self.server.objects[self._rng.choice(names)]
            data = bytearray(there.data)
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            there.data = bytes(data)
        host.damage_disk(self._rng, NAMESPACE.block_bytes)

    async def _jump(self, host: Host, args: dict[str, Any]) -> None:
        host.clock.ahead_s = args["ahead"]

    async def _leap(self, host: Host, args: dict[str, Any]) -> None:
        self._leapt += args["seconds"]
        self._loop.leap(args["seconds"])

    # -- checks -----------------------------------------------------------------------------------------------------

    async def _look(self, host: Host) -> None:
        """Every chain that was named, and the invariants."""
        if host.cache is None:
            return
        client, seen = self._client(host), set()
        for step in self.history.steps:
            if "chain" not in step.args or (name := (step.args["scope"], step.args["chain"])) in seen:
                continue
            seen.add(name)
            chain = chain_of_step({**step.args, "blocks": 6})
            found = await self._within(host, client.read_all(chain, 2.0), 2.0 + GRACE_S, "get")
            self.tell(host, f"has {found} of {name}")
        try:
            host.cache.check()
        except TierError:  # the disk is out of use, as long as it fails
            if self.history.mode != "safety" or self.history.disk == "model":
                raise
        host.check_disk()
        host.cache.stats()
        if failed := host.cache.manager.hierarchy.supervisor.restarts:
            raise Wrong(f"background tasks failed on host {host.number}: {dict(failed)}")

    async def _heal_all(self) -> None:
        for host, ahead_s in zip(self.hosts, self.history.skews, strict=True):
            host.heal(wholly=True)
            host.clock.ahead_s = ahead_s
            await self._land(host, {})

    async def _engines_recover(self, engines: Engines) -> None:
        """All is well again: every engine answers all requests and holds nothing, and what it computes is found."""
        await self._heal_all()
        healed = self._loop.time()
        for host in self.hosts:
            await engines.idle(host)
        await asyncio.sleep(QUIET_S)
        for host in self.hosts:
            await self._certain(host)
            await self._settled(host, healed)
            assert host.cache is not None
            # Else it may be full, for good, of blocks that are worth as much as those to come.
            await engines.copied(host)
            await self._within(host, host.cache.evict("g2"), CLOSE_S, "evict")
            await engines.works(host, UNTOUCHED)  # a clock that was ahead may have purged the others in what is to come
            await engines.idle(host)

    async def _recovers(self) -> None:
        """All is well again: every cache works, within HEALED_S."""
        await self._heal_all()
        healed = self._loop.time()
        await asyncio.sleep(QUIET_S)  # purges that were cancelled or failed are under way until then
        for host in self.hosts:
            await self._settled(host, healed)
        landed = self._loop.time()  # the last entry of the purge log was written by then
        for host in self.hosts:
            await self._settled(host, landed)
        for host in self.hosts:
            await self._stores(host)
            await self._keeps_its_word(host)
        await self._purges()

    async def _certain(self, host: Host) -> None:
        """Its clock is in doubt no more: until then blocks of short lives count as expired."""
        assert host.cache is not None
        for _ in range(int(SETTLE_S + HEALED_S) // 10):
            if deletion_time(host.cache.manager.hierarchy.clock) is not None:
                return
            await asyncio.sleep(10.0)
        raise Wrong(f"the clock of host {host.number} is in doubt after {SETTLE_S + HEALED_S:g} s")

    async def _settled(self, host: Host, healed: float = 0.0) -> None:
        """`healed`: the purge log was read since then, so that what is stored now is behind every purge."""
        assert host.cache is not None
        manager, ends = host.cache.manager, self._loop.time() + HEALED_S
        while True:
            flushed = await self._within(host, host.cache.flush(5.0), 5.0 + GRACE_S, "flush")
            await self._within(
                host, host.cache.match(fresh_chain(1, 99)), GRACE_S, "match"
            )  # a breaker probes by calls
            table = manager.host._table
            pinned = sum(pins > 0 for pins in table.pins)
            sick = [tier.name for tier in manager.lower.values() if not tier.healthy()]
            behind = "g4" in self.history.tiers and manager.hierarchy.proven_at < healed
            owed = len(manager._purger.owed())
            held = (
                pinned, manager.host.quarantined, len(manager.host.filling()), flushed.pending, owed,
                host.disk_reserved(), host.disk_excess(),
            )  # fmt: skip
            if not any(held) and not sick and not manager.lower.out and not behind:
                return
            if self._loop.time() > ends:
                out = {name: left.reason for name, left in manager.lower.out.items()}
                raise Wrong(
                    f"host {host.number} is not well after {HEALED_S:g} s: pinned, quarantined, filling, pending, "
                    f"owed, on disk reserved and beyond its capacity {held}, sick {sick}, left out {out}, behind the "
                    f"purge log {behind}"
                )
            await asyncio.sleep(1.0)

    async def _stores(self, host: Host) -> None:
        """New blocks are taken in, reach every tier, and are there again after a kill, and for other machines."""
        assert host.cache is not None
        chain = fresh_chain(self._fresh, host.number)
        await self._store(host, chain)
        if not self.history.tiers:
            return
        await self._within(host, host.cache.evict("g2"), CLOSE_S, "evict")
        await self._hits(host, chain, "after they left G2")
        await self._kill(host, {"down": 0.0, "power": True})
        await self._settled(host)
        await self._hits(host, chain, "after a kill")
        if "g4" in self.history.tiers:
            # A block younger than the clocks are apart is dated back, and may then count as purged before.
            await asyncio.sleep(self.ledger.spread_s)
            for other in self.hosts:
                await self._hits(other, chain, f"stored by host {host.number}")

    async def _keeps_its_word(self, host: Host) -> None:
        """A real G3 does to those who use it without a cache, over a restart, too."""
        if host.neighbour is not None:
            await self._within(host, host.neighbour.test(), 2 * CLOSE_S, "the neighbour's test")
            await self._kill(host, {"down": 0.0, "power": True})
            await self._settled(host)
            await self._within(host, host.neighbour.test_again(), 2 * CLOSE_S, "the neighbour's second test")

    async def _store(self, host: Host, chain: list[BlockKey]) -> None:
        assert host.cache is not None
        payloads = [bytearray(self._payload(key)) for key in chain]
        # Of the highest priority that histories give: the blocks of a lower one may find G2 full, for good.
        with self.ledger.using(chain, putting=True):
            stored = await self._within(host, host.cache.put(chain, payloads, "urgent", timeout=5.0), 6.0, "put")
        flushed = await self._within(host, host.cache.flush(20.0), 21.0, "flush")
        if stored != len(chain) or flushed.pending:
            raise Wrong(f"host {host.number} stores {stored} of {len(chain)} blocks, {flushed.pending} pending")

    async def _hits(self, host: Host, chain: list[BlockKey], when: str) -> None:
        found = await self._within(host, self._client(host).read_all(chain, 5.0), 6.0, "get")
        if found != len(chain):
            raise Wrong(f"host {host.number} finds {found} of {len(chain)} blocks {when}")

    async def _purges(self) -> None:
        """A purge is confirmed, and in force everywhere within its bound."""
        host, chain = self.hosts[0], fresh_chain(self._fresh, 0)
        try:
            await self._within(host, self._client(host).purge(self._fresh), BOUND_S + GRACE_S, "purge")
        except TierError as error:
            raise Wrong(f"a purge fails though all is well: {error}") from None
        await asyncio.sleep(BOUND_S + GRACE_S)
        for one in self.hosts:
            if found := await self._within(one, self._client(one).read_all(chain, 2.0), 3.0, "get"):
                raise Wrong(f"host {one.number} serves {found} blocks {BOUND_S:g} s after their purge")

    def _payload(self, key: BlockKey) -> bytes:
        return bytes_of(key, NAMESPACE.block_bytes)
