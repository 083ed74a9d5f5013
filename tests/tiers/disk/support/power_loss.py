"""Power loss: every state that a disk may be in when the machine stops, made from a trace of system calls.

    python -m tests.tiers.disk.support.power_loss DIRECTORY POINTS SEED [sabotage]

A worker runs under strace, which records every write to the store, LMDB's own included, and every sync. At each of
POINTS sync points (0: all) images of the disk are made: what was synced before, and of what was not nothing, all, or
a random part, torn at sectors. Each image is opened and compared with what had been reported as durable by then.

    durable at a point: writes that ended before a sync of their file began that ended before the point,
                        and writes through a descriptor opened with O_DSYNC that ended before the point

`sabotage` leaves out the worker's syncs of slab files: the control, which must fail.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tiers.disk.support.crash import inspect, recent, work

_TAIL = re.compile(r'["\]], \d+, (\d+)(?:, 0)?\s*\)\s*= ')  # … data, length or count, offset[, flags]) = result
SECTOR = 512
CALLS = "openat,lseek,write,writev,pwrite64,pwritev,pwritev2,fdatasync,fsync,ftruncate,fallocate,rename,unlink,msync"
_LINE = re.compile(r"^(\d+) +(?:<\.\.\. (\w+) resumed>)?(.*)$")
_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(slots=True)
class Write:
    """Bytes on their way to a file. `start`, `end`: lines of the trace; `durable`: from which line on, if any."""

    path: Path
    offset: int
    data: bytes
    start: int
    end: int
    durable: int | None = None


@dataclass(slots=True)
class Trace:
    """A worker's calls on its store: writes, the lines at which syncs ended, and reports with their lines."""

    writes: list[Write]
    syncs: list[int]
    reports: list[tuple[int, bytes]]


