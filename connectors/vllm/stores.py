"""Stores: blocks on their way from vLLM's pool into G2, from their confirmation to the end of their copies.

A confirmed block is dirty until it is copied. A step's copies are those that will soon be handed out again (the head
of the pool's free queue), then those that have been dirty for long. Copies take no reference: a copy is published
only if the block still is in the use in which it was confirmed, after all ranks have answered.

Called on the engine's one scheduler thread; nothing here waits.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter

from kvtier.clock import Clock
from kvtier.config import Offload
from kvtier.connectors.runs import runs_of
from kvtier.connectors.vllm import compat
from kvtier.connectors.vllm.confirm import Chain, Confirmed, Confirmer, Token
from kvtier.connectors.vllm.messages import StepMoves
from kvtier.connectors.vllm.patience import Patience
from kvtier.identity.keys import Scope, tenant_of
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import BlockTerms
from kvtier.tiers.device.dirty import Dirty, DirtyList
from kvtier.tiers.host.slot import Slot
from kvtier.times import Mono

log = logging.getLogger(__name__)

_GRAIN_S = 0.25
"""How much later than its age allows a block may be copied out, for the sake of batches."""
_LEAST_BYTES = 64 << 20
"""What a step may copy out however short it is."""
_PRESSED_S = 0.05
"""The same where blocks are handed out again as soon as they are free."""
_STEP_BLOCKS = 1024
"""Most blocks that a step chooses by their age. Each costs the engine's one thread about 8 µs."""
_PACE_BLOCKS, _PACE_BLOCKS_S = 16, 5000.0
"""The same of a step that requests wait for: so many, or so many per second since the last one, a twentieth of it."""


@dataclass(frozen=True, slots=True)
class ConnectorLimits:
    """Bounds of the connector."""

    lookup_deadline_s: float  # a request waits for promotion at most so long
    prefetch_s: float  # a promotion for which no request waits goes on at most so long
    flush_timeout_s: float = 3.0  # an idle or stopping engine copies out at most so long
    ack_timeout_s: float = 30.0  # a rank that leaves a copy unanswered longer has stopped answering
    step_bytes: int = 64 << 20  # copied out per step, all ranks together
    link_bytes_s: float = math.inf  # what a step's copies may count on since the last ones, all ranks together
    spill_ahead_blocks: int = 64  # at the head of the free queue: copied before they are handed out
    decode: bool = True  # blocks that were filled by decoding are stored, too
    weighs_loads: bool = True  # blocks that would arrive later than prefill takes are computed
    gives_up: bool = True  # a load that takes too long may fail without its request
    in_step_bytes: int = 0  # of loads that one step makes within itself, before it computes the rest; 0: none
    shares_cores: bool = False  # copies are made by the cores that compute
    dropped_blocks: int = 0  # of what its pool has, the engine's own hits leave out so many at the end
    pause_s: float = 0.0  # a step that computes nothing waits so long for a promotion that a request waits for


@dataclass(slots=True, eq=False)
class _Copies:
    """Blocks of one chain, ascending in depth, under their tokens, and the slots that they are copied into."""

    chain: Chain
    blocks: list[int]
    tokens: list[Token]
    slots: list[Slot]
    generations: list[int]

    def take(self, which: Sequence[bool]) -> _Copies:
        return _Copies(
            self.chain,
            list(compress(self.blocks, which)),
            list(compress(self.tokens, which)),
            list(compress(self.slots, which)),
            list(compress(self.generations, which)),
        )


@dataclass(slots=True, eq=False)
class _Storing:
    """One job: its moves are those of its runs, one after another."""

    manager: Manager
    runs: list[_Copies]
    since_s: Mono
    ranks: int = 0
    failed: set[int] = field(default_factory=set)
    abandoned: bool = False

    def blocks(self) -> list[int]:
        return [block for run in self.runs for block in run.blocks]


