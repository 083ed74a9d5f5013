"""A history to be played, drawn from a seed: the machines, and what is done to them step by step. Plain data, so that
steps can be left out, and a history kept as a file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from kvtier.errors import InvalidRequest
from kvtier.sim import drive
from kvtier.sim.device_faults import DeviceFaults
from kvtier.sim.link import LinkFaults

MODES = ("safety", "liveness", "engines")
STEPS = 40
HOSTS_MAX = 8
DISK_BLOCKS = (0, 24, 64)
"""G3's capacity; 0: no bound."""
_VERBS: Mapping[str, int] = {
    "put": 22, "get": 22, "request": 14, "match": 4, "prewarm": 3, "flush": 4, "evict": 4, "purge": 3, "pin": 3,
    "unpin": 2, "bucket": 5, "disk": 5, "heal": 3, "land": 2, "damage": 2, "jump": 1, "leap": 1, "kill": 3, "stop": 2,
}  # fmt: skip
_ENGINE_VERBS: Mapping[str, int] = {
    "ask": 60, "abort": 12, "preempt": 14, "reset": 14, "device": 12, "put": 6, "get": 6, "evict": 5, "purge": 5,
    "flush": 2, "bucket": 3, "disk": 3, "heal": 3, "land": 1, "damage": 1, "leap": 1, "jump": 1, "kill": 2, "stop": 1,
}  # fmt: skip
ENGINE_VERBS = ("ask", "abort", "preempt", "reset", "device")
"""Those of an engine or its devices."""
_DISK_FAULTS = ("error", "crash", "slow", "linger", "drop", "hang")
_DISK_VERBS = ("read", "write", "lookup", "retain", "purge", "tombstones", "evict", "flush", "write_note", "*")
_DAY_S = 86_400.0
_TIERS: Sequence[tuple[str, ...]] = (("g3", "g4"), ("g3", "g4"), ("g4",), ("g3",), ("g3", "g4"), ())
_REAL_VERBS = {**_VERBS, "put": 26, "disk": 9, "damage": 3, "kill": 5, "beside": 14}
"""Where G3 is the real one."""


@dataclass(frozen=True)
class Step:
    """`gap` seconds after the step before it, `host` does `verb`, without waiting for its end. `seed`: of what it draws
    meanwhile."""

    gap: float
    host: int
    verb: str
    args: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class EngineShape:
    """Of the engine on each machine. `blocks` of its pool; `batch`: tokens of a step, which takes `pace` times as long
    as in a small engine; `ahead`: whether it is planned before the last one has run, and `defers`: whether blocks that
    it may still write are given back behind it. Copies: `chunk_blocks` at once, `step_blocks` stored per step,
    `in_step_blocks` loaded within one. `mode`: offload.mode."""

    blocks: int
    batch: int
    running: int
    ranks: int
    ahead: bool
    defers: bool
    caching: bool
    polls_first: bool
    chunk_blocks: int
    step_blocks: int
    in_step_blocks: int
    stores_decoded: bool
    weighs: bool
    shares_cores: bool
    mode: Literal["auto", "lazy", "eager"]
    pace: float


@dataclass(frozen=True)
class History:
    """`skews`: by how much each machine's wall clock is ahead at first. `tiers`: those below G2. `purge`: its mode.
    `quota`: a scope's share of G2; 0: all. `slices`: into how many blocks long work is cut, so that
    chains as short as these are cut, too; 0: as ever. `disk`: what G3 is."""

    seed: int
    mode: str
    skews: tuple[float, ...]
    tiers: tuple[str, ...]
    slots: int
    disk_blocks: int
    stride: int
    purge: str
    policy: str
    quota: float
    slices: int
    steps: tuple[Step, ...] = field(repr=False)
    engine: EngineShape | None = None
    disk: Literal["model", "real"] = "model"

    @property
    def spread_s(self) -> float:
        """How far the machines' clocks are apart at most, in all of it."""
        known = [0.0, *self.skews, *(step.args["ahead"] for step in self.steps if step.verb == "jump")]
        return float(max(known) - min(known))

    def only(self, steps: Sequence[int]) -> History:
        """The same with these of its steps, by number."""
        return replace(self, steps=tuple(self.steps[number] for number in steps))

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, raw: bytes) -> History:
        """The inverse. Raises InvalidRequest."""
        try:
            history = msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"not a history of `kvtier sim`: {error}") from None
        verbs = {step.verb for step in history.steps}
        known = _ENGINE_VERBS.keys() | _REAL_VERBS.keys()
        if history.mode not in MODES or not 1 <= len(history.skews) <= HOSTS_MAX or not verbs <= known:
            raise InvalidRequest("not a history of `kvtier sim`: its mode, its machines or a verb do not exist")
        if (history.mode == "engines") != (history.engine is not None):
            raise InvalidRequest("not a history of `kvtier sim`: mode engines, and no other one, has an engine")
        if history.engine is None and (alien := sorted(verbs.intersection(ENGINE_VERBS))):
            raise InvalidRequest(f"not a history of `kvtier sim`: nothing does {', '.join(alien)} without an engine")
        return history