def calls(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, "name(args) = result") of each call."""
    open_calls: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines()):
        found = _LINE.match(line)
        if found is None:
            continue
        thread, resumed, rest = found.groups()
        if rest.endswith("<unfinished ...>"):
            open_calls[thread] = (number, rest.removesuffix("<unfinished ...>"))
        elif resumed:
            start, head = open_calls.pop(thread)
            yield start, number, head + rest
        elif "(" in rest:
            yield number, number, rest


def parse(text: str, store: Path, first: int) -> Trace:
    """Read the output of strace -f -y -xx: descriptors from its beginning, all else from line `first` on."""
    writes: list[Write] = []
    syncs: list[int] = []
    reports: list[tuple[int, bytes]] = []
    through: set[int] = set()
    position: dict[int, int] = {}
    for start, end, call in calls(text):
        name, _, rest = call.partition("(")
        result = int(rest.rpartition("= ")[2].split("<")[0].split()[0], 0)
        if result < 0:
            continue
        if name == "openat":
            (through.add if "O_DSYNC" in rest or "O_SYNC" in rest else through.discard)(result)
            continue
        head = re.match(r"(\d+)<([^>]*)>", rest)
        if head is None:
            continue
        fd, target = int(head[1]), Path(_text(head[2]))
        inside = target.is_relative_to(store)
        if start < first:
            continue
        if name == "write" and not inside and fd == 1 and _bytes(rest) != b"ready\n":
            reports.append((end, _bytes(rest)))
        if not inside or target.name in ("LOCK", "lock.mdb"):
            continue
        match name:
            case "lseek":
                position[fd] = result
            case "pwrite64" | "pwritev" | "pwritev2" | "writev" | "write":
                data = _bytes(rest)[:result]
                if name in ("write", "writev"):
                    offset = position.get(fd, 0)
                    position[fd] = offset + result
                else:
                    tail = _TAIL.search(rest)
                    assert tail is not None, rest[-80:]
                    offset = int(tail[1])
                assert len(data) == result, f"{name}: strace cut the data short"
                writes.append(Write(target, offset, data, start, end, end if fd in through else None))
                if fd in through:
                    syncs.append(end)
            case "fdatasync" | "fsync":
                syncs.append(end)
                for one in writes:
                    if one.path == target and one.end < start and one.durable is None:
                        one.durable = end
            case _:
                raise AssertionError(f"{name} on {target}: not modelled")
    return Trace(writes, syncs, reports)


def _text(hexed: str) -> str:
    return bytes.fromhex(hexed.replace("\\x", "")).decode() if hexed.startswith("\\x") else hexed


def _bytes(text: str) -> bytes:
    return b"".join(bytes.fromhex(one.replace("\\x", "")) for one in _HEX.findall(text))


def record(store: Path, scratch: Path, seed: int, sabotage: bool) -> tuple[Path, Trace]:
    """Run a worker; returns a copy of the store from before it began, and what it did."""
    trace = scratch / "trace"
    words = [
        "strace", "-f", "-qq", "-y", "-xx", "-s", str(1 << 23), "-o", str(trace), "-e", f"trace={CALLS}",
        sys.executable, "-m", "tests.tiers.disk.support.power_loss", "worker",
        str(store), str(seed), str(int(sabotage)),
    ]  # fmt: skip
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        before = scratch / "before"
        _copy(store, before)
        begin = trace.stat().st_size
        worker.stdin.write(b"go\n")
        worker.stdin.close()
        worker.stdout.read()
    assert worker.returncode == 0, f"the worker failed with {worker.returncode}"
    # Descriptors opened before the copy are known from the first part; its writes are in the copy.
    text = trace.read_text()
    first = text[:begin].count("\n")
    return before, parse(text, store, first)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--sparse=always", source, target], check=True)


def _apply(image: Path, store: Path, one: Write, keep: list[bool] | None = None) -> None:
    path = image / one.path.relative_to(store)
    with path.open("r+b") as file:
        for number, start in enumerate(range(0, len(one.data), SECTOR)):
            if keep is None or keep[number]:
                file.seek(one.offset + start)
                file.write(one.data[start : start + SECTOR])


async def run(scratch: Path, points: int, seed: int, sabotage: bool) -> dict[str, int]:
    """Raise AssertionError at the first image that is wrong."""
    store, rng = scratch / "g3", random.Random(seed)
    before, trace = await asyncio.to_thread(record, store, scratch, seed, sabotage)
    lines = sorted(set(trace.syncs))
    chosen = lines if points == 0 else sorted(rng.sample(lines, min(points, len(lines))))
    images = durable_checked = 0
    applied: set[int] = set()
    horizons = dict(zip(lines, [*lines[1:], lines[-1] + 1], strict=True))
    for point in chosen:
        horizon = horizons[point]  # whatever happened before the next sync ended may have been cut off
        for number, one in enumerate(trace.writes):
            if number not in applied and one.durable is not None and one.durable <= point:
                _apply(before, store, one)
                applied.add(number)
        durable = recent(b"".join(data for line, data in trace.reports if line < horizon))
        loose = [one for n, one in enumerate(trace.writes) if n not in applied and one.start < horizon]
        for how in ("nothing", "all", "torn", "torn"):
            image = scratch / "image"
            shutil.rmtree(image, ignore_errors=True)
            _copy(before, image)
            for one in loose if how != "nothing" else []:
                keep = [how == "all" or rng.random() < 0.5 for _ in range(0, len(one.data), SECTOR)]
                _apply(image, store, one, keep)
            try:
                await inspect(image, durable)
            except BaseException:
                print(f"seed {seed}, line {point} of the trace, {how} of {len(loose)} writes", file=sys.stderr)
                raise
            images += 1
            durable_checked += len(durable)
    return {"syncs": len(lines), "images": images, "writes": len(trace.writes), "durable_checked": durable_checked}


def work_under_trace(store: Path, seed: int, sabotage: bool) -> None:
    """The worker: wait until the parent has its copy, then work, reporting on standard output."""
    from kvtier.tiers.disk import slab
    from tests.tiers.disk.support.crash import CAPACITY, CHAINS
    from tests.tiers.disk.support.store import opened, put

    async def prepare() -> None:
        async with opened(store, CAPACITY) as tier:
            for chain in CHAINS[:20]:  # every slot was used once: no file grows from here on
                await put(tier, chain)

    asyncio.run(prepare())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if sabotage:
        slab.SystemCalls.fdatasync = lambda self, fd: None  # type: ignore[method-assign]
    asyncio.run(work(store, seed, 1, 100))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work_under_trace(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
        sys.exit(0)
    try:
        print(json.dumps(asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4))))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
