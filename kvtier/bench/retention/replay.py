"""A trace replayed with real bytes: `kvtier.open` over G2, G3 and optionally G4, every byte checked.

The wall clock is that of the trace, so blocks expire in the trace's time while I/O takes real time. KV is scaled:
a block has `block_tokens` × `bytes_per_token` bytes that are a pure function of its key. A worker process serves
requests; halfway it is killed (SIGKILL) and another continues with the same directory, so every block that the second
finds has been through the disk. A run has a namespace of its own, so it finds nothing of an earlier one, and deletes
its objects from G4 at its end.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvtier.bench.retention.charts import duration
from kvtier.bench.retention.curves import TtlCurve
from kvtier.bench.retention.simulate import keys_of
from kvtier.bench.retention.trace import Trace
from kvtier.clock import SystemClock
from kvtier.errors import CorruptError, KVTierError
from kvtier.identity.keys import BlockKey
from kvtier.retention.trusted_clock import Reading, TrustedClock
from kvtier.times import Wall

EPOCH_S = 1_800_000_000.0
SILENCE_S_MAX = 120.0
PATIENCE_S = 5.0
G4_STRIDE = 16
"""Blocks per object, as many as for blocks of 2 MiB; for the small ones here `auto` would be far more."""
TOUCHES_PER_TTL = 5
FLUSH_S_MAX = 600.0
"""The longest time of the trace between flushes. Uses reach the disk every two seconds of real time, in which the trace
advances by hours: blocks used in RAM would look idle to the disk."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Location and sizes. `ttl` in seconds of the trace; `kill` replaces the worker halfway; `run` names the run."""

    folder: Path
    ttl: float
    bytes_per_token: int = 8
    g2_bytes: int = 64 * 2**20
    g3_bytes: int = 4 * 2**30
    g4_url: str | None = None
    g4_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    policy: str = "auto"
    kill: bool = True
    run: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Served:
    """One request: blocks found per tier, and seconds to load them."""

    number: int
    tiers: Mapping[str, int]
    load_s: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole replay. `killed_at`: number of the first request of the second worker; -1 without."""

    setup: Setup
    served: tuple[Served, ...]
    references: int
    bytes_checked: int
    killed_at: int
    seconds: float
    stats: Mapping[str, Any]  # the last worker's `cache.stats()`, and "direct_files": G3's files under O_DIRECT
    misses: Mapping[str, int]  # blocks by reason, as the cache itself accounts for them

    @property
    def prefill_left_percent(self) -> float:
        """References that no tier served."""
        hits = sum(sum(one.tiers.values()) for one in self.served)
        return 100 - 100 * hits / self.references

    @property
    def tier_percent(self) -> dict[str, float]:
        """References served, by tier."""
        total: Counter[str] = Counter()
        for one in self.served:
            total.update(one.tiers)
        return {name: round(100 * count / self.references, 3) for name, count in sorted(total.items())}


class TraceWallClock(TrustedClock):
    """Wall time of the trace, trusted however fast it runs; waits and deadlines in real time."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.at = 0.0

    def read(self) -> Reading:
        now = Wall(EPOCH_S + self.at)
        return Reading(now, now, now)

    def resume(self, raw: bytes, boot: bytes) -> None:
        """A trace's time is not that of this boot."""