def make_history(
    seed: int, mode: str = "safety", hosts: int = 0, steps: int = STEPS, disk: Literal["model", "real"] = "model"
) -> History:
    """`hosts` 0: one to three. Pure. Raises InvalidRequest."""
    if mode not in MODES:
        raise InvalidRequest(f"mode {mode!r}: one of {', '.join(MODES)}")
    if not 0 <= hosts <= HOSTS_MAX or steps < 1:
        raise InvalidRequest(f"hosts: 1 … {HOSTS_MAX}, steps: at least 1; got {hosts} and {steps}")
    real = disk == "real"
    rng = random.Random(f"{mode} {disk} {seed}" if real else f"{mode} {seed}")
    tiers = rng.choice([tiers for tiers in _TIERS if "g3" in tiers or not real])
    count = hosts or (rng.choice((1, 2, 2, 3)) if "g4" in tiers else 1)
    near = mode == "liveness" or rng.random() < 0.7  # a clock that is wrong costs hits until it is trusted again
    skews = tuple(rng.choice((0.0, 0.5, -1.5) if near else (0.0, 5.0, -30.0, 250.0, -3600.0)) for _ in range(count))
    return History(
        seed=seed,
        mode=mode,
        skews=skews,
        tiers=tiers,
        slots=rng.choice((16, 24, 40)),
        disk_blocks=rng.choice(DISK_BLOCKS),
        stride=rng.choice((1, 2, 4)),
        purge=rng.choice(("strict", "available")) if "g4" in tiers else "available",
        policy=rng.choice(("auto", "lru", "gapduel")),
        quota=rng.choice((0.0, 0.0, 0.6)),
        slices=rng.choice((0, 0, 1, 2)),
        steps=tuple(_steps(rng, count, steps, tiers, near, mode, real=real)),
        engine=_shape(rng) if mode == "engines" else None,
        disk=disk,
    )


def _shape(rng: random.Random) -> EngineShape:
    return EngineShape(
        blocks=rng.choice((14, 20, 32, 64)),
        batch=rng.choice((16, 24, 48, 200)),
        running=rng.choice((2, 4, 8)),
        ranks=rng.choice((1, 1, 2)),
        ahead=rng.random() < 0.5,
        defers=rng.random() < 0.5,
        caching=rng.random() < 0.7,
        polls_first=rng.random() < 0.5,
        chunk_blocks=rng.choice((1, 2, 64)),
        step_blocks=rng.choice((1, 4, 64)),
        in_step_blocks=rng.choice((0, 2, 64, 64)),
        stores_decoded=rng.random() < 0.8,
        weighs=rng.random() < 0.3,
        shares_cores=rng.random() < 0.3,
        mode=rng.choice(("auto", "auto", "eager", "lazy")),
        pace=rng.choice((1.0, 10.0)),
    )


def _steps(
    rng: random.Random, hosts: int, count: int, tiers: Sequence[str], near: bool, mode: str, *, real: bool
) -> Iterator[Step]:
    every = _ENGINE_VERBS if mode == "engines" else _REAL_VERBS if real else _VERBS
    verbs = {verb: weight for verb, weight in every.items() if not near or verb != "jump"}
    for verb in rng.choices(list(verbs), list(verbs.values()), k=count):
        gap = rng.choice((0.0, 0.0, 0.0, 0.001, 0.003, 0.01, 0.1, 0.5, 2.0, 8.0 if rng.random() < 0.5 else 25.0))
        yield Step(gap, rng.randrange(hosts), verb, dict(_args(verb, rng, tiers, real=real)), rng.getrandbits(32))


