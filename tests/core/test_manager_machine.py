"""The manager over tiers in memory, against a dictionary: whatever happens, right bytes or a miss."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvtier
from kvtier.terms import Depth
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
CHAINS = [list(chain_of(NS, 14, seed=seed)) for seed in range(3)]
DAY = kvtier.Terms("day", ttl=86_400)
chains = st.sampled_from(range(len(CHAINS)))
lengths = st.integers(0, 14)


class ManagerMachine(RuleBasedStateMachine):
    """G2 of 12 slots over an unbounded G3 and G4 (stride 4).

    `put_upto[c]`: leading blocks of chain c that may be found; `sure[c]`: those that must be, once flushed.
    """

    @initialize(stack=st.sampled_from(["g3", "g4", "g3+g4", ""]))
    def open(self, stack: str) -> None:
        self.clock = VirtualClock()
        tiers = []
        if "g3" in stack:
            tiers.append(FaultyTier(MemoryTier(NS, self.clock)))
        if "g4" in stack:
            tiers.append(FaultyTier(MemoryTier(NS, self.clock, name="g4", depth=Depth.G4, stride=4)))
        self.tiers = tiers
        self.deep = bool(tiers)
        self.cache = kvtier.open(
            kvtier.Config.parse(
                {"tiers": {"g2": {"capacity": 12 * 4096}}, "deadlines": {"close": "2s", "put": "20s", "lookup": "5s"}}
            ),
            NS,
            clock=self.clock,
            tiers=list(tiers),
        )
        self.put_upto = [0] * len(CHAINS)  # what may be there
        self.sure = [0] * len(CHAINS)

    def _ill(self) -> bool:
        return any(tier.faults for tier in self.tiers)

    @rule(c=chains, length=lengths, overlap=st.integers(0, 14), wait=st.booleans())
    def put(self, c: int, length: int, overlap: int, wait: bool) -> None:
        start = min(overlap, length, self.put_upto[c])
        keys = CHAINS[c][:length]
        stored = self.cache.put(keys, payloads_of(keys[start:], BLOCK), DAY, wait, start=start)
        assert 0 <= stored <= length - start
        self.put_upto[c] = max(self.put_upto[c], start + stored)
        if self.deep and wait and not self._ill() and self.cache.manager.demoter.well() and start <= self.sure[c]:
            assert stored == length - start, "a put that may wait found no room"
            # Right above G4, the tail of an incomplete stride is in G2 alone until a flush.
            kept = length // 4 * 4 if self.tiers[0].stride == 4 else length
            self.sure[c] = max(self.sure[c], kept)

    @rule(c=chains, length=lengths)
    def get(self, c: int, length: int) -> None:
        keys = CHAINS[c][:length]
        with self.cache.get(keys, timeout=2) as hit:
            assert [bytes(b) for b in hit.blocks] == [payload_of(k, BLOCK) for k in keys[: len(hit)]], "wrong bytes"
            assert len(hit) <= max(self.put_upto[c], 0) or length == 0
            assert (hit.miss is None) == (len(hit) == length)

    @rule(c=chains)
    def match(self, c: int) -> None:
        assert self.cache.match(CHAINS[c]) <= self.put_upto[c]

    @rule()
    def flush_and_find(self) -> None:
        flushed = self.cache.flush(timeout=5)
        assert flushed.pending == 0 or self._ill()
        if self.deep and not self._ill():
            for c, keys in enumerate(CHAINS):
                assert self.cache.match(keys) >= self.sure[c], f"chain {c}: flushed blocks are gone"

    @rule()
    def evict_g2(self) -> None:
        self.cache.flush(timeout=5)
        self.cache.evict("g2")
        self.forget_unless_deep()

    def forget_unless_deep(self) -> None:
        if not self.deep:
            self.put_upto = [0] * len(CHAINS)

    @rule(tier=st.integers(0, 1))
    def evict_below(self, tier: int) -> None:
        if tier < len(self.tiers):
            self.cache.flush(timeout=5)
            self.cache.evict(self.tiers[tier].name)
            self.sure = [0] * len(CHAINS)

    @rule()
    def purge(self) -> None:
        if not self._ill():
            self.cache.purge()
            self.clock.advance(1)
            self.sure = [0] * len(CHAINS)
            self.put_upto = [0] * len(CHAINS)
            assert all(self.cache.match(keys) == 0 for keys in CHAINS), "found after its purge"

    @rule(days=st.integers(2, 3))
    def age(self, days: int) -> None:
        self.clock.advance(days * 86_400)
        self.sure = [0] * len(CHAINS)
        self.put_upto = [0] * len(CHAINS)
        assert all(self.cache.match(keys) == 0 for keys in CHAINS), "found after its terms ended"

    @rule(
        tier=st.integers(0, 1),
        verb=st.sampled_from(["read", "write", "lookup"]),
        kind=st.sampled_from(["error", "crash", "drop"]),
    )
    def fall_ill(self, tier: int, verb: str, kind: str) -> None:
        if tier < len(self.tiers):
            self.tiers[tier].faults.append(Fault(verb, kind))
            self.sure = [0] * len(CHAINS)

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


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
