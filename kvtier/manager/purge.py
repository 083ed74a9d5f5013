"""Tenants dropped for good, in every tier.

A purge is remembered in three places: G2's tombstones (this process, by its clock), G3's index (every process of the
machine) and the purge log in the bucket (every replica); the last two by marks (`kvtier.retention.marks`). Each tier
learns here of the purges that the others remember. G2 applies one at once; a tier that fails *owes* it: it is asked
again until it has it, and nothing of that tenant is found in it before. A tier of this machine that may have missed
purges which nobody can name any more is *stale*: nothing is found in it until it has been emptied.

G2 forgets a purge that every tier has: none of them gives back what it covers, and a verb that began before it stores
nothing more (`kvtier.manager.work`). Until then it refuses by the time of its own clock, and so what another machine
stored after the purge by a clock that is behind.

A purge that the log did not take is owed to it until it has an entry for that very purge. Every other tier is told that
it was *refused*, by its mark: so the next process, and others of the machine, owe it too.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from kvtier.errors import KVTierError, TierError
from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.protection import Protection
from kvtier.manager.slices import aside, slices
from kvtier.retention.marks import POSITIONS, is_refused, later, mark_below, number_of, refused
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import PurgeLogging
from kvtier.times import Mono, Wall

OWED_MAX = 65_536
"""Purges that are remembered for tiers which do not take them; beyond, one is refused before it has any effect."""

_APPLIED = 512  # tombstones that take force in one hold of the lock
_NUMBERED_S = 5.0
"""A purge waits so long for tiers that are to know it by its number in the log, too; `sync` asks the others."""
_ROUNDED_S = 0.001
"""Stores round the time of a purge up to what they can hold."""


class Purger:
    """Purges and their spreading over the tiers of one manager. On its loop."""

    def __init__(self, hierarchy: Hierarchy, protection: Protection) -> None:
        self._hierarchy = hierarchy
        self._host, self._lower = hierarchy.host, hierarchy.lower
        self._protection = protection
        self._in_force: dict[Scope, Wall] = {}
        """Purges that a tier owes and that the log, as read, does not have: G2 has dropped what they cover."""
        self._synced = False  # whether `sync` has learned what is new before anything was stored here
        self._seen: dict[str, array[int]] = {}  # tier → hashes of the tombstones that `sync` has learned from it

    async def purge(self, scopes: Collection[Scope]) -> int:
        """Drop what the scopes' tenants stored until now; returns how many blocks. Raises the error of
        the nearest tier that failed when all have been asked for all; such a tier is asked again by `sync`. TierError,
        too, where a tier is left out: it takes the purge when it joins. And where OWED_MAX wait: then nothing has been
        done."""
        tenants = sorted({tenant_of(scope) for scope in scopes})
        log = self._hierarchy.purge_log()  # which may have been read further than what is in force here
        position = max(self._hierarchy.position, log.position if log is not None else 0)
        left_out, tiers = list(self._lower.out), self._lower.every()
        if any(len(tier.owed) + sum(tenant not in tier.owed for tenant in tenants) > OWED_MAX for tier in tiers):
            failing = [*left_out, *(name for name, tier in self._lower.items() if not tier.healthy())]
            behind = ", ".join(failing or self._lower)
            raise TierError(behind, "purge", f"{OWED_MAX} purges wait already; purge again when it answers")
        before, drops = self.apply_tombstones(dict.fromkeys(tenants))
        dropping = self._hierarchy.drop_slices(drops)
        mark = Wall(POSITIONS + position) if position else before  # of all that was taken in until now
        purges = dict.fromkeys(tenants, mark)
        self._hold(tenants)
        for tier in tiers:  # one that was refused stays so
            _add(purges, ((tenant, tier.owed[tenant]) for tenant in tenants if tenant in tier.owed))
        self._in_force.update(purges)
        for tier in tiers:
            _add(tier.owed, purges.items())
        calls = [self._purge_in(tier, purges) for tier in self._lower.values()]
        count = 0
        with self._lower.losing(self._lower.values()):
            answers = await asyncio.gather(dropping, *calls, return_exceptions=True)
        self._settle(tenants)
        if self._follow_log(tenants):
            await self._tell_refused(tenants)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            count += answer
        await self._protection.expire(None)
        if self._hierarchy.purge_log() is not None:
            news = await self._learn(None)  # new blocks are stored behind its entry
            await self._number(tenants, news.asked)
            self._remember(news)
        for name in left_out:
            raise TierError(name, "purge", "it is not open: it takes the purge when it is")
        return count

    async def _number(self, tenants: Collection[Scope], asked: Iterable[tuple[Metered, Mapping[Scope, Wall]]]) -> None:
        """Have tiers know how the log stands to the purges of these tenants, beside those that they are known to have,
        as far as they answer in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_NUMBERED_S):
                await asyncio.gather(*(self._spread(tier, known, tenants) for tier, known in asked))

    async def _tell_refused(self, tenants: Collection[Scope]) -> None:
        """Have the tiers beside the log know that purges of these tenants were refused, as far as they answer in time:
        above the purges that they have from other processes, which may have read further."""

        async def tell(tier: Metered) -> None:
            with suppress(KVTierError):
                known = await tier.tombstones()
                has = ((scope, known[scope]) for scope in tenants if scope in known)
                _add(tier.owed, [(scope, refused(mark)) for scope, mark in has if self._refused(scope)])
                await self._spread(tier, {}, tenants)

        with suppress(TimeoutError):
            async with asyncio.timeout(_NUMBERED_S):
                await asyncio.gather(*(tell(tier) for tier in self._lower.values() if tier.purge_log() is None))

    def _hold(self, scopes: Iterable[Scope]) -> None:
        """The log owes these purges an entry each."""
        for log in self._logs().values():
            for scope in scopes:
                log.hold(scope)

    def _logs(self) -> dict[Metered, PurgeLogging]:
        """The tier whose purges are a log, if there is one, though it is left out."""
        return {tier: log for tier in self._lower.every() if (log := tier.purge_log()) is not None}

    def _follow_log(self, scopes: Iterable[Scope]) -> bool:
        """Of what the log's tier owes of these: what the log holds was refused, and is owed as such by every tier; what
        was refused and has its entry now is owed by its number. Whether the log holds any."""
        any_held = False
        for logging, log in self._logs().items():
            for scope in scopes:
                owed = logging.owed.get(scope)
                if owed is None or is_refused(owed) is log.holds(scope):
                    any_held |= owed is not None and is_refused(owed)
                    continue
                if is_refused(owed):
                    self._note_logged(scope, log.mark(scope))
                else:
                    any_held = True
                    self._note_refused(scope, refused(owed))
        return any_held

    def _refused(self, scope: Scope) -> bool:
        return any(is_refused(tier.owed.get(scope, Wall(0.0))) for tier in self._logs())

    def _note_refused(self, scope: Scope, mark: Wall) -> None:
        """The log did not take a purge, which has this mark now."""
        for tier in self._lower.every():
            _add(tier.owed, [(scope, mark)])
        if scope in self._in_force:
            self._in_force[scope] = mark

    def _note_logged(self, scope: Scope, mark: Wall) -> None:
        """A purge that was refused is in the log, which purges the tenant up to this mark."""
        for tier in self._lower.every():
            if is_refused(tier.owed.get(scope, Wall(0.0))):
                tier.owed[scope] = mark

    async def _purge_in(self, tier: Metered, purges: Mapping[Scope, Wall]) -> int:
        """How many blocks went from one tier, which owes these purges until then. Raises its first error when it was
        asked for all."""
        calls = (tier.purge(scope, before) for scope, before in purges.items())
        count = 0
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            count += answer
        for part in slices(list(purges.items()), _APPLIED):
            for scope, before in part:
                self._confirm(tier, scope, before)
            await asyncio.sleep(0)
        return count

    def _confirm(self, tier: Metered, scope: Scope, before: Wall) -> None:
        """The tier has this purge; the log does where it has the entry."""
        log = tier.purge_log()
        if log is None and is_refused(before):  # once the log has it, the tier is not to be asked about it
            self._seen.setdefault(tier.name, array("q")).append(hash((scope, before)))
        if tier.owed.get(scope) != before or (log is not None and log.holds(scope)):
            return
        if log is not None:
            self._note_logged(scope, log.mark(scope))
        del tier.owed[scope]
        self._settle([scope])

    def _settle(self, scopes: Iterable[Scope]) -> None:
        """Those of these purges that no tier in use owes are in force everywhere."""
        for scope in scopes:
            if not any(scope in tier.owed for tier in self._lower.values()):
                self._in_force.pop(scope, None)

    def owed(self) -> dict[Scope, Wall]:
        """Purges that some tier in use owes: tenant → mark."""
        purges: dict[Scope, Wall] = {}
        for tier in self._lower.values():
            _add(purges, tier.owed.items())
        return purges

    def apply_tombstones(self, tombstones: Mapping[Scope, Wall | None]) -> tuple[Wall, Iterator[int]]:
        """`purge` of G2 and of what is protected, for scope → time: in force when this returns. None: of all that was
        taken in before; that is known under the lock only, since threads stamp and take in meanwhile. Returns the time
        of those, and the slices in which the blocks are dropped, for `Hierarchy.drop_slices`."""
        self._hierarchy.now()  # refuses first what a time that was given up has stamped
        with self._hierarchy.lock:
            now = self._hierarchy.made_by()
            times = {scope: now if before is None else before for scope, before in tombstones.items()}
            self._protection.purge(times)
            known = self._host.refusals.purged_until  # what began since is not told again, while a tier owes the purge
            news = [scope for scope, time in times.items() if tombstones[scope] is None or time > known(scope)]
            self._hierarchy.work.purge({scope: times[scope] for scope in news})
            return now, self._host.apply_tombstones(times)

    async def sync(self, joining: Metered | None = None) -> list[Metered]:
        """Have every tier remember what is new in the others: another process may share only one of them. Tiers that
        fail are owed it, for the next time. `joining` is to remember everything. Returns those that remember all."""
        first = self._is_first()
        remember = await self._sync(joining)
        log = self._hierarchy.purge_log()
        if log is not None and log.position > self._hierarchy.position and not first:
            # Entries were written: what is stored from now on is behind them. At the first look they are purges that a
            # tier knew from before there was a log, and blocks that it was given after them are without a position.
            await self._sync(joining)
        return remember

    def _is_first(self) -> bool:
        """Whether no purges were looked for yet, nor by an earlier process that this one remembers of."""
        return not self._synced and not self._hierarchy.position

    async def _sync(self, joining: Metered | None) -> list[Metered]:
        news = await self._learn(joining)
        done = await asyncio.gather(*(self._spread(tier, known) for tier, known in news.asked))
        remember = [tier for (tier, _), has_all in zip(news.asked, done, strict=True) if has_all]
        if not self._remember(news) and news.first:  # a tier may give back what they cover
            await self._enforce(news.local)
        return remember

    def _remember(self, news: _News) -> bool:
        """Have the next process know how far the log was read, where every tier has what it says. Whether it has."""
        tiers, asked = set(self._lower.values()), {tier for tier, _ in news.asked}
        if not tiers <= asked or any(tier.behind for tier in tiers):
            return False
        self._hierarchy.log_memory = news.read.memory or self._hierarchy.log_memory
        return True

    async def _learn(self, joining: Metered | None) -> _News:
        """Ask the tiers for their purges, which are in force in G2 and owed to those that lack them when this
        returns. `joining` is to remember everything."""
        latest: dict[Scope, Wall] = {}
        seen = self._seen.copy()
        tiers = [tier for tier in self._lower.values() if not tier.resting]
        if joining is not None:
            tiers.append(joining)
        began, log = self._hierarchy.clock.monotonic(), self._hierarchy.purge_log()
        before = _Read.of(log)  # the answers hold as much at least
        answers = await asyncio.gather(*(tier.tombstones() for tier in tiers), return_exceptions=True)
        after = _Read.of(log)
        asked = [(tier, answer) for tier, answer in zip(tiers, answers, strict=True) if isinstance(answer, Mapping)]
        for tier, tombstones in asked:
            known = self._seen.get(tier.name) if joining is None else None
            news, seen[tier.name] = await aside(len(tombstones), partial(_news, tombstones, known))
            for part in slices(list(news.items()), _APPLIED):
                _add(latest, part)
                await asyncio.sleep(0)
        first, self._synced = self._is_first(), True
        for tier in dict.fromkeys((*self._lower.values(), *tiers)):  # a set has another order in each process
            for scopes in slices(list(tier.owed), _APPLIED):
                self._follow_log(scopes)
                _add(latest, ((scope, tier.owed[scope]) for scope in scopes if scope in tier.owed))
                await asyncio.sleep(0)
        await self._drop_below_floor()
        # A number that the log does not have is a guess: the log may give it to another purge.
        logged = next((tombstones for tier, tombstones in asked if tier.purge_log() is not None), {})
        last = await aside(len(logged), partial(_last_number, logged))
        local = self._local(latest, logged)
        await self._owe(latest, dict(asked))  # first: G2 forgets what nobody owes
        if not first:  # at the first look there is nothing in G2
            await self._enforce(local)
        await self._note_in_force(latest, dict(asked), last)
        read = after if after.position == last else before  # a look-up may have read further than the answer goes
        with self._hierarchy.lock:
            self._hierarchy.position = max(last, self._hierarchy.position)
            if any(tier.purge_log() is not None for tier, _ in asked):
                self._hierarchy.proven_at = max(self._hierarchy.proven_at, min(began, read.at))
        await self._protection.expire(None)
        self._seen = seen  # what was new is owed now
        return _News(asked, local, read, first)

    async def _owe(self, latest: Mapping[Scope, Wall], known: Mapping[Metered, Mapping[Scope, Wall]]) -> None:
        """Every tier owes these purges from now on but for those that it is `known` to have."""
        for part in slices(list(latest.items()), _APPLIED):
            for tier in dict.fromkeys((*self._lower.values(), *known)):
                lacking = [purge for purge in part if _lacks(known.get(tier, {}), *purge)]
                _add(tier.owed, lacking)
                if (log := tier.purge_log()) is not None:
                    self._hold(scope for scope, before in lacking if is_refused(before) and not log.holds(scope))
            await asyncio.sleep(0)

    async def _note_in_force(self, latest: Mapping[Scope, Wall], tiers: Collection[Metered], last: int) -> None:
        """G2 has dropped what these purges cover. `last`: number of the last one in the log."""
        every = {*self._lower.values(), *tiers}
        for part in slices(list(latest.items()), _APPLIED):
            self._in_force.update(
                (scope, before)
                for scope, before in part
                if number_of(before) > last and any(scope in tier.owed for tier in every)
            )
            await asyncio.sleep(0)

    async def _enforce(self, tombstones: Mapping[Scope, Wall | None]) -> None:
        """Have these in force in G2, and what they cover dropped."""
        for part in slices(list(tombstones.items()), _APPLIED):
            _, drops = self.apply_tombstones(dict(part))
            await self._hierarchy.drop_slices(drops)

    async def _drop_below_floor(self) -> None:
        """Where the log was shortened beyond what is in force here, purges of tenants that it does not name any more
        may have been missed: nothing that is stored on this machine counts."""
        log, hierarchy = self._hierarchy.purge_log(), self._hierarchy
        if log is None or log.floor <= hierarchy.position:
            return
        floor = log.floor
        others = [tier for tier in self._lower.every() if tier.purge_log() is None]
        for tier in others:
            tier.stale = True
        tenants = await self._enforce_moving()  # first: what is being filled is not dropped
        await hierarchy.drop_slices(self._host.drop_where(lambda number: True))
        tenants |= await self._enforce_moving()  # what was dropped may wait to be written
        for tier in others:
            _add(tier.owed, ((tenant, mark_below(floor)) for tenant in tenants))
        with hierarchy.lock:
            hierarchy.position = max(floor, hierarchy.position)

    async def _enforce_moving(self) -> set[Scope]:
        """Purge in G2 the tenants whose blocks are being filled or written, or are to be. Returns them."""
        tenants = {tenant_of(key) for key in self._moving()}
        await self._enforce(dict.fromkeys(tenants))
        return tenants

    def _local(self, latest: Mapping[Scope, Wall], logged: Mapping[Scope, Wall]) -> dict[Scope, Wall | None]:
        """These tombstones as times of this process; `logged` are those of the purge log. An entry of it that is not in
        force here yet covers whatever is in G2 and under way (None): that was taken in before it, whatever clock
        stamped it."""
        position = self._hierarchy.position
        times: dict[Scope, Wall | None] = {}
        for tenant, before in latest.items():
            number = number_of(before)
            if number == 0:
                times[tenant] = before
            elif number > position:
                entry = number_of(logged.get(tenant, Wall(0.0)))
                if entry > position or self._in_force.get(tenant) != before:
                    times[tenant] = None
        return times

    async def forget(self) -> None:
        """Forget the purges that every tier has, but for those of a tenant of whom some slot may hold what they cover:
        it is being filled, or was dropped, and waits to be written at a position after them. The pins that they cover
        have been ended on every medium."""
        with self._hierarchy.lock:
            known = dict(self._host.refusals.tombstones)
        moving, kept = self._moving() if known else [], self.owed()

        def old() -> list[tuple[Scope, Wall]]:
            busy = {tenant_of(key) for key in moving}
            return [(scope, before) for scope, before in known.items() if scope not in kept and scope not in busy]

        for part in slices(await aside(len(known) + len(moving), old), _APPLIED):
            with self._hierarchy.lock:
                self._host.refusals.forget(dict(part))
            await asyncio.sleep(0)

    def _moving(self) -> list[BlockKey]:
        """Blocks that are not to be found in G2, and whose bytes may get into a tier."""
        with self._hierarchy.lock:
            return [*self._host.filling(), *self._host.refusals.table.quarantined()]

    async def _spread(
        self, tier: Metered, known: Mapping[Scope, Wall], tenants: Collection[Scope] | None = None
    ) -> bool:
        """Purge in one tier what it owes, of these tenants or of all, and is not `known` to have, until it fails; empty
        it first where that is owed. Whether it has that now."""
        try:
            if tier.stale:
                await tier.empty()
                tier.stale = False
            for part in slices([owed for owed in tier.owed.items() if tenants is None or owed[0] in tenants]):
                for scope, before in part:
                    if _lacks(known, scope, before):
                        await tier.purge(scope, before)
                    self._confirm(tier, scope, before)
                await asyncio.sleep(0)
        except KVTierError:
            return False
        return True