def replay(trace: Trace, setup: Setup, progress: Callable[[], None] = lambda: None) -> Replayed:
    """Serve every request of `trace`, and call `progress` after each. Blocks for minutes; leaves its files in
    `setup.folder`, which it makes.

    Raises CorruptError on the first wrong byte, and KVTierError when a worker dies by itself.
    """
    began, total = time.perf_counter(), len(trace.requests)
    setup.folder.mkdir(parents=True, exist_ok=True)
    served: list[Served] = []
    stats: Mapping[str, Any] = {}
    misses: Counter[str] = Counter()
    killed_at = -1
    halves = [(0, total // 2), (total // 2, total)] if setup.kill else [(0, total)]
    for start, stop in halves:
        last_half = stop == total
        for answer in _work(trace, setup, start, stop, kill=not last_half):
            if isinstance(answer, Served):
                served.append(answer)
                progress()
            else:
                stats = answer
                misses.update(answer["requests"]["misses"])
        if not last_half:
            killed_at = stop
    checked = sum(sum(one.tiers.values()) for one in served) * trace.block_tokens * setup.bytes_per_token
    spent = time.perf_counter() - began
    return Replayed(setup, tuple(served), trace.references, checked, killed_at, spent, stats, misses)


def summary(trace: Trace, replays: Sequence[Replayed]) -> dict[str, Any]:
    """Figures of replays of `trace` that differ in their ttl alone, each under its ttl ("10m"). Pure."""
    setup, exact = replays[0].setup, TtlCurve(trace)
    block_bytes = trace.block_tokens * setup.bytes_per_token
    out: dict[str, Any] = {
        "references_replayed": replays[0].references,
        "requests_replayed": len(replays[0].served),
        "bytes_per_token": setup.bytes_per_token,
        "block_bytes": block_bytes,
        "kv_mb": round(trace.unique * block_bytes / 1e6, 1),
        "g2_mb": round(setup.g2_bytes / 1e6, 1),
        "g3_mb": round(setup.g3_bytes / 1e6, 1),
        "g4": setup.g4_url and setup.g4_url.partition("://")[0],
    }
    for done in replays:
        loads = sorted(one.load_s * 1000 for one in done.served if one.tiers)
        out[duration(done.setup.ttl).replace(" min", "m").replace(" ", "")] = {
            "prefill_left_percent": round(done.prefill_left_percent, 3),
            "unbounded_percent": round(exact.prefill_left_percent(done.setup.ttl), 3),
            "tiers_percent": done.tier_percent,
            "missed_percent": {why: round(100 * n / done.references, 3) for why, n in done.misses.items()},
            "dropped_by_last_process": done.stats["requests"]["dropped"],
            "gb_checked": round(done.bytes_checked / 1e9, 3),
            "wrong_bytes": 0,
            "killed_before_request": done.killed_at,
            "files_under_o_direct": done.stats["direct_files"],
            "load_p50_ms": round(loads[len(loads) // 2], 3) if loads else None,
            "load_p99_ms": round(loads[int(len(loads) * 0.99)], 3) if loads else None,
            "seconds": round(done.seconds, 1),
        }
    if len(replays) > 1:
        out["prefill_ratio"] = round(replays[-1].prefill_left_percent / replays[0].prefill_left_percent, 4)
    return out


def _work(trace: Trace, setup: Setup, start: int, stop: int, *, kill: bool) -> Iterator[Served | Mapping[str, Any]]:
    """Run one worker over requests start … stop-1; with `kill`, end it with SIGKILL after its last answer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(trace, setup, start, stop, kill, theirs), daemon=True)
    worker.start()
    theirs.close()
    try:
        while True:
            # In short waits: while the whole run is stopped (SIGSTOP), the worker is too, and one wait passes.
            if not any(ours.poll(PATIENCE_S) for _ in range(int(SILENCE_S_MAX / PATIENCE_S))):
                raise KVTierError(f"the replay's worker was silent for {SILENCE_S_MAX:g} s")
            try:
                answer = ours.recv()
            except EOFError:
                worker.join(SILENCE_S_MAX)
                raise KVTierError(f"the replay's worker died with exit status {worker.exitcode}") from None
            if answer is None:
                return
            if isinstance(answer, CorruptError):
                raise answer
            if isinstance(answer, str):
                raise KVTierError(answer)
            yield answer
    finally:
        if worker.is_alive() and not kill:
            worker.join(SILENCE_S_MAX)
        worker.kill()
        worker.join()
        ours.close()


def _worker(trace: Trace, setup: Setup, start: int, stop: int, kill: bool, out: Connection) -> None:
    """The worker process: `_serve`, then instead of None an error: CorruptError for a wrong byte, else its text."""
    try:
        _serve(trace, setup, start, stop, kill, out)
    except CorruptError as wrong:
        out.send(wrong)
    except KVTierError as wrong:
        out.send(str(wrong))


def _serve(trace: Trace, setup: Setup, start: int, stop: int, kill: bool, out: Connection) -> None:
    """Sends a Served per request, then the statistics, then None. With `kill` it waits to be killed before that."""
    import kvtier

    clock, names = TraceWallClock(), keys_of(trace)
    block_bytes = trace.block_tokens * setup.bytes_per_token
    namespace = kvtier.Namespace(
        model="replay", weights=f"replay:{setup.run}", dtype="uint8", layout="flat",
        block_tokens=trace.block_tokens, block_bytes=block_bytes,
    )  # fmt: skip
    config = _config(setup)
    clock.at = trace.requests[start].at if start < stop else 0.0
    with kvtier.open(config, namespace, clock=clock) as cache:
        if shut := cache.stats()["tasks"]["out"]:
            reasons = "; ".join(f"{tier}: {why}" for tier, why in shut.items())
            raise KVTierError(f"a replay needs all its tiers: {reasons}")
        flushed_at = trace.requests[start].at if start < stop else 0.0
        for number, request in islice(enumerate(trace.requests), start, stop):
            if request.at - flushed_at > min(setup.ttl / TOUCHES_PER_TTL, FLUSH_S_MAX):
                cache.flush()
                flushed_at = request.at
            clock.at = request.at
            chain = [names[block] for block in request.blocks]
            out.send(_serve_one(cache, number, chain, block_bytes))
        out.send(cache.stats() | {"direct_files": _direct_files(setup.folder)})
        if kill:
            out.send(None)
            time.sleep(SILENCE_S_MAX)
        if setup.g4_url is not None:
            cache.flush()
            cache.evict("g4")
    out.send(None)


def _direct_files(folder: Path) -> int:
    """Files below `folder` that this process has open with O_DIRECT, by /proc."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            below = link.readlink().is_relative_to(folder.resolve())
            flags = (Path("/proc/self/fdinfo") / link.name).read_text().split("flags:")[1].split()[0]
        except OSError:  # closed meanwhile
            continue
        count += below and bool(int(flags, 8) & os.O_DIRECT)
    return count


def _serve_one(cache: Any, number: int, chain: Sequence[BlockKey], block_bytes: int) -> Served:
    from kvtier.testing import payload_of

    began = time.perf_counter()
    with cache.get(chain) as hit:
        load_s = time.perf_counter() - began
        for key, block in zip(chain, hit.blocks, strict=False):
            if block != payload_of(key, block_bytes):
                raise CorruptError(f"request {number}: block {key.hex()[-8:]} has other bytes than were stored")
        tiers = Counter(hit.tiers)
        found = len(hit)
    if found < len(chain):
        cache.put(chain, [payload_of(key, block_bytes) for key in chain[found:]], start=found)
    return Served(number, dict(tiers), load_s)


def _config(setup: Setup) -> Any:
    import kvtier

    tiers: dict[str, Any] = {
        "g2": {"capacity": setup.g2_bytes},
        "g3": {"path": str(setup.folder / "g3"), "capacity": setup.g3_bytes},
    }
    if setup.g4_url is not None:
        tiers["g4"] = {"url": setup.g4_url, "options": dict(setup.g4_options), "stride": G4_STRIDE}
    retention = {"default": "replayed", "classes": {"replayed": {"ttl": f"{int(setup.ttl)}s"}}}
    return kvtier.Config.parse({"version": 1, "tiers": tiers, "policy": setup.policy, "retention": retention})
