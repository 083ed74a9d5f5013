"""The workers of a virtual engine: each a rank with the connector's real worker half over a virtual device.

A forward looks at all that attention would read, as it begins and as it ends, and leaves what it computes: bytes that
are a function of the prompt. All ranks have the same bytes, of which the first one's are stored.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

from kvtier.connectors.vllm.messages import ArenaHandle, StepMeta, WorkerMeta
from kvtier.connectors.vllm.tensors import CacheLayout
from kvtier.connectors.vllm.weights import WeightsWatch
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.kernels.copy import CopyEngine, CopyLimits
from kvtier.kernels.layout import Paged, Shape
from kvtier.sim.asked import SIZE, Asked
from kvtier.sim.device import LAYERS, Device, VirtualMover
from kvtier.sim.device_faults import DeviceFaults
from kvtier.sim.history import EngineShape
from kvtier.sim.ledger import Ledger, bytes_of, name_of
from kvtier.sim.prompts import NAMESPACE

_NAMES = tuple(f"layer{number}" for number in range(LAYERS))
_PIECE = NAMESPACE.block_bytes // LAYERS
_TOKEN = _PIECE // SIZE
_ANSWERED_MAX = 64


@dataclass(frozen=True)
class Forward:
    """What a step computes of one request: tokens begin … end-1, with this block table."""

    asked: Asked
    table: tuple[int, ...]
    begin: int
    end: int

    @property
    def written(self) -> tuple[int, ...]:
        """Blocks that it writes into."""
        return self.table[self.begin // SIZE : -(-self.end // SIZE)]


@dataclass
class Results:
    """Of a step, over all ranks: answers, requests whose blocks may go, whose loads are over, and blocks without
    content."""

    meta: WorkerMeta
    freed: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)


class Rank(WorkerHalf):
    """The real worker half, over a device; the arena may be out of reach for it."""

    def __init__(self, cache_layout: CacheLayout, device: Device, limits: CopyLimits) -> None:
        super().__init__(cache_layout, WeightsWatch(), (), partial(_open, device, limits))
        self.device = device
        self.register(dict(zip(_NAMES, device.pages(), strict=True)))

    def _attach(self, handle: ArenaHandle) -> None:
        if self.device.faults.kind == "unreached":
            raise OSError("simulated: the arena cannot be reached")
        super()._attach(handle)


class _Copies(CopyEngine):
    """The real copy engine. Whoever waits for copies has them made at once: no virtual time passes in a call."""

    def __init__(self, mover: VirtualMover, limits: CopyLimits) -> None:
        super().__init__(mover, limits)
        self._virtual = mover

    def wait(self, tickets: Iterable[int], timeout_s: float, *_: object, **__: object) -> bool:
        self._virtual.hurry()
        return super().wait(tickets, timeout_s, sleep=lambda _: self._virtual.hurry())


def _open(device: Device, limits: CopyLimits, pages: Paged, host: Paged, shape: Shape, **_: object) -> CopyEngine:
    return _Copies(VirtualMover(device, pages, host, shape), limits)


class Workers:
    """All ranks. `execute` launches a step on each, and is over when all have run it. They look for copies that have
    ended as they launch a step, as those must whose steps overlap, or when it has run (`polls_first`)."""

    def __init__(self, shape: EngineShape, faults: DeviceFaults, rng: random.Random, ledger: Ledger) -> None:
        loop, ranks = asyncio.get_running_loop(), shape.ranks
        limits = CopyLimits(chunk_bytes=shape.chunk_blocks * NAMESPACE.block_bytes)
        self._faults, self._rng, self._ledger = faults, rng, ledger
        self._pace = shape.pace
        self._polls_first = shape.polls_first or shape.ahead
        self.ranks = []
        for rank in range(ranks):
            layout = CacheLayout(_NAMES, (_PIECE,) * LAYERS, shape.blocks, "virtual", ranks, rank, replicated=ranks > 1)
            device = Device(shape.blocks, NAMESPACE.block_bytes, random.Random(rng.getrandbits(32)), faults, loop)
            self.ranks.append(Rank(layout, device, limits))
        for shake in (one.handshake() for one in self.ranks):
            assert not shake.refusal, shake.refusal
        self.checked = 0
        """Blocks that forwards have read."""
        self._received: Counter[str] = Counter()  # ranks that have a request's load
        self._done: Counter[int] = Counter()  # ranks that have answered a job
        self._answered: list[int] = []  # jobs that all have answered

    async def execute(self, meta: StepMeta, passes: Sequence[Forward]) -> Results:
        """Run a step on all ranks."""
        loop = asyncio.get_running_loop()
        over_s, results = loop.time(), list[Results]()
        for rank in self.ranks:
            ends_s, result = self._launch(rank, meta, passes)
            over_s = max(over_s, ends_s)
            results.append(result)
        await asyncio.sleep(over_s - loop.time() + 1e-9)  # behind the last forward's end
        for rank, result in zip(self.ranks, results, strict=True):
            if not self._polls_first:
                self._poll(rank, result)
        return self._joined(results)

    def _launch(self, rank: Rank, meta: StepMeta, passes: Sequence[Forward]) -> tuple[float, Results]:
        """As vLLM's model runner calls the connector around a forward. Returns when that is over."""
        device = rank.device
        rank.mark(bool(meta.loads or meta.stores))
        rank.start(meta.step, meta.epoch)
        if meta.arena is not None:
            rank.attach(meta.arena)
        rank.cancel(meta.cancelled)
        rank.load(meta.loads)
        # Blocks that loads within the step left without content: the engine computes these requests anew.
        spoilt = set(rank._bad_blocks)
        sound = [one for one in passes if spoilt.isdisjoint(one.table)]
        lost = [one for one in passes if not spoilt.isdisjoint(one.table)]
        seconds = 0.0
        if passes:
            tokens = sum(one.end - one.begin for one in passes)
            seconds = self._pace * (0.002 + 0.0002 * tokens) * self._rng.choice((1, 1, 1, 2))
        written = {block for one in passes for block in one.written}
        begins, ends = partial(self._look, device, sound, written), partial(self._compute, device, sound, lost)
        over_s = device.run(seconds, begins, ends)
        rank.store(meta.stores)
        result = Results(WorkerMeta(meta.step), list(meta.freed))
        if self._polls_first:
            self._poll(rank, result)
        return over_s, result

    @staticmethod
    def _poll(rank: Rank, result: Results) -> None:
        rank.poll()
        result.received = sorted(rank.received())
        result.bad = rank.bad_blocks()
        result.meta = rank.answer()

    def _joined(self, results: Sequence[Results]) -> Results:
        """As vLLM joins the answers of all ranks."""
        meta = reduce(lambda ours, other: ours.aggregate(other), [result.meta for result in results])
        self._received.update(name for result in results for name in result.received)
        received = sorted(name for name, count in self._received.items() if count == len(self.ranks))
        for name in received:
            del self._received[name]
        self._note(meta)
        return Results(meta, results[0].freed, received, set().union(*(result.bad for result in results)))

    def _note(self, meta: WorkerMeta) -> None:
        """Remember the jobs that all ranks have answered, and have some answered again."""
        again = self._faults.kind == "twice" and self._answered and self._rng.random() < self._faults.rate
        stale = self._rng.choice(self._answered) if again else 0
        self._done.update(meta.done)
        over = [job for job in meta.done if self._done[job] >= len(self.ranks)]
        for job in over:
            del self._done[job]
        self._answered = [*self._answered, *over][-_ANSWERED_MAX:]
        if stale:
            meta.done[stale] = len(self.ranks)
            meta.failed.setdefault(stale, set()).update({0} if self._rng.random() < 0.5 else ())

    # -- what a forward does ----------------------------------------------------------------------------------------

    def _look(self, device: Device, passes: Sequence[Forward], written: Collection[int] = ()) -> None:
        """What attention reads of each request, before the tokens that are computed; but for blocks that the same
        forward has `written` by its end, since each layer writes before it reads."""
        for one in passes:
            for depth in range(-(-one.begin // SIZE)):
                block, tokens = one.table[depth], min(SIZE, one.begin - depth * SIZE)
                if block in written:
                    continue
                key = one.asked.chain[depth]
                self.checked += 1
                if not block or device.part(block, tokens * _TOKEN) != _part(key, tokens):
                    where = f"block {depth} ({name_of(key)}, number {block}), before token {one.begin}"
                    self._ledger.broken(f"attention of {one.asked.request_id} reads other bytes: {where}")

    def _compute(self, device: Device, sound: Sequence[Forward], lost: Sequence[Forward]) -> None:
        for one in (*sound, *lost):
            for depth in range(one.begin // SIZE, -(-one.end // SIZE)):
                first, last = max(one.begin - depth * SIZE, 0), min(one.end - depth * SIZE, SIZE)
                content = bytes_of(one.asked.chain[depth], NAMESPACE.block_bytes) if one in sound else _NOTHING
                device.write(one.table[depth], first * _TOKEN, last * _TOKEN, content)
        self._look(device, sound)

    def block(self, number: int) -> list[bytes]:
        """A block as each rank has it."""
        return [rank.device.look(number) for rank in self.ranks]

    def busy(self) -> bool:
        """Whether some copy is under way."""
        return any(rank._jobs for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


_NOTHING = b"\xbb" * NAMESPACE.block_bytes


def _part(key: bytes, tokens: int) -> bytes:
    """Of a block's content what its first tokens have in each layer."""
    content = bytes_of(key, NAMESPACE.block_bytes)
    return b"".join(content[at : at + tokens * _TOKEN] for at in range(0, LAYERS * _PIECE, _PIECE))
