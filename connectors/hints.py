"""Carries out the hints of requests: each is accepted, clipped, deferred, rejected or ignored, and its sender is told.

Senders are not trusted. What hints hold is bounded per tenant (`retention.hints`), ends at its time, and is of the
sender's own scope: a block's key names its tenant, sessions and pins are looked up among the tenant's own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvtier.connectors.hint_shares import HintShares
from kvtier.connectors.sessions import Branches, united
from kvtier.errors import InvalidRequest, KVTierError
from kvtier.identity.keys import SHARED, BlockKey, Scope, tenant_of
from kvtier.manager.manager import Manager
from kvtier.manager.slices import MOVED_BLOCKS, aside, slices
from kvtier.retention.hints import (
    DURATION_S_MAX,
    Action,
    Demote,
    HintAnswer,
    Hints,
    Keep,
    Outcome,
    PinPrompt,
    Prefetch,
    Release,
)
from kvtier.retention.pins import Pin, check_name
from kvtier.retention.ranges import fixed
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

PREFETCH_S = 10.0
_EXPIRE_S = 10.0
"""How often what is over is looked for."""


class HintExecutor:
    """The hints of the requests of one cache. Used on its event loop."""

    def __init__(self, manager: Manager, block_tokens: int, share: float) -> None:
        """`share`: of the blocks that may be reserved at all, so many hints of one tenant may hold."""
        self._manager = manager
        self._block_tokens = block_tokens
        self._share = share
        self.shares = HintShares()
        self._moving: dict[Scope, int] = {}  # blocks by tenant
        self._expired_at = Wall(0.0)

    @property
    def limit(self) -> int:
        """Blocks that hints of one tenant may hold."""
        return int(self._share * self._manager.protection.budget)

    @property
    def fetching(self) -> bool:
        """Whether a prefetch or a demotion is under way."""
        return bool(self._moving)

    async def carry_out(
        self, scope: Scope, hints: Hints, prompt: Sequence[BlockKey], sessions: Mapping[str, Branches]
    ) -> list[HintAnswer]:
        """Answers in the order of the actions, after those of the reader. `sessions`: the branches of those that are
        named, of the sender's scope."""
        answers, moved = list(hints.answers), dict[Prefetch | Demote, HintAnswer]()
        now = self._manager.hierarchy.now().stamp
        await self._expire(now)
        keeps = [action for action in hints.actions if isinstance(action.verb, Keep)]
        self._find_pins(tenant_of(scope))
        kept = await self._keep(scope, keeps, prompt, now) if keeps else {}
        for action in hints.actions:
            verb, answer = action.verb, kept.get(id(action))
            if isinstance(verb, Prefetch | Demote) and (done := moved.get(verb)) is not None:
                answer = replace(done, action=action.id)  # it was asked for before
            try:
                answer = answer or await self._one(scope, action, prompt, sessions, now)
            except KVTierError as error:
                log.debug("a hint is rejected: %s", error)
                answer = _said(action, "rejected", "the cache cannot do it now")
            if isinstance(verb, Prefetch | Demote):
                moved[verb] = answer
            answers.append(answer)
        with self._manager.lock:
            self._manager.accounts.hints.update(answer.outcome for answer in answers)
        return answers

    async def _expire(self, now: Wall) -> None:
        if abs(now - self._expired_at) > _EXPIRE_S:
            self._expired_at = now
            for _ in self.shares.expire(now):
                await asyncio.sleep(0)

    async def _one(
        self,
        scope: Scope,
        action: Action,
        prompt: Sequence[BlockKey],
        sessions: Mapping[str, Branches],
        now: Wall,
    ) -> HintAnswer:
        verb = action.verb
        if isinstance(verb, PinPrompt):
            done = await self.pin(scope, verb.name, verb.seconds, prompt)
            return _said(action, "rejected", done["why"]) if "why" in done else _said(action)
        if isinstance(verb, Release) and verb.pin is not None:
            return await self._release_pin(scope, action, verb.pin)
        named = getattr(verb, "session", None)
        chain = prompt if named is None else united(sessions.get(named, ()))
        if not chain:
            why = "this session is unknown" if named is not None else "the prompt has no whole block"
            return _said(action, "rejected", why)
        if isinstance(verb, Prefetch):
            return self._prefetch(scope, action, chain)
        if isinstance(verb, Release):
            for part in slices(chain, MOVED_BLOCKS):
                kept = self.shares.kept(tenant_of(scope), part)
                self._manager.protection.release_fixed(kept)
                self.shares.release(tenant_of(scope), kept)
                await asyncio.sleep(0)
            return _said(action)
        assert isinstance(verb, Demote)
        return await self._demote(scope, action, chain)

    # ── keeping ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(
        self, scope: Scope, actions: Sequence[Action], prompt: Sequence[BlockKey], now: Wall
    ) -> dict[int, HintAnswer]:
        """One pass over the prompt, however many actions there are: a block is kept for the longest time of those that
        cover it or one behind it. Answers by the actions' identities."""
        work = self._manager.protection.begin()
        asked = [(self._blocks(action.verb, prompt), _until(action.verb, now), action) for action in actions]
        ends = sorted({blocks for blocks, _, _ in asked})
        reached, tenant, why = 0, tenant_of(scope), "the share of the tenant is used up"
        for start, stop in zip([0, *ends], ends, strict=False):
            until = max(until for blocks, until, _ in asked if blocks >= stop)
            part = prompt[start:stop]
            if until <= now:
                reached = stop
                continue
            taken = self.shares.fitting(tenant, part, self.limit)
            new = self.shares.keep(tenant, part[:taken], until)
            reserve = partial(
                self._manager.protection.guarantee, prompt, start, fixed(until - now), work, start + taken
            )
            try:
                await aside(taken, reserve)
            except InvalidRequest:
                self.shares.release(tenant, new)
                taken, why = 0, "no more may be reserved"
            reached = start + taken
            if taken < len(part):
                break
        return {id(action): _kept(action, blocks, until <= now, reached, why) for blocks, until, action in asked}

    def _blocks(self, verb: object, prompt: Sequence[BlockKey]) -> int:
        assert isinstance(verb, Keep)
        return len(prompt) if verb.tokens is None else min(len(prompt), verb.tokens // self._block_tokens)

    # ── pins ────────────────────────────────────────────────────────────────────────────────────────────────

    async def pin(self, scope: Scope, name: str, seconds: float, prompt: Sequence[BlockKey]) -> dict[str, Any]:
        """Pin a prompt, or move the end of the tenant's pin of this name and prompt, DURATION_S_MAX away at most.
        Returns {"until": time}, or {"refused": True, "why": text}."""
        try:
            return {"until": (await self._pin(scope, name, min(seconds, DURATION_S_MAX), prompt)).until}
        except InvalidRequest as refused:
            log.warning("a pin is refused: %s", refused)
            return {"refused": True, "why": str(refused)}

    async def _pin(self, scope: Scope, name: str, seconds: float, prompt: Sequence[BlockKey]) -> Pin:
        """Raises InvalidRequest, which tells nothing of others' pins."""
        protection, tenant, full = self._manager.protection, tenant_of(scope), pin_name(scope, name)
        self._find_pins(tenant)
        known = protection.pins.get(full)
        if not prompt:
            raise InvalidRequest("the prompt has no whole block")
        if not seconds > 0:
            raise InvalidRequest("the time of a pin must be above 0")
        if self.shares.has_pin(tenant, known) and known is not None and known.chain == tuple(prompt):
            try:
                pin = await protection.extend(full, seconds)
            except InvalidRequest:  # its time was over: it is made anew
                self.shares.unpin(tenant, full)
                known = protection.pins.get(full)
            else:
                if self.shares.has_pin(tenant, pin):
                    self.shares.pin(tenant, pin)
                return pin
        if known is not None or self.shares.making(tenant, full):
            raise InvalidRequest("a pin of this name was made by somebody else, or of another prompt")
        if self.shares.fitting(tenant, prompt, self.limit) < len(prompt) or not self.shares.may_pin(tenant):
            raise InvalidRequest("the share of the tenant is used up")
        return await self._make_pin(tenant, full, tuple(prompt), seconds)

    async def _make_pin(self, tenant: Scope, name: str, chain: tuple[BlockKey, ...], seconds: float) -> Pin:
        protection = self._manager.protection
        check_name(name)
        self.shares.begin_pin(tenant, name, chain)
        try:
            return await protection.create(name, chain, seconds, len(chain) * self._block_tokens)
        except InvalidRequest:
            raise InvalidRequest("no more may be reserved") from None
        finally:
            self.shares.unpin(tenant, name)
            made = protection.pins.get(name)
            if made is not None and made.chain is chain:  # though a tier failed, or nobody waits for it any more
                self.shares.pin(tenant, made)

    def _find_pins(self, tenant: Scope) -> None:
        """The tenant's pins are those that there are: also those of earlier processes and other replicas, whose names
        tell, and not those that a purge or an operator ended. O(pins)."""
        pins = self._manager.protection.pins
        for name in self.shares.pins(tenant):
            if not self.shares.has_pin(tenant, pins.get(name)):
                self.shares.unpin(tenant, name)
        for pin in list(pins):  # at once, in C: no lock
            if pin.name.startswith(_prefix(tenant)) and not self.shares.making(tenant, pin.name):
                self.shares.pin(tenant, pin)

    async def _release_pin(self, scope: Scope, action: Action, name: str) -> HintAnswer:
        tenant, full = tenant_of(scope), pin_name(scope, name)
        self._find_pins(tenant)
        if not self.shares.has_pin(tenant, self._manager.protection.pins.get(full)):
            return _said(action, "rejected", "no request of this tenant made a pin of this name")
        await self._manager.protection.delete(full)
        self.shares.unpin(tenant, full)
        return _said(action)

    # ── moving ──────────────────────────────────────────────────────────────────────────────────────────────

    def _prefetch(self, scope: Scope, action: Action, chain: Sequence[BlockKey]) -> HintAnswer:
        tenant, wanted = tenant_of(scope), chain[: self.limit]
        if tenant in self._moving:
            return _said(action, "deferred", _UNDER_WAY)
        if not wanted:
            return _said(action, "rejected", "the share of the tenant is empty")
        if sum(self._moving.values()) + len(wanted) > self._manager.protection.budget:
            return _said(action, "deferred", "prefetches of others are under way: ask again")
        self._moving[tenant] = len(wanted)
        self._manager.hierarchy.supervisor.spawn(self._fetch(tenant, wanted))
        if len(wanted) < len(chain):
            return _said(action, "clipped", f"the first {len(wanted)} of {len(chain)} blocks")
        return _said(action)

    async def _fetch(self, tenant: Scope, chain: Sequence[BlockKey]) -> None:
        clock = self._manager.hierarchy.clock
        try:
            await self._manager.prewarm(chain, Mono(clock.monotonic() + PREFETCH_S))
        except KVTierError as error:
            log.debug("a prefetch ended: %s", error)
        finally:
            self._moving.pop(tenant, None)

    async def _demote(self, scope: Scope, action: Action, chain: Sequence[BlockKey]) -> HintAnswer:
        tenant = tenant_of(scope)
        if tenant in self._moving:
            return _said(action, "deferred", _UNDER_WAY)
        self._moving[tenant] = 0  # it takes no room
        try:
            given_up = await self._manager.hierarchy.give_up_copies(chain, self._manager.protection.wanted)
        finally:
            self._moving.pop(tenant, None)
        return _said(action) if given_up else _said(action, "ignored", "no deeper tier has its blocks")


_UNDER_WAY = "another move of this tenant's blocks is under way: ask again"


def pin_name(scope: Scope, name: str) -> str:
    """The name of a request's pin among all: those of a scope are its own. Raises InvalidRequest for a name without a
    scope that has the form of one with a scope."""
    if scope == SHARED and _PRIVATE.match(name):
        raise InvalidRequest("a name that begins with 16 hexadecimal digits and / is of requests with a salt")
    return name if scope == SHARED else _prefix(scope) + name


_PRIVATE = re.compile(r"[0-9a-f]{16}/", re.ASCII)


def _prefix(scope: Scope) -> str:
    return f"{scope.hex()[:16]}/"


def _until(verb: object, now: Wall) -> Wall:
    assert isinstance(verb, Keep)
    asked = now + verb.seconds if verb.until is None else verb.until
    return Wall(min(asked, now + DURATION_S_MAX))


def _kept(action: Action, blocks: int, over: bool, reached: int, why: str) -> HintAnswer:
    if over:
        return _said(action, "rejected", "its time is over")
    if not blocks:
        return _said(action, "ignored", "it covers no whole block of the prompt")
    if reached >= blocks:
        return _said(action)
    if not reached:
        return _said(action, "rejected", why)
    return _said(action, "clipped", f"the first {reached} of {blocks} blocks: {why}")


def _said(action: Action, outcome: Outcome = "accepted", why: str = "") -> HintAnswer:
    if outcome == "accepted" and action.clipped:
        outcome, why = "clipped", action.clipped
    return HintAnswer(action.id, action.kind, outcome, why)