class _Read(NamedTuple):
    """How far a purge log was read. `at`: when a listing began, and `memory`, none of them later than `position`."""

    at: Mono
    memory: bytes
    position: int

    @classmethod
    def of(cls, log: PurgeLogging | None) -> _Read:
        """-inf, b"" and 0 where there is none; b"" where nothing was read."""
        if log is None:
            return cls(Mono("-inf"), b"", 0)
        at, memory, position = log.read_at, log.memory(), log.position
        return cls(at, memory if position else b"", position)


class _News(NamedTuple):
    """`asked`: the tiers that answered, with the purges that they have; `local`: those that were new, as times of this
    process; `read`: how far the log was read, as far as the answers go."""

    asked: list[tuple[Metered, Mapping[Scope, Wall]]]
    local: dict[Scope, Wall | None]
    read: _Read
    first: bool


def _add(purges: dict[Scope, Wall], more: Iterable[tuple[Scope, Wall]]) -> None:
    """Of each scope the latest, refused where one is."""
    purges.update((scope, later(before, purges.get(scope, before))) for scope, before in more)


def _lacks(known: Mapping[Scope, Wall], scope: Scope, before: Wall) -> bool:
    """Whether a purge is not among those that a tier is known to have."""
    has = known.get(scope, Wall(0.0))
    return before > has + (0.0 if is_refused(before) or is_refused(has) else _ROUNDED_S)


def _last_number(tombstones: Mapping[Scope, Wall]) -> int:
    return max(map(number_of, tombstones.values()), default=0)


def _news(tombstones: Mapping[Scope, Wall], seen: array[int] | None) -> tuple[Mapping[Scope, Wall], array[int]]:
    """Those that are not among `seen`, and what is seen now: 8 bytes each."""
    known = set(seen or ())
    news = {scope: before for scope, before in tombstones.items() if hash((scope, before)) not in known}
    return news, array("q", map(hash, tombstones.items()))
