"""Host memory that a GPU copies to and from: mapped from a memfd, populated near the GPU.

Imports the standard library only, for processes that only allocate.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

POPULATE_STEP_BYTES = 1 << 28
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14

Progress = Callable[[str, int, int], None]
"""Called with the name of the step, bytes done and bytes in all."""


def attach(fd: int) -> memoryview:
    """Map a rank's memfd, shared and writable, whole. The mapping goes with the last view of it; the fd stays the
    caller's. Faults no page."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def node_cpus(pci_bus_id: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of the NUMA node that the PCI device is attached to; empty where unknown."""
    device = sysfs / "bus" / "pci" / "devices" / pci_bus_id
    try:
        if int((device / "numa_node").read_text(encoding="ascii")) < 0:
            return frozenset()
        return _cpu_list((device / "local_cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


def bus_link(pci_bus_id: str, sysfs: Path = Path("/sys")) -> str:
    """The PCI device's link, like "x16 at 32.0 GT/s PCIe": its present width, which a slot may limit, and its speed
    under load. "" where unknown."""
    device = sysfs / "bus" / "pci" / "devices" / pci_bus_id
    try:
        width = (device / "current_link_width").read_text(encoding="ascii").strip()
        return f"x{width} at {(device / 'max_link_speed').read_text(encoding='ascii').strip()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class HugePages:
    """The kernel's reserved huge pages of its default size. None reserved: `free` is 0."""

    page_bytes: int
    free: int

    def pages(self, nbytes: int) -> int:
        """How many hold so many bytes."""
        return -(-nbytes // self.page_bytes)


def huge_pages(meminfo: Path = Path("/proc/meminfo")) -> HugePages:
    """Those that nobody has taken or been promised."""
    try:
        lines = (line.partition(":") for line in meminfo.read_text(encoding="ascii").splitlines())
        values = {name: int(rest.split()[0]) for name, _, rest in lines if name.startswith("Huge")}
        free = values["HugePages_Free"] - values["HugePages_Rsvd"]
        return HugePages(values["Hugepagesize"] << 10, max(0, free))
    except (OSError, ValueError, KeyError, IndexError):
        return HugePages(2 << 20, 0)


def populate(arena: memoryview, cpus: Iterable[int] = (), threads: int = 8, progress: Progress | None = None) -> int:
    """Fault every page in, in parallel, from `cpus` (a page lands on the node of the thread that touches it first).

    Returns how many leading bytes have memory behind them: less than all where it ran out, and then the rest must
    not be touched. Blocks for seconds per 10 GiB. Raises OSError (EINVAL) from a kernel before 5.14, which cannot.
    """
    length = arena.nbytes
    if not length:
        return 0
    held = (ctypes.c_char * length).from_buffer(arena)
    address = ctypes.addressof(held)
    steps = range(0, length, POPULATE_STEP_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes, libc.madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    near = frozenset(cpus) & os.sched_getaffinity(0)

    def move_near() -> None:
        if near:
            os.sched_setaffinity(0, near)  # of this worker thread alone

    def fault(start: int) -> int:
        nbytes = min(POPULATE_STEP_BYTES, length - start)
        return 0 if libc.madvise(address + start, nbytes, _MADV_POPULATE_WRITE) == 0 else ctypes.get_errno()

    done = 0
    with ThreadPoolExecutor(max_workers=threads, initializer=move_near, thread_name_prefix="kvtier-populate") as pool:
        codes = pool.map(fault, steps) if near or len(steps) > 1 else map(fault, steps)
        for start, code in zip(steps, codes, strict=True):
            if code == errno.EINVAL:
                raise OSError(code, "this kernel cannot populate memory ahead of use (Linux 5.14 can)")
            if code:
                log.warning("the kernel gave %d of %d bytes (%s)", start, length, os.strerror(code))
                return done
            done = min(length, start + POPULATE_STEP_BYTES)
            if progress is not None:
                progress("populate", done, length)
    return done


class Reporter:
    """A `Progress` that logs a line per tenth, for memory of at least `least_bytes`."""

    def __init__(self, least_bytes: int = 8 << 30) -> None:
        self._least_bytes = least_bytes
        self._reported = dict[str, int]()

    def __call__(self, step: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if total >= self._least_bytes and tenth > self._reported.get(step, 0):
            self._reported[step] = tenth
            log.info("%s host memory: %d of %d GiB", step, done >> 30, total >> 30)


def _cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format, like "0-3,8-11"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
