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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.connectors.vllm.messages import ArenaHandle, Handshake, Load, StepMoves, WorkerMeta
from kvtier.connectors.vllm.weights import AdapterClaims, WeightsWatch
from kvtier.errors import IdentityError, KVTierError
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


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The engine's description of its cache: layers in their order, and bytes per block of each."""

    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]
    blocks: int
    layout: str  # the engine's own name of the byte order
    ranks: int
    rank: int
    replicated: bool  # every rank holds the same bytes: one piece, written by rank 0
    overlays: tuple[tuple[str, ...], ...] = ()  # layers of other groups, which lie in the same pages
    groups: str = ""  # name of the set of groups; "" for one


def cpus_by_piece(cache_layout: CacheLayout, cpus: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """CPUs whose NUMA nodes get each piece's memory, from those beside each rank's GPU: a piece that all ranks read is
    spread over the nodes of all."""
    return [frozenset[int]().union(*cpus)] if cache_layout.replicated else list(cpus)


def store_bounds(cache_layout: CacheLayout, step_blocks: int, on_gpu: bool) -> tuple[int, float]:
    """(bytes that a step may copy out, bytes per second that the links take), over all ranks.

    On a GPU twice what a step can fill, so that prefill on a pool that has come round loses nothing, at a rate that
    leaves a link some room. On a CPU the model's own thread makes the copies: little per step.
    """
    if not on_gpu:
        return 64 << 20, math.inf
    ranks = 1 if cache_layout.replicated else cache_layout.ranks
    return max(64 << 20, 2 * step_blocks * sum(cache_layout.page_bytes) * ranks), ranks * _LINK_BYTES_S


@dataclass(frozen=True, slots=True)
class Described:
    """KV tensors as the copy engine sees them: whole pages, one after another in layer order."""

    memory: layout.Paged
    shape: layout.Shape
    identity: str
    dtype: str
    absent: tuple[tuple[tuple[int, int], ...], ...] = ()  # see `absent_pages`


def describe(cache_layout: CacheLayout, tensors: Mapping[str, Any]) -> Described:
    """Find every layer's page by storage offset and stride. Touches no byte. Raises IdentityError for tensors
    whose layout is not certain."""
    missing = [name for name in cache_layout.layers if name not in tensors]
    if missing:
        raise IdentityError(f"layer {missing[0]} has no KV tensor of its own; such models are not served")
    unit = math.gcd(*cache_layout.page_bytes)
    bases: list[int] = []
    inner: list[str] = []
    strides: set[int] = set()
    regions: dict[int, layout.Region] = {}
    for name, page in zip(cache_layout.layers, cache_layout.page_bytes, strict=True):
        tensor = tensors[name]
        if isinstance(tensor, (list, tuple)):
            raise IdentityError(f"layer {name} keeps its state in {len(tensor)} tensors; such models are not served")
        size, split = tensor.element_size(), tensor.shape[0] // cache_layout.blocks
        if split < 1 or tensor.shape[0] % cache_layout.blocks:
            raise IdentityError(
                f"layer {name}: {tensor.shape[0]} rows do not divide among {cache_layout.blocks} blocks"
            )
        extents, steps = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
        run = 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True))
        if run != math.prod(extents) or tensor.stride(0) * split * size < page or run * split * size > page:
            raise IdentityError(
                f"layer {name}: a block is no single run of bytes in layout {cache_layout.layout} (shape "
                f"{tuple(tensor.shape)}, strides {tuple(tensor.stride())}); choose a layout with heads inside the "
                "block, such as VLLM_KV_CACHE_LAYOUT=NHD"
            )
        strides.add(tensor.stride(0) * split * size)
        bases += range(tensor.data_ptr(), tensor.data_ptr() + page, unit)
        inner.append(f"{'x'.join(map(str, extents))}/{'x'.join(map(str, steps))}/{split}@{page}")
        storage = tensor.untyped_storage()
        regions[storage.data_ptr()] = layout.Region(storage.data_ptr(), storage.nbytes())
    absent = absent_pages(cache_layout, tensors)
    if len(strides) != 1:
        raise IdentityError(f"layers lie {sorted(strides)} bytes apart per block; equal strides are needed")
    shape = layout.Shape.opaque(unit, len(bases))
    memory = layout.Paged(
        bases=np.array(bases, dtype=np.uint64)[:, None],
        count=cache_layout.blocks,
        stride=strides.pop(),
        token=0,
        head=0,
        regions=tuple(sorted(regions.values(), key=lambda region: region.start)),
        owners=tuple(tensors[name] for name in cache_layout.layers),
    ).validate(shape)
    first = tensors[cache_layout.layers[0]]
    kinds = sorted(set(inner))
    identity = f"{len(cache_layout.layers)}*{kinds[0]}" if len(kinds) == 1 else "+".join(inner)
    return Described(memory, shape, identity, str(first.dtype).removeprefix("torch."), absent)


