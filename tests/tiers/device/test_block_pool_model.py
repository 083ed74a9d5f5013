"""BlockPool against a model of dicts: any order of verbs, `check()` after every one."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import CapacityError
from kvtier.identity.keys import SHARED, BlockKey, make_keys
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.dirty import Dirty

BLOCKS = 8
CHAINS = tuple(tuple(make_keys(SHARED, [hashlib.sha256(bytes([c, i])).digest() for i in range(5)])) for c in range(4))


class PoolMachine(RuleBasedStateMachine):
    """The model: which request holds which slots, what bytes each slot holds, which names may be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, horizon=3, dirty_max_age_s=4)
        self.now = 0.0
        self.requests: list[list[int]] = []
        self.content: dict[int, BlockKey] = {}  # what was written to a slot last
        self.copies: list[list[tuple[Dirty, BlockKey]]] = []
        self.life = Lifetime.of(BUILTIN["24h"], 0.0)

    def held(self) -> set[int]:
        return {slot for slots in self.requests for slot in slots}

    def copied(self) -> set[int]:
        return {dirty.slot for copy in self.copies for dirty, _ in copy}

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 5), dirty=st.booleans())
    def request(self, chain: tuple[BlockKey, ...], length: int, dirty: bool) -> None:
        """Pin what is there, allocate the rest, fill it, confirm it; ends in a later step."""
        self.now += 1
        pinned = self.pool.pin(chain[:length], self.now)
        for slot, key in zip(pinned, chain, strict=False):
            assert self.content[slot] == key, "a hit led to another block's bytes"
        allowed = BLOCKS - len(self.held() | self.copied() | set(pinned))
        wanted = length - len(pinned)
        try:
            new = self.pool.allocate(wanted)
        except CapacityError:
            assert wanted > allowed
            self.pool.free(pinned)
            return
        assert wanted <= allowed and len(set(new)) == wanted
        assert not set(new) & (self.held() | self.copied() | set(pinned)), "a slot in use was handed out"
        for slot, key in zip(new, chain[len(pinned) : length], strict=True):
            self.content[slot] = key
        self.pool.confirm(new, chain, self.life, first=len(pinned), dirty_since=self.now if dirty else None)
        assert len(self.pool.match(chain[:length], self.now)) == length
        self.requests.append(pinned + new)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.free(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @rule(limit=st.integers(0, 4))
    def pick(self, limit: int) -> None:
        self.now += 1
        picked = self.pool.pick(limit, self.now)
        assert len(picked) <= limit
        for dirty in picked:
            assert self.content[dirty.slot] == dirty.key
        if picked:
            self.copies.append([(dirty, self.content[dirty.slot]) for dirty in picked])

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), again=st.booleans())
    def settle(self, data: st.DataObject, again: bool) -> None:
        self.now += 1
        copy = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        for dirty, content in copy:
            assert self.content[dirty.slot] == content, "a slot was overwritten under a copy"
        self.pool.copies_done([dirty for dirty, _ in copy], again_since=self.now if again else None)

    @rule(chain=st.sampled_from(CHAINS), first=st.integers(0, 4))
    def evict(self, chain: tuple[BlockKey, ...], first: int) -> None:
        self.pool.evict(chain[first:])
        assert len(self.pool.match(chain, self.now)) <= first

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        assert self.pool.free_blocks == BLOCKS - len(self.held() | self.copied())
        for chain in CHAINS:
            for slot, key in zip(self.pool.match(chain, self.now), chain, strict=False):
                assert self.content[slot] == key


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)


class Long(PoolMachine):
    """The same with random seeds and ten times the steps."""


TestPoolLong = pytest.mark.long(Long.TestCase)
TestPoolLong.settings = settings(max_examples=2000, stateful_step_count=60, deadline=None)