class Stores:
    """See the module. Owns the dirty list and the copies under way of one engine; `counters` are the half's."""

    def __init__(
        self,
        offload: Offload,
        limits: ConnectorLimits,
        ranks: int,
        clock: Clock,
        counters: Counter[str],
        job: Callable[[], int],
    ) -> None:
        """`job` returns a new number of a job at each call."""
        self.limits = limits
        self.ranks = ranks
        self.stopped = False  # a rank has stopped answering: nothing more is copied out
        self._offload = offload
        self._clock = clock
        self._counters = counters
        self._job = job
        self._pool: compat.EnginePool | None = None
        self._confirmer: Confirmer | None = None
        self._dirty = DirtyList()
        self._storing: dict[int, _Storing] = {}
        self._patience = Patience()
        # Copies go out in batches, since each command costs the workers' threads as much as many blocks.
        self._grain = min(_GRAIN_S, offload.dirty_max_age / 4)
        self._copied_at = -math.inf  # when copies were last planned
        self._paced_at = Mono("-inf")  # up to when `_pace` has let blocks pass
        self._look_at = -math.inf  # when to look for aged blocks again
        self._taken = 0  # blocks handed out since the free queue was looked through
        self._walked_free = 0  # its length then

    def bind(self, pool: compat.EnginePool, confirmer: Confirmer) -> None:
        self._pool, self._confirmer = pool, confirmer

    def __bool__(self) -> bool:
        """Whether there is something to copy, or a copy under way."""
        return bool(self._dirty or self._storing)

    def add(self, chain: Chain, start: int, blocks: Sequence[int], tokens: Sequence[Token]) -> None:
        """Blocks of a chain from depth `start` on were confirmed: they are dirty from now on."""
        assert self._confirmer is not None
        now = self._clock.monotonic()
        if not self._dirty:
            self._paced_at = now
        for depth, block, token in zip(range(start, start + len(blocks)), blocks, tokens, strict=True):
            known = self._dirty.get(chain[depth])
            if known is not None:
                if self._confirmer.lasts(known.slot, known.token):
                    continue
                self.forget((known.slot,))
            if self._dirty.at(block):
                self.forget((block,))
            self._dirty.add(block, chain, depth, now, token)

    def mark(self, confirmed: Confirmed, manager: Manager | None, default: BlockTerms | None) -> None:
        """Add the blocks that may be stored and lie not in G2 yet; with terms other than `default`, or where that is
        None, all of them, since a store renews the terms."""
        track, start, blocks, tokens, found = confirmed
        count = track.storable_blocks - start
        if not track.storable or count <= 0:
            return
        blocks, tokens, chain = blocks[:count], tokens[:count], track.chain
        if not found or default is None or chain.terms.only != default or manager is None:
            self.add(chain, start, blocks, tokens)
            return
        for depth, block, token in zip(range(start, start + count), blocks, tokens, strict=False):
            if not manager.holds(chain[depth]):  # else it has been stored since it was confirmed for another request
                self.add(chain, depth, [block], [token])

    def taken(self, blocks: int) -> None:
        """The pool has handed out blocks."""
        self._taken += blocks

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks hold something else now."""
        self._counters["spill_lost"] += len(self._dirty.discard(blocks))

    def forget_tenants(self, tenants: Collection[Scope]) -> None:
        """Nothing that waits for its copy is kept of these."""
        self._dirty.discard([dirty.slot for dirty in self._dirty if tenant_of(dirty.key) in tenants])

    def distrust(self, bad: set[int]) -> None:
        """These blocks are wrong: neither they nor copies of them under way count."""
        self.forget(sorted(bad))
        for work in self._storing.values():
            work.failed |= {position for position, block in enumerate(work.blocks()) if block in bad}

    def busy(self) -> set[int]:
        """Identities of the terms of the requests that have something to copy, or a copy under way."""
        chains = [run.chain for work in self._storing.values() for run in work.runs]
        return {
            id(chain.terms) for chain in (*chains, *(dirty.chain for dirty in self._dirty)) if isinstance(chain, Chain)
        }

    def void(self) -> None:
        """Nothing that was filled until now counts, nor copies of it under way."""
        self._dirty, self._look_at = DirtyList(), -math.inf
        for work in self._storing.values():
            work.failed |= set(range(len(list(work.blocks()))))

    def clear(self) -> None:
        """Nothing that was filled until now is kept."""
        self._dirty, self._look_at = DirtyList(), -math.inf
        self._storing.clear()

    # ── choosing ────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, manager: Manager, idle: bool, busy: bool = False) -> list[StepMoves]:
        """This step's copies; all that is dirty where the engine is `idle`, and only what would be lost where it is
        `busy`: a request's first token would wait for the rest."""
        pool = self._pool
        if pool is None or self.stopped or not self._dirty:
            return []
        now = self._clock.monotonic()
        eager = idle or self._offload.mode == "eager" or not pool.caching
        by_age = self._offload.mode != "lazy" and now >= self._look_at
        near, aged = self._horizon_moved(pool), (eager or by_age) and not (busy and pool.caching)
        # With fewer free blocks than the horizon has, blocks in use come next: handed out as soon as they are free.
        pressed = pool.caching and pool.free() < self.limits.spill_ahead_blocks
        if pressed and now >= self._look_at - self._grain + _PRESSED_S:
            aged = eager = True
        if not near and not aged:
            return []
        limit = max(1, self._step_bytes(now) // manager.host.block_bytes)
        picked = self._dirty.pick(pool.head(self.limits.spill_ahead_blocks), limit, Mono("-inf")) if near else []
        if near and len(picked) < limit:  # else there is more of it
            self._walked_free, self._taken = pool.free(), 0
        if aged:
            most = min(limit - len(picked), self._pace(now, hurry=idle or pressed or not pool.caching))
            ripe = self._dirty.pick((), most, now if eager else now - self._offload.dirty_max_age)
            picked += ripe
            self._look_at = now + self._grain if len(ripe) < most else self._look_at
        held: list[list[Slot]] = []
        try:
            runs = [
                copies
                for run in runs_of(picked, attrgetter("chain", "depth"))
                if (copies := self._reserve(manager, run, held)) is not None
            ]
            if not runs:
                return []
            work = _Storing(manager, runs, now)
            slots = tuple(slot.number for run in runs for slot in run.slots)
            generations = tuple(generation for run in runs for generation in run.generations)
            moves = [StepMoves(self._job(), tuple(work.blocks()), slots, generations)]
        except BaseException:  # nobody will copy these blocks: they are lost, and their slots are given back
            self._counters["spill_lost"] += len(picked)
            for reserved in held:
                manager.abort(reserved, [slot.generation for slot in reserved])
            raise
        self._storing[moves[0].job] = work
        self._copied_at = now
        return moves

    def _pace(self, mono_s: Mono, *, hurry: bool) -> int:
        """Most blocks that this step chooses by their age. The rest waits: the free queue's head is chosen anyway, so
        none of it is lost for that. `hurry` where no request waits for the step, or where blocks are handed out as soon
        as they are free."""
        passed, self._paced_at = (mono_s - self._paced_at) * _PACE_BLOCKS_S, mono_s
        return _STEP_BLOCKS if hurry else int(min(_STEP_BLOCKS, max(_PACE_BLOCKS, passed)))

    def _step_bytes(self, mono_s: float) -> int:
        """Most bytes of a step's copies: what the link cannot have moved by the next one would only queue."""
        moved = (mono_s - self._copied_at) * self.limits.link_bytes_s
        return int(min(self.limits.step_bytes, max(_LEAST_BYTES, moved)))

    def _horizon_moved(self, pool: compat.EnginePool) -> bool:
        """Whether blocks may have come close to being handed out since the head of the free queue was last looked
        through: only once a quarter of what was covered then has been taken. Freed blocks join at the far end."""
        return pool.caching and 4 * self._taken >= min(self.limits.spill_ahead_blocks, self._walked_free)

    def _reserve(self, manager: Manager, run: list[Dirty], held: list[list[Slot]]) -> _Copies | None:
        """Slots for those of a run that still are what they were and that G2 lacks. They are added to `held` before
        anything else."""
        assert self._confirmer is not None
        blocks = [dirty.slot for dirty in run]
        tokens = [dirty.token for dirty in run]
        lasting = self._confirmer.lasting(blocks, tokens)
        living = lasting.index(False) if False in lasting else len(run)  # later blocks would lie behind a gap
        self._counters["spill_lost"] += len(run) - living
        if not living:
            return None
        chain, start = run[0].chain, run[0].depth
        assert isinstance(chain, Chain)
        slots, reached = manager.reserve(chain, start, start + living, chain.terms)
        held.append(slots)
        self._counters["stores_without_room"] += start + living - reached
        if not slots:
            return None
        places = [slot.index - start for slot in slots]
        generations = [slot.generation for slot in slots]
        return _Copies(chain, [blocks[i] for i in places], [tokens[i] for i in places], slots, generations)

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, job: int, ranks: int, failed: set[int]) -> None:
        """So many more ranks are done with a job, whose moves at these positions went wrong."""
        work = self._storing.get(job)
        if work is None:
            return
        work.ranks += ranks
        work.failed |= failed
        if work.ranks >= self.ranks:
            del self._storing[job]
            self._stored(work)

    def _stored(self, work: _Storing) -> None:
        position = 0
        for run in work.runs:
            failed = [at in work.failed for at in range(position, position + len(run.slots))]
            position += len(failed)
            if work.abandoned:
                for slot, generation in zip(run.slots, run.generations, strict=True):
                    work.manager.acknowledge(slot, generation)
            else:
                self._publish(work.manager, run, failed)

    def _publish(self, manager: Manager, run: _Copies, failed: list[bool]) -> None:
        assert self._confirmer is not None
        lasting = self._confirmer.lasting(run.blocks, run.tokens)
        if any(failed) or not all(lasting):
            self._counters["copies_failed"] += sum(failed)
            good = [lasts and not fails for lasts, fails in zip(lasting, failed, strict=True)]
            self._counters["spill_lost"] += len(good) - sum(good) - sum(failed)
            bad = run.take([not one for one in good])
            manager.abort(bad.slots, bad.generations)
            run = run.take(good)
        if run.slots:
            manager.commit(run.chain, run.slots, run.generations)
            self._counters["blocks_stored"] += len(run.slots)

    def abort_overdue(self, mono_s: Mono) -> None:
        """A step has run. Abort copies that a rank leaves unanswered: their slots go to quarantine, and nothing more is
        copied out."""
        oldest = next(iter(self._storing.values()), None)
        if oldest is None or oldest.abandoned:
            return
        if not self._patience.over(oldest, mono_s - oldest.since_s, self.limits.ack_timeout_s):
            return
        log.error("a rank has not answered a copy for %.0f s: nothing more is offloaded", self.limits.ack_timeout_s)
        self.stopped = True
        for work in self._storing.values():
            if not work.abandoned:
                work.abandoned = True
                for run in work.runs:
                    self._counters["copies_abandoned"] += len(run.slots)
                    work.manager.abort(run.slots, run.generations, in_flight=True)

    def check(self) -> None:
        """Assert the invariants of the dirty list."""
        self._dirty.check()
