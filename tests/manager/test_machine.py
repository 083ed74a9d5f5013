"""The manager over tiers in memory, against a dictionary: whatever happens, right bytes or a miss, and no promise is
broken.

`TestManager` always runs the same examples; `test_other_orders_of_events`, in test-long, runs others each time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import kvtier
from kvtier.identity.keys import SHARED, BlockKey, scope_of
from kvtier.retention.lifetime import Stamp
from kvtier.retention.terms import Depth
from kvtier.testing import (
    Fault,
    FaultyTier,
    MemoryTier,
    VirtualClock,
    chain_of,
    payload_of,
    payloads_of,
    sample_namespace,
)

BLOCK = 512
NS = sample_namespace(BLOCK)
SALTS = [None, "a", "a"]  # of the chains
SCOPES = [SHARED, scope_of("a"), scope_of("a")]
CHAINS = [list(chain_of(NS, 14, seed=seed, scope=scope)) for seed, scope in enumerate(SCOPES)]
DAY = kvtier.Terms("day", ttl=86_400)
CLASSES = [
    DAY,
    kvtier.Terms("brief", ttl=600, max_age=3600),
    kvtier.Terms("shallow", ttl=86_400, ceiling=Depth.G2),
    kvtier.Terms("dear", ttl=86_400, priority=90),
    kvtier.Terms("sure", ttl=7200, guarantee=True),
]
SLOTS = 12
chains = st.sampled_from(range(len(CHAINS)))
lengths = st.integers(0, 14)
names = st.sampled_from(["one", "two"])


class ManagerMachine(RuleBasedStateMachine):
    """G2 of 12 slots over an unbounded G3 and G4 (stride 4).

    Per chain: `put_upto`, leading blocks that may be found; `sure`, those that must be, once flushed; `stamps` and
    `last_use`, what may keep any of it alive; `pinned`, leading blocks that a named pin keeps, and until when.
    """

    @initialize(stack=st.sampled_from(["g3", "g4", "g3+g4", ""]), quota=st.sampled_from([None, 0.5]))
    def open(self, stack: str, quota: float | None) -> None:
        self.clock = VirtualClock()
        tiers = []
        if "g3" in stack:
            tiers.append(FaultyTier(MemoryTier(NS, self.clock)))
        if "g4" in stack:
            tiers.append(FaultyTier(MemoryTier(NS, self.clock, name="g4", depth=Depth.G4, stride=4)))
        self.tiers = tiers
        self.deep = bool(tiers)
        self.quota = quota
        self.cache = kvtier.open(
            kvtier.Config.parse(
                {
                    "tiers": {"g2": {"capacity": SLOTS * 4096}},
                    "deadlines": {"close": "2s", "put": "20s", "lookup": "5s"},
                    "retention": {} if quota is None else {"quota": quota},
                }
            ),
            NS,
            clock=self.clock,
            tiers=list(tiers),
        )
        self.put_upto = [0] * len(CHAINS)
        self.sure = [0] * len(CHAINS)
        self.stamps: list[list[Stamp]] = [[] for _ in CHAINS]
        self.last_use = [0.0] * len(CHAINS)
        self.pins: dict[str, tuple[int, int, float]] = {}  # chain, length, until
        self.kept: dict[str, tuple[int, int, float]] = {}  # by promise: chain, leading blocks there, until

    def _ill(self) -> bool:
        return any(tier.faults for tier in self.tiers)

    def _alive(self, c: int) -> bool:
        now = self.clock.wall()
        return any(stamp.alive(self.last_use[c], now) for stamp in self.stamps[c])

    def _used(self, c: int) -> None:
        if self._alive(c):
            self.last_use[c] = max(self.last_use[c], self.clock.wall())

    def _forget(self, chains: list[int]) -> None:
        for c in chains:
            self.put_upto[c] = self.sure[c] = 0
            self.stamps[c].clear()

    # ── storing and finding ─────────────────────────────────────────────────────────────────────────────────

    @rule(c=chains, length=lengths, overlap=st.integers(0, 14), wait=st.booleans(), terms=st.sampled_from(CLASSES))
    def put(self, c: int, length: int, overlap: int, wait: bool, terms: kvtier.Terms) -> None:
        start = min(overlap, length, self.put_upto[c])
        keys = CHAINS[c][:length]
        now = self.clock.wall()
        before = self.cache.match(keys) if not self._ill() else 0
        try:
            stored = self.cache.put(keys, payloads_of(keys[start:], BLOCK), terms, wait, start=start)
        except kvtier.InvalidRequest as refused:
            assert terms.guarantee and "a guarantee for" in str(refused)
            assert self._ill() or self.cache.match(keys) <= before, "a refused put stored something"
            return
        assert 0 <= stored <= length - start
        self.put_upto[c] = max(self.put_upto[c], start + stored)
        self._used(c)
        if stored:
            self.last_use[c] = now
            self.stamps[c].append(Stamp(now, terms.ttl, terms.max_age, terms.ceiling))
            for pinned, _, until in self.pins.values():
                if pinned == c:  # what comes under a pin lives as long as it, too
                    self.stamps[c].append(Stamp(now, None, until - now + 1, Depth.G4))
        ordinary = terms in (DAY, CLASSES[4]) and self.quota is None
        well = self.deep and not self._ill() and self.cache.manager.hierarchy.healthy()
        if wait and well and start <= self.sure[c] and ordinary:
            assert stored == length - start, "a put that may wait found no room"
            # Right above G4, the tail of an incomplete stride is in G2 alone until a flush.
            kept = length // 4 * 4 if self.tiers[0].stride == 4 else length
            self.sure[c] = max(self.sure[c], kept if terms is DAY else 0)
        if terms.guarantee and stored == length - start and self._stay() and start <= self._kept(c):
            self.kept[f"guarantee {c}"] = (c, length, now + 7200)

    def _stay(self) -> bool:
        """Whether promises can be kept: no tier is ill, and G2 had a share left for every promised block."""
        return not self._ill() and self.cache.stats()["requests"]["promises"]["unheld"] == 0

    def _kept(self, c: int) -> int:
        return max((length for chain, length, _ in self.kept.values() if chain == c), default=0)

    @rule(c=chains, length=lengths)
    def get(self, c: int, length: int) -> None:
        keys = CHAINS[c][:length]
        alive = self._alive(c)
        with self.cache.get(keys, timeout=2) as hit:
            assert [bytes(b) for b in hit.blocks] == [payload_of(k, BLOCK) for k in keys[: len(hit)]], "wrong bytes"
            assert len(hit) <= self.put_upto[c] or length == 0
            assert alive or len(hit) == 0, "served after all its terms had ended"
            assert (hit.miss is None) == (len(hit) == length)
            assert hit.account.asked == length * NS.block_tokens
            assert hit.account.asked == sum(hit.account.read.values()) + sum(hit.account.missed.values())
        self._used(c)

    @rule(c=chains)
    def match(self, c: int) -> None:
        found = self.cache.match(CHAINS[c])
        assert found <= self.put_upto[c] and (found == 0 or self._alive(c))

    @rule(c=chains)
    def prewarm(self, c: int) -> None:
        assert self.cache.prewarm(CHAINS[c], timeout=2) <= min(self.put_upto[c], SLOTS)
        self._used(c)

    @rule()
    def flush_and_find(self) -> None:
        flushed = self.cache.flush(timeout=5)
        assert flushed.pending == 0 or self._ill()
        if self.deep and not self._ill():
            for c, keys in enumerate(CHAINS):
                assert self.cache.match(keys) >= self.sure[c], f"chain {c}: flushed blocks are gone"

    # ── promises ────────────────────────────────────────────────────────────────────────────────────────────

    @rule(name=names, c=chains, length=st.integers(1, 6), hours=st.sampled_from([1, 24]))
    def pin(self, name: str, c: int, length: int, hours: int) -> None:
        keys = CHAINS[c][:length]
        try:
            info = self.cache.pins.create(name, keys, hours * 3600)
        except kvtier.InvalidRequest as refused:
            assert name in self.pins or "is refused" in str(refused)
            return
        assert name not in self.pins
        self._pinned(name, c, length, info)
        if self._stay():
            self.kept[name] = (c, self.cache.match(keys), info.until)

    @rule(name=names, hours=st.sampled_from([1, 48]))
    def extend(self, name: str, hours: int) -> None:
        try:
            info = self.cache.pins.extend(name, hours * 3600)
        except kvtier.InvalidRequest:
            assert name not in self.pins
            return
        c, length, _ = self.pins[name]
        self._pinned(name, c, length, info)
        if name in self.kept:
            self.kept[name] = (*self.kept[name][:2], info.until)

    def _pinned(self, name: str, c: int, length: int, info: kvtier.named_pins.PinInfo) -> None:
        """What is here lives until the pin ends, even if the pin is deleted before."""
        now = self.clock.wall()
        assert (info.blocks, info.until) == (length, max(info.until, now))
        self.pins[name] = (c, length, info.until)
        if self._alive(c):
            self.stamps[c].append(Stamp(now, None, info.until - now + 1, Depth.G4))

    @rule(name=names, drop=st.booleans())
    def unpin(self, name: str, drop: bool) -> None:
        assert self.cache.pins.delete(name, drop=drop) == (name in self.pins)
        pin = self.pins.pop(name, None)
        self.kept.pop(name, None)
        if pin is not None and drop:
            self.sure[pin[0]] = 0
            self.kept.pop(f"guarantee {pin[0]}", None)

    @rule()
    def promised_stay(self) -> None:
        assert [pin.name for pin in self.cache.pins.list()] == sorted(self.pins)
        if self._stay():
            for name, (c, length, _) in self.kept.items():
                assert self.cache.match(CHAINS[c]) >= length, f"{name} was broken"

    @invariant()
    def pins_end(self) -> None:
        if hasattr(self, "cache"):
            now = self.clock.wall()
            self.pins = {name: pin for name, pin in self.pins.items() if pin[2] >= now}
            self.kept = {name: kept for name, kept in self.kept.items() if kept[2] >= now}

    # ── ends ────────────────────────────────────────────────────────────────────────────────────────────────

    @rule()
    def evict_g2(self) -> None:
        self.cache.flush(timeout=5)
        self.cache.evict("g2")
        self.kept.clear()
        if not self.deep:
            self._forget([0, 1, 2])

    @rule(tier=st.integers(0, 1))
    def evict_below(self, tier: int) -> None:
        if tier < len(self.tiers):
            self.cache.flush(timeout=5)
            self.cache.evict(self.tiers[tier].name)
            self.sure = [0] * len(CHAINS)
            self.kept.clear()

    @rule(salt=st.sampled_from([None, "a"]))
    def purge(self, salt: str | None) -> None:
        if not self._ill():
            self.cache.purge(salt)
            self.clock.advance(1)
            self._purged(salt)

    def _purged(self, salt: str | None) -> None:
        mine = [c for c in range(len(CHAINS)) if SALTS[c] == salt]
        self._forget(mine)
        self.pins = {name: pin for name, pin in self.pins.items() if pin[0] not in mine}
        self.kept = {name: kept for name, kept in self.kept.items() if kept[0] not in mine}
        assert all(self.cache.match(CHAINS[c]) == 0 for c in mine), "found after its purge"
        assert [pin.name for pin in self.cache.pins.list()] == sorted(self.pins)

    @rule(
        salt=st.sampled_from([None, "a"]),
        verb=st.sampled_from(["put", "get", "pin", "flush", "prewarm"]),
        c=chains,
    )
    def purge_against(self, salt: str | None, verb: str, c: int) -> None:
        """Something else is under way when the purge comes: what it stored until then is gone, and stays so."""
        if self._ill():
            return
        keys = CHAINS[c][:6]
        work: dict[str, Callable[[], object]] = {
            "put": lambda: self.cache.put(keys, payloads_of(keys, BLOCK), DAY),
            "get": lambda: self.cache.get(keys, timeout=2).release(),
            "pin": lambda: self._pin_racing(keys),
            "flush": lambda: self.cache.flush(timeout=5),
            "prewarm": lambda: self.cache.prewarm(keys, timeout=2),
        }
        thread = threading.Thread(target=work[verb])
        thread.start()
        self.cache.purge(salt)
        thread.join(30)
        assert not thread.is_alive()
        if verb == "put" and SALTS[c] != salt:
            self.put_upto[c] = max(self.put_upto[c], 6)
            self.last_use[c] = self.clock.wall()
            self.stamps[c].append(Stamp(self.clock.wall(), DAY.ttl, None, Depth.G4))
        self._used(c)
        self.cache.pins.delete("racing")
        if verb == "pin" and self._alive(c):  # what it pinned lives on, if it did
            self.stamps[c].append(Stamp(self.clock.wall(), None, 3601, Depth.G4))
        self.clock.advance(1)
        self.cache.flush(timeout=5)
        self._purged(salt)

    def _pin_racing(self, keys: list[BlockKey]) -> None:
        with contextlib.suppress(kvtier.InvalidRequest):  # the budget may be used up
            self.cache.pins.create("racing", keys, 3600)

    @rule(hours=st.sampled_from([0.5, 3, 30, 60]))
    def age(self, hours: float) -> None:
        self.clock.advance(hours * 3600)
        self.sure = [0] * len(CHAINS)
        for c, keys in enumerate(CHAINS):
            if not self._alive(c):
                self._forget([c])
                assert self.cache.match(keys) == 0, "found after its terms ended"

    @rule(
        tier=st.integers(0, 1),
        verb=st.sampled_from(["read", "write", "lookup", "retain"]),
        kind=st.sampled_from(["error", "crash", "drop"]),
    )
    def fall_ill(self, tier: int, verb: str, kind: str) -> None:
        if tier < len(self.tiers):
            self.tiers[tier].faults.append(Fault(verb, kind))
            self.sure = [0] * len(CHAINS)
            self.kept.clear()

    @rule()
    def heal(self) -> None:
        for tier in self.tiers:
            tier.faults.clear()
        self.clock.advance(60)  # past the breaker's rest

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for tier in self.tiers:
                tier.faults.clear()
            self.cache.close()


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=CHECKS
)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_other_orders_of_events() -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS),
    )