def absent_pages(cache_layout: CacheLayout, tensors: Mapping[str, Any]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of each overlay the pages of a block that none of its layers has: offset in the block, and bytes. Raises
    IdentityError where a layer lies in none of the pages that are copied."""

    def place(name: str) -> tuple[int, int]:
        tensor = tensors.get(name)
        if tensor is None or isinstance(tensor, (list, tuple)):
            raise IdentityError(f"layer {name} has no KV tensor of its own; such models are not served")
        return tensor.data_ptr(), tensor.untyped_storage().data_ptr()

    pages = {place(name): number for number, name in enumerate(cache_layout.layers)}
    out = []
    for layers in cache_layout.overlays:
        places = {place(name) for name in layers}
        if not places <= pages.keys():
            raise IdentityError(
                f"layer {layers[0]} and its group lie in other memory than {cache_layout.layers[0]} and its group; "
                "groups of KV cache that share their pages are needed"
            )
        absent = sorted(number for where, number in pages.items() if where not in places)
        sizes = cache_layout.page_bytes
        out.append(tuple((sum(sizes[:number]), sizes[number]) for number in absent))
    return tuple(out)


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


def _on_gpu(found: Described) -> bool:
    tensor: Any = found.memory.owners[0]
    return bool(tensor.is_cuda)


class WorkerHalf:
    """See the module. Used from the worker's one model thread; no call waits for a copy, but on a CPU `poll` makes
    them."""

    def __init__(
        self, cache_layout: CacheLayout, watch: WeightsWatch | None = None, unwatched: Sequence[str] = ()
    ) -> None:
        """`watch` follows the weights of this rank, but for the changes that are `unwatched`."""
        self._cache_layout = cache_layout
        self._watch = watch or WeightsWatch()
        self._unwatched = tuple(unwatched)
        self._told: dict[int, str] = {}  # adapters that the scheduler knows of
        self._claims = AdapterClaims(self._watch)
        self._piece = 0 if cache_layout.replicated else cache_layout.rank
        self._writes = not cache_layout.replicated or cache_layout.rank == 0
        self._described: Described | None = None
        self._refusal = "no KV tensors were registered"
        self._arena: mmap.mmap | None = None
        self._slot_bytes = 0
        self._reached = self._unreached = 0  # numbers of the arena in use, and of one that could not be attached
        self._engine: copy.CopyEngine | Pump | None = None
        self._open: Callable[[], copy.CopyEngine | Pump] | None = None  # makes it anew over the same memory
        self._mark: copy.Event | None = None  # before this step's forward
        # ticket → epoch, job number, moves, request ("" for a store)
        self._jobs: dict[int, tuple[int, int, StepMoves, str]] = {}
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
            found.identity, found.dtype, size, where, os.getpid(), cpus, "", watch.epoch, watch.weights, self._unwatched
        )

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
        if not _on_gpu(self._described):  # there, page-locking does it
            fill_page_table(arena)
        slots = memoryview(arena)[: handle.slots * handle.slot_bytes]
        host = layout.of_slots(slots, handle.slot_bytes, self._described.shape)
        found, calibration = self._described, Path(handle.calibration) if handle.calibration else None
        begin = partial(
            engine.open_engine, found.memory, host, found.shape, method=handle.copy_by, calibration=calibration
        )
        self._open = partial(Pump, partial(begin, limits=LIMITS)) if _on_gpu(found) else begin
        self._engine, self._arena, self._slot_bytes = self._open(), arena, handle.slot_bytes

    def suspend(self) -> None:
        """The engine is about to free the tensors' memory (sleep). Copies under way are cancelled and answered; later
        ones fail, until `resume`. Waits for those that the device has begun."""
        ended, self._engine, self._mark = self._engine, None, None
        if ended is not None:
            clean = False
            try:
                clean = ended.close(_CLOSE_S)
            finally:
                if not clean:
                    _UNENDED.append((ended, self._arena, self._described))
                    log.error("copies did not end within %.0f s; their memory stays mapped", _CLOSE_S)
            for ack in ended.poll():
                self._take(ack)

    def resume(self) -> None:
        """The tensors have memory again, at the addresses where they had it."""
        if self._engine is None and self._open is not None:
            self._engine = self._open()

    def _detach(self) -> None:
        self._reached = 0
        try:
            self.suspend()
        finally:
            self._arena = self._open = None
            waiting, self._blanking, self._blanked = self._blanking, deque(), 0
            for moves in waiting:
                self._finish(moves, "", set(range(len(moves.blocks))))

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
        """Fill blocks, behind the step's mark."""
        for job in loads:
            if job.adapter is None or self._claims.right(*job.adapter, job.moves.blocks):
                self._submit(job.moves, job.request)
            else:
                log.warning("job %d is refused: adapter %d has other weights", job.moves.job, job.adapter[0])
                self._finish(job.moves, job.request, set(range(len(job.moves.blocks))))

    def store(self, stores: Sequence[StepMoves]) -> None:
        """Copy blocks out, behind the step's mark."""
        for moves in stores:
            if self._writes:
                self._submit(moves, "")
            else:
                self._done[moves.job] = self._done.get(moves.job, 0) + 1

    def _submit(self, moves: StepMoves, request: str) -> None:
        try:
            if self._epoch != self._watch.epoch:
                raise KVTierError("the weights have changed")
            if self._engine is None or not self._engine.ready:
                raise KVTierError("no arena is attached")
            if len(moves.slots) != len(moves.blocks):
                raise KVTierError("it names no slots")
            columns = (moves.blocks, moves.slots, moves.generations)
            batch = copy.Moves(*(np.array(column, dtype=np.int64) for column in columns))
            give = self._engine.load if request else self._engine.store
            ticket = give(batch, after=self._mark)
            self._jobs[ticket] = (self._epoch, moves.job, moves, request)
        except (KVTierError, OSError) as error:
            log.warning("job %d is refused: %s", moves.job, error)
            self._finish(moves, request, set(range(len(moves.blocks))))
        except Exception:  # a request waits for its load: it must be answered
            log.exception("job %d is refused", moves.job)
            self._finish(moves, request, set(range(len(moves.blocks))))

    def cancel(self, jobs: Collection[int]) -> None:
        """Give these jobs up. Each is answered once nothing touches its memory any more; one that has been answered is
        left alone."""
        if self._engine is not None:
            for ticket, (_, number, _, _) in self._jobs.items():
                if number in jobs:
                    self._engine.cancel(ticket)

    def poll(self) -> None:
        """Advance copies, and collect those that have ended."""
        if self._engine is not None:
            for ack in self._engine.poll():
                self._take(ack)
        self._blank()

    def _take(self, ack: copy.Ack) -> None:
        epoch, number, moves, request = self._jobs[ack.ticket]
        if ack.outcome is not copy.Outcome.DONE or epoch != self._watch.epoch:
            lost = set(ack.moves.triples())
            triples = zip(moves.blocks, moves.slots, moves.generations, strict=True)
            self._failed.setdefault(number, set()).update(i for i, triple in enumerate(triples) if triple in lost)
        if ack.last:
            del self._jobs[ack.ticket]
            if moves.groups and not request and self._described is not None and any(self._described.absent):
                self._blanking.append(moves)
            else:
                self._finish(moves, request, set())

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
                self._finish(moves, "", set())

    def _finish(self, moves: StepMoves, request: str, failed: set[int]) -> None:
        failed |= self._failed.get(moves.job, set())
        if failed:
            self._failed[moves.job] = failed
        self._done[moves.job] = self._done.get(moves.job, 0) + 1
        if request:
            self._received.add(request)
            self._bad_blocks.update(moves.blocks[position] for position in failed)
            if failed:
                self._unloaded.add(request)

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
