"""The half of the vLLM connector that runs in every worker: copies between its KV tensors and its rank's arena.

It decides nothing. A job names blocks, slots and generations; the copy engine of `kvtier.kernels` makes the copies
behind the forwards that were launched before the step, and its acknowledgements go back to the scheduler with the step.
On a GPU the engine has a thread of its own (`kvtier.kernels.pump`), which opens it, too: until it is open the rank
answers that it cannot reach the arena, and nothing is offered.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtier.connectors.vllm.messages import ArenaHandle, Handshake, Load, StepMoves, WorkerMeta
from kvtier.connectors.vllm.tensors import CacheLayout, Described, describe
from kvtier.connectors.vllm.weights import AdapterClaims, WeightsWatch
from kvtier.errors import KVTierError
from kvtier.kernels import copy, engine, layout
from kvtier.kernels.memory import populate
from kvtier.kernels.pump import LIMITS, Pump

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
_LINK_BYTES_S = 40e9  # of a rank's stores: three quarters of what PCIe Gen5 x16 is published to move
_BLANKED_BYTES = 8 << 20
"""Bytes of slots that one step blanks: about a millisecond of the model's thread."""

_UNENDED: list[object] = []
"""Engines whose copies did not end when they were closed, and the memory that these copies use: for good, since only
the end of the process proves that nothing writes there any more."""
_IN_STEP_S = 5.0
"""A forward waits for its loads at most so long; a device that takes longer does not work any more."""


