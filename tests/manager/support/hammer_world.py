"""Clocks and tiers of a hammered cache: what lies below it, what goes wrong there, and what a restart finds again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import kvtier
from kvtier.clock import SystemClock
from kvtier.errors import ClosedError
from kvtier.manager.build import limits_of, lower_tiers
from kvtier.manager.hierarchy import ManagerLimits
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.testing import Fault, FaultyTier, MemoryTier, sample_namespace
from kvtier.testing.faults_s3 import FaultyS3, S3Fault, S3Rule
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.guard import GuardLimits
from kvtier.tiers.host import slot
from kvtier.tiers.protocol import Tier
from kvtier.times import Mono, Wall

STACKS = ("memory", "disk", "objects", "both", "worker", "s3", "long")
"""Kinds of tiers below G2: in dicts; G3 in this process; a bucket in files; both; G3 in a process of its own; both,
with a bucket that fails. In dicts below 100,000 slots, with long chains."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of blocks and prompts. `forks` of each of `prompts` leave it at some block."""

    block_bytes: int = 4096
    slots: tuple[int, ...] = (24, 32, 48, 96)
    blocks: int = 12
    prompts: int = 3
    forks: int = 3
    renewed: float = 0.2
    """Share of the puts that bring blocks which no tier has."""


SHAPES = {"long": Shape(64, (100_000,), 8000, 2, 1)}

DAY_S = 86_400.0
CLASSES = {
    "blink": {"ttl": "50ms"},
    "short": {"max_age": "300ms"},
    "brief": {"max_age": "2s"},
    "sure": {"ttl": "1h", "guarantee": True},
    "shallow": {"ttl": "1h", "ceiling": "g2"},
    "local": {"ttl": "1h", "ceiling": "g3"},
    "urgent": {"ttl": "1h", "priority": 90},
}
_VERBS = ("read", "write", "lookup", "retain", "purge", "tombstones", "evict", "flush", "write_note", "*")
_FORWARDED = ("subscribe", "report_to", "restarts", "counters")
_HUNG_S = 8.0  # a run that fails ends, too
_HURRIED = GuardLimits(open_s=20.0, call_s=0.5, purge_s=0.5, evict_s=0.5)
_S3_FAULTS = (
    S3Fault.STATUS_500, S3Fault.STATUS_503, S3Fault.STATUS_404, S3Fault.STATUS_412, S3Fault.RESET, S3Fault.DONE_RESET,
    S3Fault.FLIPPED, S3Fault.PARTIAL_BODY, S3Fault.SHIFTED, S3Fault.WRONG_RANGE, S3Fault.EMPTY_200, S3Fault.SLOW_BODY,
)  # fmt: skip


def _quick(*of: Any) -> ManagerLimits:
    return replace(limits_of(*of), housekeeping_s=0.02)


class SetClock(SystemClock):
    """The system's clocks; the wall time is set now and then, and the machine suspended."""

    offset_s = 0.0
    suspended_s = 0.0

    def wall(self) -> Wall:
        return Wall(super().wall() + self.suspended_s + self.offset_s)

    def monotonic(self) -> Mono:
        return Mono(super().monotonic() + self.suspended_s)


@contextlib.contextmanager
def slow_copies(rng: random.Random) -> Iterator[None]:
    """Let a put of small blocks take as long as one of large blocks, so that it is cancelled while it copies."""

    def copy_in(pieces: Sequence[memoryview], buffer: memoryview) -> None:
        time.sleep(rng.choice([0, 0, 0.0005, 0.002]))
        slot.copy_in(pieces, buffer)

    with mock.patch("kvtier.put.copy_in", copy_in):
        yield


class TroubledTier(FaultyTier):
    """A FaultyTier over any tier. A tenth of its calls of verbs in `hanging` do not answer before `heal`; half of these
    heed no cancellation either."""

    def __init__(self, inner: Tier, seed: int) -> None:
        super().__init__(inner, seed=seed)
        self.hanging: frozenset[str] = frozenset()
        self._rng = random.Random(seed)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.inner, verb) if verb in _FORWARDED else super().__getattr__(verb)

    async def _inject(self, verb: str) -> Fault | None:
        if self.hanging & {verb, "*"} and self._rng.random() < 0.1:
            await self._hang(self._rng.random() < 0.5)
        return await super()._inject(verb)

    async def _hang(self, deaf: bool) -> None:
        ends = time.monotonic() + _HUNG_S
        while self.hanging and time.monotonic() < ends:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if not deaf:
                    raise

    def trouble(self, rng: random.Random) -> None:
        """Other faults than before, or none."""
        kind = rng.choice(["none", "none", "error", "crash", "slow", "linger", "drop", "hang"])
        verb = rng.choice(_VERBS)
        faults = [] if kind in ("none", "hang") else [Fault(verb, kind, 0.3, seconds=rng.random() * 0.1)]
        self.faults[:], self.hanging = faults, frozenset({verb} if kind == "hang" else ())

    def heal(self) -> None:
        """Every call is answered from now on, those that hang included."""
        self.faults.clear()
        self.hanging = frozenset()


