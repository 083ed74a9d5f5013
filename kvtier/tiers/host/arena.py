"""Memory of G2: one memfd per rank, populated before use, cut into equal slots.

A memfd has no /dev/shm limit, travels between processes as a file descriptor and is freed by the kernel with
its last holder. Where enough huge pages are reserved it lies in them: they are populated and page-locked faster.
Every page is faulted in at start (MADV_POPULATE_WRITE), since a page that is missing at first touch is a SIGBUS that
no handler survives.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from kvtier.errors import ClosedError, ConfigError
from kvtier.kernels.memory import HugePages, Reporter, huge_pages, populate

log = logging.getLogger(__name__)

SLOT_ALIGN = 4096
"""O_DIRECT wants page-aligned memory, and so does a DMA engine."""

_HEADROOM_FRACTION = 0.05

_EXTENT_BYTES_MAX = 64 << 20
"""Memory is taken back in steps of so much: where it runs out, less than one is lost."""


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still allocate: the lesser of MemAvailable and its cgroup's rest, less headroom. The
    cgroup's cache of files that were not read lately counts as free: the kernel drops it first."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    free = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2 here: MemAvailable alone decides
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text(encoding="ascii"))
            free = min(free, int(limit) - used + _idle_cache_bytes(cgroup))
    return max(0, int(free * (1 - _HEADROOM_FRACTION)))


def _idle_cache_bytes(cgroup: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return 0


class Arena:
    """`slots` slots of `piece_bytes` for each of `ranks` ranks; slot i is piece i of every rank's memory.

    Owns its memfds and mappings. A slot's views stay valid until `close`; after it they must not be used.
    """

    def __init__(self, block_bytes: int, ranks: int, capacity_bytes: int, near: Sequence[Collection[int]] = ()) -> None:
        """Computes sizes only; `open` allocates. `near`: per rank, the CPUs beside its GPU, whose NUMA node gets its
        memory; without, the kernel chooses. Raises ConfigError when not one block fits, or not every rank is named.
        """
        if near and len(near) != ranks:
            raise ConfigError(f"arena: CPUs near {len(near)} ranks were given, there are {ranks}")
        self.ranks = ranks
        self._near = near
        self.piece_bytes = block_bytes // ranks
        self.slot_bytes = -(-self.piece_bytes // SLOT_ALIGN) * SLOT_ALIGN
        self.slots = self.slots_in(capacity_bytes)
        self._changing = threading.Lock()  # an extent of memory, or what has the memory
        self._fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._returns = True  # whether memory may be given back

    @property
    def capacity_bytes(self) -> int:
        """Bytes allocated when open, alignment included."""
        return self.slots * self.slot_bytes * self.ranks

    def open(self, free: Callable[[], int] = available_bytes, reserved: Callable[[], HugePages] = huge_pages) -> None:
        """Allocate and populate. May take seconds per 10 GiB.

        Where memory is short the arena becomes smaller, with a warning. Raises ConfigError if then not one
        block fits. Huge pages are used where those that are free hold all of it.
        """
        huge = reserved()
        if huge.pages(self.slots * self.slot_bytes) * self.ranks <= huge.free:
            self._returns = False
            try:
                for rank in range(self.ranks):
                    self._open_huge(self._near[rank] if self._near else (), huge)
                return
            except OSError as error:
                log.warning("g2: no huge pages after all, ordinary ones serve: %s", error)
                self._returns = True
                self.close()
        fitting = min(self.slots, free() // (self.slot_bytes * self.ranks))
        if fitting < self.slots:
            self._shrink(fitting)
        for rank in range(self.ranks):
            self._open_rank(self._near[rank] if self._near else ())

    def _shrink(self, slots: int) -> None:
        if slots < 1:
            raise ConfigError(
                f"tiers.g2.capacity: {self.capacity_bytes} bytes asked for, but memory is short of even one block"
            )
        log.warning(
            "tiers.g2.capacity: %d bytes asked for, memory has space for %d; G2 is that much smaller",
            self.capacity_bytes, slots * self.slot_bytes * self.ranks,
        )  # fmt: skip
        self.slots = slots

    def _open_huge(self, cpus: Collection[int], huge: HugePages) -> None:
        """Raises OSError where the kernel gives less than was free: other processes, or a limit of the group."""
        length = self.slots * self.slot_bytes
        whole = huge.pages(length) * huge.page_bytes  # a mapping of less could not be given back
        fd = os.memfd_create("kvtier-g2", os.MFD_CLOEXEC | os.MFD_HUGETLB)
        self._fds.append(fd)
        os.ftruncate(fd, whole)
        mapping = mmap.mmap(fd, whole, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._maps.append(mapping)
        self._views.append(memoryview(mapping)[:length])
        given = populate(memoryview(mapping), cpus, progress=Reporter())
        if given < whole:
            raise OSError(errno.ENOMEM, f"the kernel gave {given} of {whole} bytes")

    def _open_rank(self, cpus: Collection[int]) -> None:
        length = self.slots * self.slot_bytes
        fd = os.memfd_create("kvtier-g2", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.ftruncate(fd, length)
        mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._maps.append(mapping)
        self._views.append(memoryview(mapping))
        with contextlib.suppress(OSError):  # worth having where the system's shmem_enabled allows it
            mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            given = populate(self._views[-1], cpus, progress=Reporter())
        except OSError:  # a kernel before 5.14: reserve the pages, which faults none
            os.posix_fallocate(fd, 0, length)
            return
        if given < length:
            raise ConfigError(f"tiers.g2.capacity: the kernel gave {given} of {length} bytes; ask for less")

    def slots_in(self, capacity_bytes: int) -> int:
        """How many slots so many bytes hold. Raises ConfigError for none. Pure."""
        slots = capacity_bytes // (self.slot_bytes * self.ranks)
        if slots < 1:
            raise ConfigError(
                f"tiers.g2.capacity: {capacity_bytes} bytes hold not one block of {self.piece_bytes * self.ranks} "
                f"bytes ({self.slot_bytes * self.ranks} with alignment); give at least that"
            )
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        """Return the memory of slots that nobody uses to the system, where nobody may have it page-locked (`views`,
        `fds`): what a GPU copies to would not be what is mapped here. Huge pages stay, too. Blocks. Raises OSError."""
        for start, end in self._extents(slots):
            with self._changing:
                for mapping in self._maps if self._returns else ():
                    mapping.madvise(mmap.MADV_REMOVE, start, end - start)

    def take_back(self, slots: Sequence[int]) -> int:
        """Have memory behind slots that may have been given back. Returns for how many leading ones there is: it may be
        short, and is not asked for where the kernel would have to end a process for it. Blocks, for a second per 4 GiB
        or so."""
        taken = 0
        for start, end in self._extents(slots):
            if self._returns and available_bytes() < (end - start) * self.ranks:
                return taken
            try:
                with self._changing:
                    for fd in self._fds:
                        os.posix_fallocate(fd, start, end - start)
            except OSError:
                return taken
            taken += (end - start) // self.slot_bytes
        return len(slots)

    def _extents(self, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where these slots lie in each rank's memory, neighbours in one."""
        start = end = 0
        for slot in slots:
            offset = slot * self.slot_bytes
            if offset != end or end - start >= _EXTENT_BYTES_MAX:
                if end:
                    yield start, end
                start = offset
            end = offset + self.slot_bytes
        if end:
            yield start, end

    def pieces(self, slot: int) -> tuple[memoryview, ...]:
        """The slot's bytes, one writable view per rank, each `piece_bytes` long and page-aligned. Raises ClosedError
        after `close`; views that were made before stay as they are."""
        start, views = slot * self.slot_bytes, self._views
        try:
            pieces = tuple(view[start : start + self.piece_bytes] for view in views)
        except ValueError:  # released by `close` on another thread
            pieces = ()
        if not pieces:
            raise ClosedError("g2 is closed")
        return pieces

    def views(self, *, page_locked: bool = True) -> tuple[memoryview, ...]:
        """The whole memory of each rank, in rank order: slot i begins at i · slot_bytes. Valid until `close`.
        `page_locked`: whether the caller may lock its pages, for a GPU; then none is given back from now on."""
        self._keep(page_locked)
        return tuple(self._views)

    def fds(self, *, page_locked: bool = True) -> tuple[int, ...]:
        """The memfds in rank order, for other processes to map. Owned by the arena. `page_locked`: as for `views`."""
        self._keep(page_locked)
        return tuple(self._fds)

    def _keep(self, page_locked: bool) -> None:
        with self._changing:
            self._returns = self._returns and not page_locked

    def close(self) -> None:
        """Give the memory back. Views that are still held keep their mapping alive until they are dropped."""
        for view in self._views:
            try:
                view.release()
            except BufferError:
                pass  # slices of it are in use; the mapping goes with the last of them
        for mapping in self._maps:
            try:
                mapping.close()
            except BufferError:
                pass
        with self._changing:  # or a thread that goes on with `take_back` meets another file under the number
            for fd in self._fds:
                os.close(fd)
            self._views, self._maps, self._fds = [], [], []