def cpus_by_piece(cache_layout: CacheLayout, cpus: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """CPUs whose NUMA nodes get each piece's memory, from those beside each rank's GPU: a piece that several ranks read
    is spread over the nodes of all of them."""
    near = [frozenset[int]()] * cache_layout.pieces
    for rank, beside in enumerate(cpus):
        near[cache_layout.piece_of(rank)] |= beside
    return near


def store_bounds(cache_layout: CacheLayout, step_blocks: int, on_gpu: bool) -> tuple[int, float]:
    """(bytes that a step may copy out, bytes per second that the links take), over all ranks.

    On a GPU twice what a step can fill, so that prefill on a pool that has come round loses nothing, at a rate that
    leaves a link some room. On a CPU the model's own thread makes the copies: little per step.
    """
    if not on_gpu:
        return 64 << 20, math.inf
    pieces = cache_layout.pieces
    return max(64 << 20, 2 * step_blocks * sum(cache_layout.page_bytes) * pieces), pieces * _LINK_BYTES_S


def host_identity() -> str:
    """Machine, boot and PID namespace: equal for processes that can reach each other's /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"


def map_arena(handle: ArenaHandle, rank: int) -> mmap.mmap:
    """This rank's memory of the scheduler's arena. Raises OSError when it cannot be reached."""
    number, inode = handle.files[rank]
    fd = os.open(f"/proc/{handle.pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        if stat.st_ino != inode or stat.st_size < handle.slots * handle.slot_bytes:
            raise OSError(f"descriptor {number} of process {handle.pid} is not the arena any more")
        return mmap.mmap(fd, stat.st_size, flags=mmap.MAP_SHARED)  # whole: huge pages end on a border of theirs
    finally:
        os.close(fd)


def fill_page_table(arena: mmap.mmap) -> threading.Thread:
    """Map every page into this process's page table, so that copies need not fault them one by one. Returns the thread
    that does it: a step must not wait (a fifth of a second per GiB)."""

    def fill() -> None:
        with contextlib.suppress(OSError):  # a kernel before 5.14: the copies pay
            populate(memoryview(arena), threads=1)

    thread = threading.Thread(target=fill, name="kvtier-map", daemon=True)
    thread.start()
    return thread


class _Job(NamedTuple):
    """Moves under way: a request's load (`in_step`: its forward waits for it), or a store."""

    moves: StepMoves
    request: str = ""
    in_step: bool = False
    epoch: int = 0


class WorkerHalf:
    """See the module. Used from the worker's one model thread; no call waits for a copy, but on a CPU `poll` makes
    them."""

    def __init__(
        self,
        cache_layout: CacheLayout,
        watch: WeightsWatch | None = None,
        unwatched: Sequence[str] = (),
        opener: Callable[..., copy.CopyEngine] | None = None,
    ) -> None:
        """`watch` follows the weights of this rank, but for the changes that are `unwatched`. `opener` opens the copy
        engine in place of `kvtier.kernels.engine.open_engine`."""
        self._opener = opener
        self._cache_layout = cache_layout
        self._watch = watch or WeightsWatch()
        self._unwatched = tuple(unwatched)
        self._told: dict[int, str] = {}  # adapters that the scheduler knows of
        self._claims = AdapterClaims(self._watch)
        self._piece = cache_layout.piece_of(cache_layout.rank)
        self._writes = cache_layout.writes(cache_layout.rank)
        self._described: Described | None = None
        self._refusal = "no KV tensors were registered"
        self._arena: mmap.mmap | None = None
        self._slot_bytes = 0
        self._reached = self._unreached = 0  # numbers of the arena in use, and of one that could not be attached
        self._engine: copy.CopyEngine | Pump | None = None
        self._open: Callable[[], copy.CopyEngine | Pump] | None = None  # makes it anew over the same memory
        self._mark: copy.Event | None = None  # before this step's forward
        self._jobs: dict[int, _Job] = {}  # by ticket
        self._done: dict[int, int] = {}
        self._failed: dict[int, set[int]] = {}
        self._received: set[str] = set()
        self._unloaded: set[str] = set()
        self._blanking: deque[StepMoves] = deque()  # stores that are copied but for their absent pages
        self._blanked = 0  # moves of the first of these
        self._bad_blocks: set[int] = set()
        self._step = -1
        self._epoch = self._watch.epoch  # of this step's loads and stores

    def register(self, tensors: Mapping[str, Any]) -> None:
        """The engine's KV tensors; held until `close`."""
        try:
            self._described, self._refusal = describe(self._cache_layout, tensors), ""
        except KVTierError as error:
            self._described, self._refusal = None, str(error)

    def handshake(self) -> Handshake:
        found = self._described
        if found is None:
            return Handshake("", "", 0, host_identity(), os.getpid(), refusal=self._refusal)
        size, where = found.shape.block_bytes, host_identity()
        tensor: Any = found.memory.owners[0]
        cpus, watch = engine.cpus_near(tensor.device), self._watch
        return Handshake(
            found.identity, found.dtype, size, where, os.getpid(), cpus, "", watch.epoch, watch.weights,
            self._unwatched, self._cache_layout.layers, self._cache_layout.groups, self._cache_layout.replicated,
        )  # fmt: skip

    def attach(self, handle: ArenaHandle) -> None:
        """Use this arena from now on. Copies under way into an earlier one are cancelled and answered. Where it cannot
        be reached, the error is logged, every answer says so until it is, and every job fails."""
        failed = isinstance(self._engine, Pump) and bool(self._engine.failure)
        if handle.number == self._reached and not failed:
            return  # another rank could not reach it, or the engine is being opened
        self._unreached = handle.number
        try:
            self._detach()
            self._attach(handle)
            self._reached, self._unreached = handle.number, 0
        except Exception:
            log.exception("the arena cannot be reached: this rank neither loads nor stores")

    def _attach(self, handle: ArenaHandle) -> None:
        assert self._described is not None
        arena = map_arena(handle, self._piece)
        if not self._described.on_gpu:  # there, page-locking does it
            fill_page_table(arena)
        slots = memoryview(arena)[: handle.slots * handle.slot_bytes]
        host = layout.of_slots(slots, handle.slot_bytes, self._described.shape)
        found, calibration = self._described, Path(handle.calibration) if handle.calibration else None
        opener = self._opener or engine.open_engine
        begin = partial(opener, found.memory, host, found.shape, method=handle.copy_by, calibration=calibration)
        self._open = partial(Pump, partial(begin, limits=LIMITS)) if found.on_gpu else begin
        self._engine, self._arena, self._slot_bytes = self._open(), arena, handle.slot_bytes

    def suspend(self) -> bool:
        """The engine is about to free the tensors' memory (sleep). Copies under way are cancelled and answered; later
        ones fail, until `resume`. Waits for those that the device has begun. False: some have not ended, and may write
        yet; their memory stays mapped."""
        ended, self._engine, self._mark = self._engine, None, None
        if ended is None:
            return True
        clean = False
        try:
            clean = ended.close(_CLOSE_S)
        finally:
            if not clean:
                _UNENDED.append((ended, self._arena, self._described))
                log.error("copies did not end within %.0f s; their memory stays mapped", _CLOSE_S)
        for ack in ended.poll():
            self._take(ack)
        return clean

    def resume(self) -> None:
        """The tensors have memory again, at the addresses where they had it."""
        if self._engine is None and self._open is not None:
            self._engine = self._open()

    def _detach(self) -> bool:
        """As `suspend`; there is no arena any more."""
        self._reached = 0
        try:
            return self.suspend()
        finally:
            self._arena = self._open = None
            waiting, self._blanking, self._blanked = self._blanking, deque(), 0
            for moves in waiting:
                self._refuse(_Job(moves))

    def start(self, step: int, epoch: int = 0) -> None:
        """A step begins; its number goes back with its answers. Its loads and stores are of weights epoch `epoch`."""
        self._step, self._epoch = step, epoch

    def mark(self, copies: bool = True) -> None:
        """A step's forward is about to be launched. Its `copies` need not wait for it: what they read was complete, and
        what they write was free, before. Without a mark they start behind all that was launched when they come."""
        self._mark = None  # an earlier step's would be too early
        if copies and self._engine is not None:
            self._mark = self._engine.mark()

    def load(self, loads: Sequence[Load]) -> None:
        """Fill blocks, behind the step's mark; those of loads in step at once."""
        awaited: list[int] = []
        for load in loads:
            job = _Job(load.moves, load.request, load.in_step, self._epoch)
            if load.adapter is None or self._claims.right(*load.adapter, load.moves.blocks):
                ticket = self._submit(job)
                awaited += [ticket] if job.in_step and ticket is not None else []
            else:
                log.warning("job %d is refused: adapter %d has other weights", load.moves.job, load.adapter[0])
                self._refuse(job)
        if awaited and isinstance(self._engine, copy.CopyEngine):
            self._await(self._engine, awaited)

    def _await(self, copies: copy.CopyEngine, tickets: Sequence[int]) -> None:
        """Until these loads are over: the forward reads what they bring. Where they do not end all copying does. Raises
        KVTierError, which ends the engine, where the device has begun one and does not end it: the engine hands the
        block out again, and the copy may write into it still."""
        try:
            over = copies.wait(tickets, _IN_STEP_S)
            for ack in copies.poll():
                self._take(ack)
        except Exception:
            log.exception("loads in step went wrong")
            over = False
        if not over:
            log.error("loads in step did not end within %.0f s: this rank neither loads nor stores", _IN_STEP_S)
            self._unreached, clean = self._reached, self._detach()
            if not clean:
                raise KVTierError("a copy into the engine's cache was begun and does not end; restart the engine")
        for ticket in tickets:
            if (job := self._jobs.pop(ticket, None)) is not None:
                self._refuse(job)

    def store(self, stores: Sequence[StepMoves]) -> None:
        """Copy blocks out, behind the step's mark."""
        for moves in stores:
            if self._writes:
                self._submit(_Job(moves, epoch=self._epoch))
            else:
                self._done[moves.job] = self._done.get(moves.job, 0) + 1

    def _submit(self, job: _Job) -> int | None:
        """The ticket of the copies; None where they are refused, which is answered then."""
        moves = job.moves
        try:
            if self._epoch != self._watch.epoch:
                raise KVTierError("the weights have changed")
            if self._engine is None or not self._engine.ready:
                raise KVTierError("no arena is attached")
            if len(moves.slots) != len(moves.blocks):
                raise KVTierError("it names no slots")
            columns = (moves.blocks, moves.slots, moves.generations)
            ticket = self._give(job, copy.Moves(*(np.array(column, dtype=np.int64) for column in columns)))
        except (KVTierError, OSError) as error:
            log.warning("job %d is refused: %s", moves.job, error)
            self._refuse(job)
            return None
        except Exception:  # a request waits for its load: it must be answered
            log.exception("job %d is refused", moves.job)
            self._refuse(job)
            return None
        self._jobs[ticket] = job
        return ticket

    def _give(self, job: _Job, batch: copy.Moves) -> int:
        assert self._engine is not None
        if not job.request:
            return self._engine.store(batch, after=self._mark)
        if not job.in_step:
            return self._engine.load(batch, after=self._mark)
        if isinstance(self._engine, Pump):
            raise KVTierError("a forward does not wait for the copies of another thread")
        return self._engine.load(batch, expedited=True)

    def cancel(self, jobs: Collection[int]) -> None:
        """Give these jobs up. Each is answered once nothing touches its memory any more; one that has been answered is
        left alone."""
        if self._engine is not None:
            for ticket, job in self._jobs.items():
                if job.moves.job in jobs:
                    self._engine.cancel(ticket)

    def poll(self) -> None:
        """Advance copies, and collect those that have ended."""
        if self._engine is not None:
            for ack in self._engine.poll():
                self._take(ack)
        self._blank()

    def _take(self, ack: copy.Ack) -> None:
        job = self._jobs[ack.ticket]
        moves = job.moves
        if ack.outcome is not copy.Outcome.DONE or job.epoch != self._watch.epoch:
            lost = set(ack.moves.triples())
            triples = zip(moves.blocks, moves.slots, moves.generations, strict=True)
            self._failed.setdefault(moves.job, set()).update(i for i, triple in enumerate(triples) if triple in lost)
        if ack.last:
            del self._jobs[ack.ticket]
            if moves.groups and not job.request and self._described is not None and any(self._described.absent):
                self._blanking.append(moves)
            else:
                self._finish(job)

    def _blank(self) -> None:
        """Clear the pages that a block's group has no layer for: in the engine's memory they hold what another request
        left there. At most _BLANKED_BYTES and one block."""
        left = _BLANKED_BYTES
        while self._blanking and self._arena is not None and self._described is not None and left > 0:
            moves, arena = self._blanking[0], self._arena
            while self._blanked < len(moves.slots) and left > 0:
                first = moves.slots[self._blanked] * self._slot_bytes
                for offset, count in self._described.absent[moves.groups[self._blanked]]:
                    np.frombuffer(arena, np.uint8, count, first + offset).fill(0)
                    left -= count
                self._blanked += 1
            if self._blanked == len(moves.slots):
                self._blanking.popleft()
                self._blanked = 0
                self._finish(_Job(moves))

    def _refuse(self, job: _Job) -> None:
        """All of the job went wrong."""
        self._failed[job.moves.job] = set(range(len(job.moves.blocks)))
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        moves, failed = job.moves, self._failed.get(job.moves.job, set())
        self._done[moves.job] = self._done.get(moves.job, 0) + 1
        if not job.request:
            return
        if not job.in_step:  # else the request does not wait
            self._received.add(job.request)
        self._bad_blocks.update(moves.blocks[position] for position in failed)
        if failed:
            self._unloaded.add(job.request)

    def received(self) -> set[str]:
        """Requests whose loads have ended on this rank since the last call."""
        received, self._received = self._received, set()
        return received

    def unloaded(self) -> set[str]:
        """Requests some of whose loads went wrong on this rank, since the last call."""
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def bad_blocks(self) -> set[int]:
        """Blocks that loads left without content, or with that of other weights, since the last call."""
        bad, self._bad_blocks = self._bad_blocks | self._claims.settle(), set()
        return bad

    def answer(self) -> WorkerMeta:
        """The step's number and the jobs that have ended since the last call."""
        done, failed = self._done, {job: self._failed[job] for job in self._done if job in self._failed}
        for job in failed:
            del self._failed[job]
        self._done = {}
        adapters = dict(self._watch.adapters)
        news, self._told = (adapters if adapters != self._told else {}), adapters
        unreached = self._unreached or (self._reached if not self._usable() else 0)
        return WorkerMeta(self._step, done, failed, unreached, self._watch.epoch, self._watch.weights, news)

    def _usable(self) -> bool:
        """Whether copies are made here, but for an engine that sleeps: the scheduler offers nothing to that anyway."""
        return self._engine is None or self._engine.ready

    def close(self) -> None:
        self._detach()
