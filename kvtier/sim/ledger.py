"""What may be served at any moment of a history, and what was: bytes are a function of their key, and a block's tenant
is neither purged nor its time over.

It says what must not be served, never what must be: a block that is late or was evicted is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from kvtier.identity.keys import BlockKey, Scope, scope_of_key, tenant_of
from kvtier.retention.terms import Terms
from kvtier.testing.payload import payload_of

bytes_of = lru_cache(maxsize=1 << 14)(payload_of)
"""`payload_of`, remembered."""


class Wrong(AssertionError):
    """A promise is broken."""


@dataclass
class Purge:
    """A purge of a tenant that a process was asked for. `ended`: when it returned without an error; inf: it has not.
    `answered`: whether it returned or failed, so that it is in force in that process."""

    tenant: Scope
    process: int
    began: float
    ended: float = inf
    answered: bool = False


@dataclass(frozen=True)
class Before:
    """What was known of a block when a call that may read it began."""

    began: float
    put_began: float
    put_ended: float
    used: float
    forbidden: bool
    """It is purged."""


class Ledger:
    """`now` reads the time. `spread_s`: how far the clocks of all machines are apart at most: so much later a block's
    time may be over."""

    def __init__(
        self, block_bytes: int, terms: Mapping[Scope, Terms], now: Callable[[], float], spread_s: float
    ) -> None:
        """`terms`: of scopes whose blocks have no others."""
        self._block_bytes = block_bytes
        self._terms = terms
        self.now = now
        self.spread_s = spread_s
        self._putting: Counter[BlockKey] = Counter()
        self._using: Counter[BlockKey] = Counter()
        self._put_began: dict[BlockKey, float] = {}
        self._put_ended: dict[BlockKey, float] = {}
        self._used: dict[BlockKey, float] = {}
        self.purges: list[Purge] = []
        self.served = self.missed_purged = 0
        self.wrong: Wrong | None = None
        """The first that was seen where nothing may be raised."""

    @contextmanager
    def using(self, keys: Sequence[BlockKey], *, putting: bool = False) -> Iterator[None]:
        """Around a call that names these blocks."""
        began = self.now()
        self._using.update(keys)
        if putting:
            self._putting.update(keys)
            self._put_began.update(dict.fromkeys(keys, began))
        try:
            yield
        finally:
            ended = self.now()
            self._using.subtract(keys)
            self._used.update(dict.fromkeys(keys, ended))
            if putting:
                self._putting.subtract(keys)
                self._put_ended.update(dict.fromkeys(keys, ended))

    def broken(self, what: str) -> None:
        """A promise is broken; the caller goes on."""
        self.wrong = self.wrong or Wrong(what)

    def touched(self, keys: Sequence[BlockKey], *, stored: bool = False) -> None:
        """An engine's blocks are used now, or published: their time runs from here."""
        now = dict.fromkeys(keys, self.now())
        self._used.update(now)
        if stored:
            self._put_ended.update(now)

    def offered(self, keys: Sequence[BlockKey]) -> None:
        """A request of an engine has these blocks now, of its own making: they may be stored."""
        self._put_began.update(dict.fromkeys(keys, self.now()))

    def before(self, keys: Sequence[BlockKey], process: int, proven: float, bound_s: float) -> dict[BlockKey, Before]:
        """Of each block, as a call of a process begins. `proven`: the time of the purge log that is in force there;
        `bound_s`: after which a purge is in force everywhere, inf if it need not be."""
        now = self.now()
        floors: dict[Scope, float] = {}
        for purge in self.purges:
            mine = purge.process == process and purge.answered
            if mine or proven > purge.ended or now > purge.ended + bound_s:
                floors[purge.tenant] = max(floors.get(purge.tenant, -inf), purge.began)
        out = {}
        for key in keys:
            put = self._put_began.get(key, -inf)
            forbidden = put < floors.get(tenant_of(scope_of_key(key)), -inf)
            put_ended = now if self._putting[key] > 0 else self._put_ended.get(key, -inf)
            out[key] = Before(now, put, put_ended, self._used.get(key, -inf), forbidden)
        return out

    def compare(self, keys: Sequence[BlockKey], blocks: Sequence[bytes], before: Mapping[BlockKey, Before]) -> None:
        """A call has served these leading blocks. Raises Wrong."""
        for key, block in zip(keys, blocks, strict=False):
            self.served += 1
            if block != bytes_of(key, self._block_bytes):
                raise Wrong(f"block {name_of(key)} has other bytes")
            if why := self._over(key, before[key]):
                raise Wrong(f"block {name_of(key)} is served: {why}")
        if len(blocks) < len(keys) and before[keys[len(blocks)]].forbidden:
            self.missed_purged += 1

    def claimed(self, keys: Sequence[BlockKey], count: int, before: Mapping[BlockKey, Before]) -> None:
        """A call says that so many leading blocks are here. Raises Wrong."""
        for key in keys[:count]:
            if why := self._over(key, before[key]):
                raise Wrong(f"block {name_of(key)} is said to be here: {why}")

    def _over(self, key: BlockKey, then: Before) -> str:
        if self._putting[key] > 0 or self._put_began.get(key, -inf) > then.put_began:
            return ""  # offered meanwhile
        if then.forbidden:
            return f"it was put at {then.put_began:.3f} and purged later"
        terms = self._terms.get(scope_of_key(key))
        if terms is None:
            return ""
        if terms.max_age is not None and then.began - then.put_ended > terms.max_age + self.spread_s:
            return f"it was put at {then.put_ended:.3f}, for {terms.max_age} s"
        shared = self._using[key] > 1 or self._used.get(key, -inf) > then.used
        if terms.ttl is not None and not shared and then.began - then.used > terms.ttl + self.spread_s:
            return f"it was used at {then.used:.3f}, for {terms.ttl} s"
        return ""

    def purge(self, tenant: Scope, process: int) -> Purge:
        """A purge begins; the caller sets its fields."""
        self.purges.append(purge := Purge(tenant, process, self.now()))
        return purge

    def restarted(self, process: int, successor: int) -> None:
        """`successor` finds the stores of `process`: purges that this one confirmed are in force there."""
        for purge in self.purges:
            if purge.process == process:
                purge.process, purge.answered = successor, purge.ended < inf


def name_of(key: BlockKey) -> str:
    """Short, for people."""
    return f"{key[:2].hex()}…{key[-4:].hex()}"
