"""Host memory that a GPU copies to and from: mapped, populated near the GPU, page-locked in chunks.

Every rank does this for its own memfd, with its own device. Registering costs about 0.1 s per GB, holds locks of
the driver that other processes wait for, and fails for a single call of 512 GiB and more; hence chunks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvtier.errors import InvalidRequest
from kvtier.kernels.driver import DeviceError, Driver
from kvtier.kernels.layout import Region

log = logging.getLogger(__name__)

GIB = 1 << 30
CHUNK_BYTES = 64 * GIB
"""The most that one registration covers."""

POPULATE_STEP_BYTES = GIB // 4
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


def attach(fd: int) -> memoryview:
    """Map a rank's memfd, shared and writable, whole. The mapping goes with the last view of it; the fd stays the
    caller's. Faults no page."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def node_cpus(pci_bus_id: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of the NUMA node that the PCI device is attached to; empty where the machine does not say."""
    device = sysfs / "bus" / "pci" / "devices" / pci_bus_id
    try:
        if int((device / "numa_node").read_text(encoding="ascii")) < 0:
            return frozenset()
        return _cpu_list((device / "local_cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


def populate(arena: memoryview, cpus: Iterable[int] = (), threads: int = 8, progress: Progress | None = None) -> int:
    """Fault every page in, in parallel, from `cpus` (a page lands on the node of the thread that touches it first).

    Returns how many leading bytes have memory behind them: less than all where it ran out, and then the rest must
    not be touched. Blocks for seconds per 10 GiB. Other threads' affinity is left alone.
    """
    address, length = _address(arena), arena.nbytes
    steps = range(0, length, POPULATE_STEP_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes, libc.madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    near = frozenset(cpus) & os.sched_getaffinity(0)

    def settle() -> None:
        if near:
            os.sched_setaffinity(0, near)  # of this worker thread alone

    def fault(start: int) -> int:
        nbytes = min(POPULATE_STEP_BYTES, length - start)
        return 0 if libc.madvise(address + start, nbytes, _MADV_POPULATE_WRITE) == 0 else ctypes.get_errno()

    done = 0
    with ThreadPoolExecutor(max_workers=threads, initializer=settle, thread_name_prefix="kvtier-populate") as pool:
        for start, code in zip(steps, pool.map(fault, steps), strict=True):
            if code == errno.EINVAL:
                log.warning("this kernel cannot populate memory ahead of use (needs Linux 5.14); pages come on demand")
                return length
            if code:
                log.warning("the kernel gave %d of %d bytes (%s)", start, length, os.strerror(code))
                return done
            done = min(length, start + POPULATE_STEP_BYTES)
            if progress is not None:
                progress("populate", done, length)
    return done


def pin(
    driver: Driver,
    regions: Sequence[Region],
    slot_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
) -> tuple[Region, ...]:
    """Page-lock host memory in chunks of whole slots. Returns the chunks, to be undone by `unpin`.

    All or nothing: where the driver refuses a chunk, the ones before are released and the result is empty, with a
    warning. Copies then take the slower way through pageable memory, and stay right.
    """
    step = chunk_bytes // slot_bytes * slot_bytes
    if step < 1:
        raise InvalidRequest(f"pin: a chunk of {chunk_bytes} bytes does not hold one slot of {slot_bytes}")
    chunks = list[Region]()
    done, total = 0, sum(region.nbytes for region in regions)
    for region in regions:
        for start in range(region.start, region.end, step):
            chunk = Region(start, min(step, region.end - start))
            try:
                driver.register(chunk.start, chunk.nbytes)
            except DeviceError as error:
                log.warning("host memory stays pageable, copies are slower and may wait: %s (memlock limit?)", error)
                unpin(driver, chunks)
                return ()
            chunks.append(chunk)
            done += chunk.nbytes
            if progress is not None:
                progress("register", done, total)
    return tuple(chunks)


def unpin(driver: Driver, chunks: Iterable[Region]) -> None:
    """Undo `pin`. No copy may be in flight. A chunk that the driver does not let go is left to the process's end."""
    for chunk in chunks:
        try:
            driver.unregister(chunk.start)
        except DeviceError as error:
            log.warning("could not unregister host memory: %s", error)


def _address(arena: memoryview) -> int:
    return int(np.frombuffer(arena, dtype=np.uint8).ctypes.data)


def _cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format, like "0-3,8-11"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
