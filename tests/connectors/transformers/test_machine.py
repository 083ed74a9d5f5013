"""G1 and the manager together against a dict model: any order of storing, fetching, evicting, failing and waiting.

No model runs: a cache object's bytes are a pure function of the keys, so a wrong byte anywhere shows.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvtier
from kvtier.connectors.transformers import PrefixCache
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, payload_of
from tests.connectors.transformers.support.models import blocks_of, llama

torch = pytest.importorskip("torch")

TOKENS = 4
PROMPTS = tuple(tuple(head * 100 + (i if i < 12 else i + 50 * tail) for i in range(41)) for head, tail in
                ((1, 0), (1, 1), (2, 0), (3, 0)))  # fmt: skip
CONFIG = kvtier.Config.parse({"tiers": {"g1": {"blocks": 7}, "g2": {"capacity": 13 * 4096}}})
SALTS = (None, "a")


class Machine(RuleBasedStateMachine):
    """The model: which keys were ever stored since the last purge, and until when they may be served."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.stored: set[bytes] = set()
        self.used: dict[bytes, float] = {}

    @initialize()
    def open(self) -> None:
        model = llama(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                      num_key_value_heads=2, vocab_size=8)  # fmt: skip
        with PrefixCache(CONFIG, model, block_tokens=TOKENS, tiers=[]) as closed:
            self.namespace, self.shape = closed.namespace, closed.shape
        self.disk = FaultyTier(MemoryTier(self.namespace, self.clock))
        self.prefixes = PrefixCache(CONFIG, model, block_tokens=TOKENS, clock=self.clock, tiers=[self.disk])

    def teardown(self) -> None:
        if hasattr(self, "prefixes"):
            self.disk.faults.clear()
            self.prefixes.close()

    def cache_of(self, keys: list[bytes]) -> Any:
        """A cache object whose blocks have their keys' bytes."""
        from transformers import DynamicCache

        rows = [payload_of(key, self.namespace.block_bytes) for key in keys]
        blocks = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float32).view(-1, *self.shape.block(TOKENS))
        joined = blocks.permute(1, 2, 3, 0, 4, 5).reshape(1, 2, 1, self.shape.kv_heads, -1, self.shape.head_size)
        return DynamicCache([(layer[0], layer[1]) for layer in joined], config=self.prefixes.model.config)

    @rule(tokens=st.sampled_from(PROMPTS), blocks=st.integers(1, 10), salt=st.sampled_from(SALTS))
    def store(self, tokens: tuple[int, ...], blocks: int, salt: str | None) -> None:
        keys = self.prefixes.cache.chain_hashes(tokens, salt)[:blocks]
        ids = torch.tensor([tokens[: blocks * TOKENS + 1]])
        self.prefixes.store(ids, self.cache_of(keys), attention_mask=torch.ones_like(ids), retention="5m", salt=salt,
                            timeout=0.0)  # fmt: skip
        self.stored.update(keys)
        self.used.update(dict.fromkeys(keys, self.clock.wall()))

    @rule(tokens=st.sampled_from(PROMPTS), salt=st.sampled_from(SALTS))
    def fetch(self, tokens: tuple[int, ...], salt: str | None) -> None:
        keys = self.prefixes.cache.chain_hashes(tokens, salt)
        cache, hit = self.prefixes.fetch(torch.tensor([tokens]), salt=salt)
        blocks = hit // TOKENS
        assert hit % TOKENS == 0 and hit <= len(tokens) - 1
        assert blocks_of(cache, blocks, TOKENS) == [payload_of(k, self.namespace.block_bytes) for k in keys[:blocks]]
        for key in keys[:blocks]:
            assert key in self.stored, "a hit on what was never stored, or was purged"
            assert self.clock.wall() - self.used[key] <= 300, "an expired block was served"
            self.used[key] = self.clock.wall()

    @rule(tokens=st.sampled_from(PROMPTS), salt=st.sampled_from(SALTS), empty=st.sampled_from(["", "g1", "g2", "g3"]))
    def turn(self, tokens: tuple[int, ...], salt: str | None, empty: str) -> None:
        """Store, let it sink, empty the tiers down to one, and find it again, the second time where it now is."""
        self.store(tokens, 10, salt)
        self.prefixes.flush(1.0)
        if empty:
            self.prefixes.pool.evict()
        if empty >= "g2" and not self.disk.faults:
            self.prefixes.cache.evict("g2")
        if empty == "g3" and not self.disk.faults:
            self.prefixes.cache.evict("g3")
        self.fetch(tokens, salt)
        self.fetch(tokens, salt)

    @rule(salt=st.sampled_from(SALTS))
    def purge(self, salt: str | None) -> None:
        if not self.disk.faults:
            self.clock.advance(0.001)
            self.prefixes.purge(salt)
            self.clock.advance(0.001)
            for tokens in PROMPTS:
                self.stored.difference_update(self.prefixes.cache.chain_hashes(tokens, salt))

    @rule()
    def flush(self) -> None:
        self.prefixes.flush(1.0)

    @rule(seconds=st.sampled_from([0.5, 10.0, 200.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.prefixes.step()

    @precondition(lambda self: not self.disk.faults)
    @rule(verb=st.sampled_from(["read", "write", "lookup"]), kind=st.sampled_from(["error", "crash", "drop"]))
    def fall_sick(self, verb: str, kind: str) -> None:
        self.disk.faults.append(Fault(verb, kind))

    @rule()
    def heal(self) -> None:
        self.disk.faults.clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "prefixes"):
            self.prefixes.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=20, stateful_step_count=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


class Long(Machine):
    """The same with random seeds."""


TestMachineLong = pytest.mark.timeout(900)(pytest.mark.long(Long.TestCase))
TestMachineLong.settings = settings(
    max_examples=500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
