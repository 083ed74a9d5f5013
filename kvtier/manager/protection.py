"""Blocks that eviction must not take: named pins and guarantees, over all tiers.

    guaranteed or pinned ─→ retained in G2 ─(durable below)→ retained by G3, released in G2 ─(time is over)→ evictable
                        └─→ named pins: written beside G3's index, and in G4 for every replica

A block is retained in G2 (out of its policy's hands) until a local tier below retains it; then G2 may use its slot for
other blocks. All guarantees and pins together are bounded by a share of the tier that retains, blocks retained in G2 by
the same share of its slots. A purge ends pins and guarantees alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.manager.claims import Claims
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.pin_sync import FAILURES, PinSync
from kvtier.manager.retain import Retainer, Times
from kvtier.manager.slices import MOVED_BLOCKS, slices
from kvtier.manager.work import Work
from kvtier.retention.guarantees import Guarantees
from kvtier.retention.pins import Pin, Pins
from kvtier.retention.ranges import ChainTerms
from kvtier.retention.terms import Depth
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall

log = logging.getLogger(__name__)

_MARGIN = 0.125  # of a guarantee's time that it is retained longer below: not every use has to reach that tier
_NEVER = Wall("-inf")


@dataclass(frozen=True, slots=True)
class _Guarantee:
    """Bytes reserved for `seconds` after each use. `made`: wall time that tells it from those a purge covers."""

    seconds: float
    made: Wall


class Protection:
    """The guarantees and named pins of one manager. Sync verbs are thread-safe unless they say that they are called
    under the lock; async ones are called on its loop. Neither holds the lock for more than a slice.

    At each yield of a verb: a block is retained in G2 or below only if it is wanted, or is among those that `_expiring`
    will end; a pin that has ended, or a scope that was purged, has no say about a block that arrives.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._host, self._lock, self._clock = hierarchy.host, hierarchy.lock, hierarchy.clock
        self._share, self.budget = hierarchy.limits.reserved, 0
        self.begin, self.require_loop = hierarchy.begin, hierarchy.require_loop
        self.pins = Pins(0)
        self.guarantees = Guarantees(0, 1)
        self._sync = PinSync(hierarchy, self.pins)
        self._terms = KeyMap[_Guarantee]()
        self.claims = Claims(hierarchy.lock)
        self.retainer = Retainer(hierarchy, self.wanted, self._by_time)
        self._turn = asyncio.Lock()
        self.block_bytes = hierarchy.host.block_bytes
        self._purged: dict[Scope, Wall] = {}  # scopes whose guarantees have to end
        self._establishing: set[str] = set()  # names of pins whose blocks do not all know of them yet

    async def open(self) -> None:
        """Find the tiers that retain, and the protection that earlier processes left. Tier errors are logged."""
        self.budget = self.retainer.open(self._share)
        self._sync.open()
        try:
            await self._read_pins()
            retained = await self.retainer.known_below()
        except FAILURES as error:
            log.warning("pins and guarantees of earlier processes cannot be read: %s", error)
            return
        wall_s = self._clock.read().stamp
        for part in slices(list(retained.items())):
            with self._lock:
                for key, until in part:
                    self.retainer.found(key, until)
                    if not self.pins.covers(key) and until > wall_s:
                        self.guarantees.adopt(key, until)
                        self._terms[key] = _Guarantee(0.0, Wall(0))  # its time after a use is not known
                    self._end(key)
            await asyncio.sleep(0)

    async def open_late(self) -> None:
        """`open` after a tier has joined: it is to retain what is protected, and to remember the pins."""
        with self._lock:
            self._sync.unwritten.update(pin.name for pin in self.pins.listed())  # first: else they have ended elsewhere
        async with self._turn:
            await self.open()
        with self._lock:
            chains = [list(self._terms), *(pin.chain for pin in self.pins.listed())]
        for part in (part for chain in chains for part in slices(chain)):
            with self._lock:
                self.retainer.ask(key for key in part if self.wanted(key) and not self.retainer.has_below(key))
            await asyncio.sleep(0)

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        """Whether anything is protected: most of the time nothing is."""
        return bool(len(self.pins) or len(self.guarantees))

    def wanted(self, key: BlockKey) -> bool:
        """Whether a block is protected. Under the lock."""
        return self.pins.covers(key) or self.guarantees.until(key) > _NEVER

    def _divide_budget(self) -> None:
        """Pins and guarantees share one budget."""
        self.pins.limit_blocks = max(0, self.budget - len(self.guarantees))
        self.guarantees.limit_blocks = max(0, self.budget - len(self.pins))

    def guarantee(self, chain: Sequence[BlockKey], start: int, terms: ChainTerms, work: Work, stop: int = -1) -> None:
        """Reserve the bytes of the guaranteed blocks among start … stop-1 (-1: the end), here or to come; all or none,
        and none that has been purged since `work` began.

        Raises InvalidRequest when that is more than may be guaranteed: the budget of all is set aside before the first
        is taken. (A block whose guarantee ends between two slices is taken all the same, beyond the limit.)
        """
        stop = len(chain) if stop < 0 else stop
        spans = [span for span in terms.spans(start, stop) if span[2].guarantee_s]
        parts = [(part, block) for first, end, block in spans for part in slices(chain[first:end], MOVED_BLOCKS)]
        new, wall_s = 0, self._clock.read().stamp
        for part, _ in parts:
            with self._lock:
                new += self.guarantees.lacking(part)
        self._admit(new, wall_s)
        for part, block in parts:
            hard = block.terms.max_age
            seconds = block.guarantee_s if hard is None else min(block.guarantee_s, hard)
            with self._lock:
                if work.lost(part):
                    break
                taken = min(new, self.guarantees.lacking(part))
                new -= taken
                self.guarantees.settle(taken)
                for key in part:
                    self.guarantees.adopt(key, wall_s + seconds)
                    known = getattr(self._terms.get(key), "seconds", 0.0)
                    self._terms[key] = _Guarantee(seconds if block.renewed else known, wall_s)
                if block.terms.ceiling >= Depth.G3:
                    self.retainer.ask(part, wall_s + seconds)
                self.retainer.retain(part)
        with self._lock:
            self.guarantees.settle(new)

    def _admit(self, blocks: int, wall_s: Wall) -> None:
        with self._lock:
            self._divide_budget()
            admits = self.guarantees.admits(blocks)
        if not admits:
            for _ in self._expiring(wall_s):
                pass
        with self._lock:
            self._divide_budget()
            self.guarantees.admit(blocks)

    def is_gone(self, key: BlockKey, now: Wall) -> bool:
        """Whether a block is neither in G2 nor retained below, and nobody is about to store it. Under the lock."""
        if self.retainer.has_below(key) or key in self.claims:
            return False
        return self._host.peek(key, now) not in (None, Miss.PENDING)

    def release_guarantees(self, keys: Sequence[BlockKey]) -> None:
        """These guaranteed blocks were not stored after all."""
        now = self._clock.wall()
        for part in slices(keys):
            with self._lock:
                for key in part:
                    if self.is_gone(key, now):
                        self._withdraw(key)

    def release_fixed(self, keys: Sequence[BlockKey]) -> None:
        """End the guarantees of these blocks, but for those that uses renew."""
        for part in slices(keys, MOVED_BLOCKS):
            with self._lock:
                for key in part:
                    if key in self._terms and not self._terms[key].seconds:
                        self._withdraw(key)

    def arrived(self, slots: Sequence[Slot]) -> None:
        """Blocks are READY in G2: those that are pinned live until their pins end, guaranteed ones stay. Under the
        lock."""
        wanted = {key: slot for slot in slots if (key := slot.key) is not None and self.wanted(key)}
        if not wanted:
            return
        untils = {wanted[key].number: until for key, until in self.pins.untils(wanted).items()}
        now = self._clock.read()
        for time in (now.serve,) if now.delete is not None else (now.stamp, now.serve):  # in doubt: whichever is right
            self._host.index.table.extend_until(untils, time)
        self.retainer.retain(wanted)

    def used(self, keys: Iterable[BlockKey], wall_s: Wall) -> None:
        """Blocks were used at `wall_s`: their guarantees begin anew. Under the lock."""
        for key in keys:
            terms = self._terms.get(key)
            if terms is not None:
                self.guarantees.adopt(key, wall_s + terms.seconds)
                if self.retainer.has_below(key):
                    self.retainer.ask([key], wall_s + terms.seconds)

    def purge(self, scopes: Mapping[Scope, Wall]) -> None:
        """Scopes were purged: their pins made until then end now, and their guarantees in `expire`: the
        blocks are misses meanwhile. Under the lock; O(pins)."""
        self._sync.note_ended(self.pins.end_scopes(scopes))
        if self._terms:
            self._purged.update((tenant_of(scope), before) for scope, before in scopes.items())

    def _withdraw(self, key: BlockKey) -> None:
        """End a guarantee."""
        self._terms.pop(key, None)
        self.guarantees.drop(key)
        self._end(key)

    def _end(self, key: BlockKey) -> None:
        """Release a block that is not protected any more."""
        if self.wanted(key):
            return
        self._terms.pop(key, None)
        self.retainer.release(key)

    # ── named pins, on the loop ─────────────────────────────────────────────────────────────────────────────

    async def create(
        self, name: str, chain: Sequence[BlockKey], ttl: float, tokens: int = 0, work: Work | None = None
    ) -> Pin:
        """Pin a chain under a new name for `ttl` seconds: its blocks that are here, and those to come. On return the
        pin is on its media, and the tiers below retain what they have of it; or it has ended, if its scope was purged
        since `work` began (None: now). Raises InvalidRequest, and then nothing has changed."""
        work = work or self.begin()
        async with self._turn:
            wall_s = self._clock.read().stamp
            await self.expire(wall_s)
            new = 0
            for part in slices(chain):
                with self._lock:
                    new += self.pins.uncovered(part)
                await asyncio.sleep(0)
            with self._lock:
                self._divide_budget()
                pin = self.pins.admit(name, chain, wall_s, ttl, tokens, new)
                if work.lost(chain[:1]):
                    self.pins.end(name)
            await self._cover(pin)
            await self._establish(pin)
            return pin

    async def _cover(self, pin: Pin) -> None:
        """Let a pin cover its chain, from its head on. If a purge ends it meanwhile, what follows is not covered;
        cancelled, there is no pin."""
        try:
            for part in slices(pin.chain):
                with self._lock:
                    self.pins.cover(pin.name, part)
                await asyncio.sleep(0)
        except BaseException:
            with self._lock:
                self.pins.end(pin.name)
            raise

    async def extend(self, name: str, ttl: float) -> Pin:
        """Let a pin end `ttl` seconds from now, later or sooner. Raises InvalidRequest if there is none. Cancelled, it
        holds, and the next `tend` does the rest; so for `create`, once the pin covers its chain."""
        async with self._turn:
            wall_s = self._clock.read().stamp
            await self.expire(wall_s)
            with self._lock:
                pin = self.pins.extend(name, wall_s, ttl)
            await self._establish(pin)
            return pin

    async def delete(self, name: str, *, drop: bool = False) -> bool:
        """End a pin; whether there was one. Its blocks leave as others do from now on; with `drop`, those that nothing
        else protects leave every tier at once."""
        async with self._turn:
            await self.expire(self._clock.read().stamp)
            with self._lock:
                pin = self.pins.get(name)
                there = self.pins.end(name)
                self._sync.note_deleted(name)
            await self.expire(None)
            there |= await self._sync.write([name])
            await self.retainer.tell_below()
        if drop and pin is not None:
            await self._hierarchy.drop_everywhere(pin.chain, self.wanted)
        return there

    def listed(self) -> list[Pin]:
        """The pins that have not ended, by name."""
        with self._lock:
            pins, wall_s = list(self.pins), self._clock.wall()
        return sorted((pin for pin in pins if pin.until >= wall_s), key=lambda pin: pin.name)

    def resident(self, pin: Pin) -> int:
        """How many of a pin's blocks are in G2."""
        count = 0
        for part in slices(pin.chain):
            with self._lock:
                count += sum(key in self._host.index for key in part)
        return count

    async def _establish(self, pin: Pin) -> None:
        wall_s = self._clock.wall()
        self._establishing.add(pin.name)
        for part in slices(pin.chain, MOVED_BLOCKS):
            with self._lock:
                index = self._host.index
                here = [slot for key in part if (slot := index.get(key)) is not None]
                self.arrived([slot for slot in here if not index.table.has_ended(slot.number, wall_s)])
                self.retainer.ask(part)
                self._sync.unwritten.add(pin.name)
            await asyncio.sleep(0)
        self._establishing.discard(pin.name)
        await self._sync.write([pin.name])
        await self.retainer.tell_below()

    # ── housekeeping, on the loop ───────────────────────────────────────────────────────────────────────────

    async def tend(self, *, read_pins: bool = False) -> bool:
        """End pins and guarantees whose time is over, or whose scope was purged, and bring changes to the tiers below;
        with `read_pins`, take in those made elsewhere, and end guarantees of blocks that no tier has any more. Whether
        they were read."""
        async with self._turn:
            await self.expire(self._clock.read().delete)
            for name in list(self._establishing):
                if (begun := self.pins.get(name)) is not None:
                    await self._establish(begun)
                self._establishing.discard(name)
            with self._lock:
                names = list(self._sync.unwritten)
            await self._sync.write(names)
            await self.retainer.tell_below()
            if read_pins:
                try:
                    await self._read_pins()
                    await self._end_lost(await self.retainer.drop_stale(), lambda key: False)
                except FAILURES as error:
                    log.debug("pins cannot be read now: %s", error)
                    return False
        return read_pins

    async def evicted(self, tier: str, on_its_way: Callable[[BlockKey], bool]) -> None:
        """A tier's copies were dropped by its operator: guarantees of blocks that no tier reserves bytes for any more
        end. `on_its_way`, under the lock: whether a block is being written to the tier below."""
        async with self._turn:
            await self.retainer.forget(tier)
            await self.retainer.tell_below()  # whether it has those that it was asked for
            keys = list(self._terms)  # at once, in C: no lock
            await self._end_lost(keys, lambda key: self.retainer.is_asked(key) or on_its_way(key))

    async def _end_lost(self, keys: Sequence[BlockKey], spared: Callable[[BlockKey], bool]) -> None:
        now = self._clock.wall()
        for part in slices(keys):
            with self._lock:
                for key in part:
                    if self.is_gone(key, now) and not self.pins.covers(key) and not spared(key):
                        self._withdraw(key)
            await asyncio.sleep(0)

    def _expiring(self, wall_s: Wall | None) -> Iterator[None]:
        """End what is over at `wall_s` (None: only what was purged or ended before), a slice at each step."""
        if wall_s is not None:
            with self._lock:
                self._sync.note_ended(self.pins.end_due(wall_s))
        while wall_s is not None and self.guarantees.due(wall_s):
            with self._lock:
                for key in self.guarantees.expire(wall_s, MOVED_BLOCKS):
                    self._terms.pop(key, None)  # though a pin may keep the block: its use renews none that is over
                    self._end(key)
            yield
        yield from self._purging()
        while self.pins.ending:
            with self._lock:
                for key in self.pins.uncover(MOVED_BLOCKS):
                    self._end(key)
            yield

    def _purging(self) -> Iterator[None]:
        """End the guarantees of purged scopes that were made until then."""
        while self._purged:
            with self._lock:
                scopes, self._purged = self._purged, {}
            keys = list(self._terms)  # at once, in C: no lock
            try:
                for part in slices(keys):
                    with self._lock:
                        for key in part:
                            terms = self._terms.get(key)
                            if terms is not None and terms.made <= scopes.get(tenant_of(key), _NEVER):
                                self._withdraw(key)
                    yield
            except GeneratorExit:  # the caller was cancelled: begin again
                with self._lock:
                    self._purged = {**scopes, **self._purged}
                raise

    async def expire(self, wall_s: Wall | None) -> None:
        """End what is over at `wall_s`; None: only what was purged. Cancelled, the next `tend` does the rest."""
        for _ in self._expiring(wall_s):
            await asyncio.sleep(0)

    def _by_time(self, keys: Sequence[BlockKey]) -> dict[Times, list[BlockKey]]:
        """The wanted blocks among these by when they end. Under the lock."""
        groups: dict[Times, list[BlockKey]] = {}
        pinned = self.pins.untils(keys)
        for key in keys:
            if not self.wanted(key):
                continue
            terms, until, served = self._terms.get(key), self.guarantees.until(key), pinned.get(key)
            longer = terms.seconds * _MARGIN if terms is not None else 0.0
            groups.setdefault((max(until + longer, served or _NEVER), served), []).append(key)
        return groups

    async def _read_pins(self) -> None:
        """Take in the pins that other processes and replicas made, or ended. Raises TierError or OSError."""
        for pin in await self._sync.merge():
            for part in slices(pin.chain):
                with self._lock:
                    self.pins.cover(pin.name, part)
                    self.retainer.ask(part)
                await asyncio.sleep(0)
        await self.expire(None)

    def stats(self) -> dict[str, int]:
        """Gauges and counters. Under the lock."""
        return {
            "pins": self.pins.names,
            "pinned": len(self.pins),
            "guaranteed": len(self.guarantees),
            "refused": self.guarantees.refused,
            "unheld": self.retainer.unheld,
        }

    def check(self) -> None:
        """Assert the invariants. Under the lock."""
        self.pins.check()
        self.guarantees.check()
        assert all(self.guarantees.until(key) > _NEVER for key in self._terms), "a guarantee that is not counted"
        self.retainer.check()