def _args(verb: str, rng: random.Random, tiers: Sequence[str], *, real: bool) -> Iterator[tuple[str, Any]]:
    if verb in ("put", "get", "request", "match", "prewarm", "pin"):
        yield "scope", min(int(rng.expovariate(0.6)), 5) if verb != "pin" else 0
        yield "chain", min(int(rng.expovariate(0.5)), 7)
        yield "blocks", rng.randint(1, 6)
    if verb == "beside":
        yield "prompt", rng.randrange(6)
        yield "blocks", rng.randint(1, 4)
        yield "does", rng.choice(("put", "put", "put", "get", "get", "purge", "late", "late"))
        yield "waits", rng.choice((0.0, 0.0, 0.01, 1.0))
    if verb in ("put", "get"):
        yield "start", rng.choice((0, 0, 0, 1, 3))
    if verb in ("put", "get", "request", "match", "prewarm"):
        yield "timeout", rng.choice((None, 0.0, 0.01, 0.2, 2.0))
    if verb in ("put", "get", "request", "prewarm", "flush", "purge", "pin", "evict") and rng.random() < 0.3:
        yield "cancel", rng.choice((0, 1, 2, 3, 5, 8, 13, 30))
    if verb == "put":
        yield "kind", rng.choice((None, None, "sure", "shallow", "local", "urgent", "ranges"))
        yield "wait", rng.random() < 0.6
    elif verb == "get":
        yield "hold", rng.choice((0.0, 0.01, 1.0))
    elif verb == "request":
        yield "forward", rng.choice((0.0, 0.005, 0.05, 1.0))
        yield "ending", rng.choice(("commit", "commit", "commit", "abort", "late", "preempt"))
    elif verb == "flush":
        yield "timeout", rng.choice((0.0, 0.5, 20.0))
    elif verb == "evict":
        yield "tier", rng.choice(("g2", *tiers))
    elif verb == "purge":
        yield "scope", rng.choice((0, 0, 1, 2, 4))
    elif verb in ("pin", "unpin"):
        yield "name", f"p{rng.randrange(3)}"
        yield "seconds", rng.choice((5.0, 3600.0))
    elif verb == "bucket":
        yield "kind", rng.choice(LinkFaults.KINDS)
        yield "rate", rng.choice((0.1, 0.4, 1.0))
    elif verb == "disk":
        yield "kind", rng.choice(drive.KINDS if real else _DISK_FAULTS)
        yield "on", rng.choice(drive.VERBS if real else _DISK_VERBS)
        yield "rate", rng.choice((0.1, 0.4, 1.0))
    elif verb == "ask":
        yield from _asked(rng)
    elif verb in ("abort", "preempt"):
        yield "which", rng.randrange(8) if verb == "abort" or rng.random() < 0.7 else -1
    elif verb == "reset":
        yield "running", rng.random() < 0.6
    elif verb == "device":
        yield "kind", rng.choice(DeviceFaults.KINDS)
        yield "rate", rng.choice((0.1, 0.4, 1.0))
    elif verb == "jump":
        yield "ahead", rng.choice((3.0, -3.0, 250.0, -3600.0, 2 * _DAY_S, -2 * _DAY_S))
    elif verb == "leap":
        yield "seconds", rng.choice((5.0, 70.0, 700.0))
    elif verb in ("kill", "stop"):
        yield from _ending(verb, rng, real=real)


def _ending(verb: str, rng: random.Random, *, real: bool) -> Iterator[tuple[str, Any]]:
    """The end of a process, for how long; `again`: that of the next one, too. The machine may lose its power, and G3
    may have another capacity from then on."""
    yield "down", rng.choice((0.0, 0.5, 3.0))
    if verb == "kill" and rng.random() < 0.3:
        yield "again", rng.choice((0.0, 0.001, 0.02))
    if verb == "kill" and real:
        yield "power", rng.random() < 0.5
    if real and rng.random() < 0.3:
        yield "disk_blocks", rng.choice(DISK_BLOCKS)


def _asked(rng: random.Random) -> Iterator[tuple[str, Any]]:
    """A prompt of an engine, `short` tokens shorter than its blocks, of which `tokens` are sampled. `by_length`: the
    engine knows how many."""
    yield "scope", rng.choice((0, 0, 0, 1, 2, 3, 5))
    yield "chain", min(int(rng.expovariate(0.7)), 7)
    yield "blocks", rng.randint(1, 6)
    yield "short", rng.choice((0, 0, 1, rng.randrange(16)))
    yield "tokens", rng.choice((1, 2, 9, 17, 40))
    yield "by_length", rng.random() < 0.6
    yield "leaves", rng.random() < 0.1
    yield "kind", rng.choice((None, None, None, "sure", "shallow", "local", "urgent"))
    yield "off", rng.choice((None,) * 8 + ("load", "store"))