class World:
    """All that a cache finds again after a restart: directory, bucket and clock. `stack` is one of STACKS."""

    def __init__(self, stack: str, root: Path, rng: random.Random) -> None:
        self.stack, self.root, self.rng = stack, root, rng
        self.shape = SHAPES.get(stack, Shape())
        self.block_bytes = self.shape.block_bytes
        self.namespace = sample_namespace(self.block_bytes)
        self.clock = SetClock()
        self.slots = rng.choice(self.shape.slots)
        self.stride = rng.choice([1, 2, 4])
        self.memory = [MemoryStore.empty(), MemoryStore.empty()]
        self.capacity_blocks = 0 if stack == "long" else rng.choice([0, 40, 200])
        self.deep = stack != "long" and rng.random() < 0.7
        self.calm = False
        self.tiers: list[TroubledTier] = []
        self.server = FaultyS3(rng.randrange(1 << 30))
        self.config = kvtier.Config()
        self._sizes = random.Random(hash(rng.getstate()))
        self.resized = stack != "long" and self._sizes.random() < 0.4
        """Whether reloads change the capacity of G2, which is followed at once."""

    @contextlib.contextmanager
    def running(self) -> Iterator[World]:
        """Serves the bucket inside a `with`, where the stack has one that needs a server."""
        with contextlib.ExitStack() as ending:
            if self.stack == "s3":
                ending.enter_context(self.server.running())
            if self.resized:
                ending.enter_context(mock.patch("kvtier.manager.build.limits_of", _quick))
            self.config = kvtier.Config.parse(self._document())
            yield self

    def _document(self) -> dict[str, object]:
        tiers: dict[str, object] = {"g2": {"capacity": self.slots * self.block_bytes}}
        if self.stack in ("disk", "both", "worker", "s3"):
            tiers["g3"] = {"path": str(self.root / "g3"), "capacity": 256 * self.block_bytes}
        if self.stack in ("objects", "both"):
            tiers["g4"] = {"url": f"file://{self.root}/bucket", "stride": self.stride}
        if self.stack == "s3":
            tiers["g4"] = {
                "url": "s3://bucket/p",
                "stride": self.stride,
                "client": "s3fs",
                "options": self.server.options,
            }
        quota = {"quota": 0.6} if self.rng.random() < 0.3 and self.stack != "long" else {}
        return {
            "tiers": tiers,
            "retention": {"classes": CLASSES, **quota},
            "deadlines": {"close": "5s", "get": "300ms", "put": "300ms", "lookup": "50ms"},
        }

    @property
    def roomy(self) -> bool:
        """Whether the tiers have space for all that is written to them."""
        return self.stack != "memory" or not self.capacity_blocks

    def open(self, face: type) -> Any:
        """A closed cache over the stores as they are. Adds to `tiers` what it has below."""
        clock = TrustedClock(self.clock)
        if self.stack == "worker":
            return face(self.config, self.namespace, clock, computes=True)
        if self.stack in ("memory", *SHAPES):
            raw: Sequence[Tier] = [
                MemoryTier(self.namespace, clock, store=self.memory[0], capacity_blocks=self.capacity_blocks)
            ]
            if self.deep:
                raw = [
                    *raw,
                    MemoryTier(
                        self.namespace, clock, store=self.memory[1], name="g4", depth=Depth.G4, stride=self.stride
                    ),
                ]
        else:
            raw = lower_tiers(self.config, self.namespace, clock)
        tiers = [TroubledTier(tier, self.rng.randrange(1 << 30)) for tier in raw]
        self.tiers += tiers
        return face(self.config, self.namespace, clock, tiers)

    def hurry(self, cache: Any) -> None:
        """Have the guards give up soon, where tiers hang."""
        for tier in cache.manager.lower.values():
            tier.inner.limits = _HURRIED

    def trouble(self, cache: Any) -> None:
        """Something else goes wrong from now on, or nothing, as in a calm world."""
        if self.resized:
            self._resize(cache, self._sizes.randint(max(1, self.slots // 8), self.slots))
        if self.calm:
            return
        for tier in self.tiers:
            tier.trouble(self.rng)
        if self.stack == "s3":
            fault, verb = self.rng.choice(_S3_FAULTS), self.rng.choice(["get", "put", "list", "copy", "*"])
            self.server.rules[:] = [S3Rule(verb, fault, 0.3)] if self.rng.random() < 0.5 else []
        if self.rng.random() < 0.2:
            self.clock.offset_s += self.rng.choice([3.0, -3.0, 30.0, -30.0, 2 * DAY_S, -2 * DAY_S, 1.5])
        if self.stack == "worker" and self.rng.random() < 0.05:
            for worker in self._workers(cache):
                if worker is not None and worker.process.poll() is None:
                    os.kill(worker.process.pid, signal.SIGKILL)

    def _workers(self, cache: Any) -> list[Any]:
        lower = cache.manager.lower.values()
        return [tier.inner.inner._worker for tier in lower] if self.stack == "worker" else []

    def workers_down(self, cache: Any) -> int:
        """Worker processes that are not at work yet."""
        return self._workers(cache).count(None)

    def _resize(self, cache: Any, slots: int) -> None:
        tiers = self.config.tiers
        g2 = tiers.g2.model_copy(update={"capacity": slots * self.block_bytes})
        with contextlib.suppress(ClosedError):
            cache.reload(self.config.model_copy(update={"tiers": tiers.model_copy(update={"g2": g2})}))

    def suspend(self, seconds: float) -> None:
        """The machine sleeps so long."""
        self.clock.suspended_s += seconds

    def heal(self, cache: Any) -> None:
        """All is well, and the clock shows the time that is trusted."""
        if self.resized:
            self._resize(cache, self.slots)
        for tier in self.tiers:
            tier.heal()
        self.server.rules.clear()
        anchor = cache.manager.hierarchy.clock._guard.anchor
        trusted = anchor.wall_s + self.clock.monotonic() - anchor.mono_s
        self.clock.offset_s += trusted - self.clock.wall()
        for tier in cache.manager.lower.values():
            tier.inner.breaker.succeeded()
