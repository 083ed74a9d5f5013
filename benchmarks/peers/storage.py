"""Bytes, files, syncs and CPU of kvtier's storage and of that of its peers, on the same blocks.

    python benchmarks/peers/storage.py [--only kvtier,LMCache] [--work DIR] [--blocks 256] [--save benchmarks/results]

Counts and CPU time alone, no wall time, so that a busy machine does little harm. Each store runs as in faults.py. One
process puts all blocks, BATCH at a time, and closes; another opens the store, reads one block and then all. CPU is that
of all processes of the store, in user and kernel mode; what the kernel does later for a page cache is in none of
them. Syncs are counted in a run of their own, under strace.

kvtier syncs and verifies; of its peers none does either, so that it does more work than they do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, Contender
from faults import Ended, Row
from serve import BLOCK

from kvtier.bench.record import record, save

BATCH = 16
_TICKS = os.sysconf("SC_CLK_TCK")
_SYNCS = "fsync,fdatasync,sync_file_range,syncfs,msync"


def cpu_s(group: int) -> float:
    """CPU seconds so far of the living processes of a group, and of their children that ended. Reads /proc."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += sum(int(field) for field in fields[11:15])
    return total / _TICKS


def run(row: Row, blocks: int) -> dict[str, Any]:
    """One round. Raises Ended."""

    def spent(first: int, count: int, verb: str) -> float:
        group = row.processes[row.contender.name].process.pid
        before = cpu_s(group)
        answer = row.ask({"do": verb, "first": first, "count": count, "generation": 0}, 120.0)
        assert answer in ({"stored": count}, {"right": count, "miss": 0, "wrong": 0}), answer
        return cpu_s(group) - before

    row.open()
    row.fill(first=10_000)  # what is loaded at the first put is none of the blocks' cost
    put = sum(spent(first, BATCH, "put") for first in range(0, blocks, BATCH))
    row.close()
    row.kill()
    files = [path.stat() for path in (row.folder / "store").rglob("*") if path.is_file()]
    row.open()
    first = spent(0, 1, "get")
    get = sum(spent(start, BATCH, "get") for start in range(0, blocks, BATCH))
    mib = blocks * BLOCK / 2**20
    return {
        "files": len(files),
        "allocated_bytes_per_block": sum(file.st_blocks * 512 for file in files) / (blocks + 8),
        "put_cpu_ms_per_mib": 1e3 * put / mib,
        "get_cpu_ms_per_mib": 1e3 * get / mib,
        "first_get_cpu_ms": 1e3 * first,
    }


def syncs(row: Row, blocks: int) -> int:
    """How often the store syncs while it puts blocks and closes. Runs it under strace."""
    log = row.folder / "strace"
    row.contender = replace(row.contender, before=("strace", "-f", "-qq", "-e", f"trace={_SYNCS}", "-o", str(log)))
    row.open()
    row.fill(first=10_000)
    before = _lines(log)
    for first in range(0, blocks, BATCH):
        row.ask({"do": "put", "first": first, "count": BATCH, "generation": 0}, 120.0)
    row.close()
    return _lines(log) - before


def _lines(log: Path) -> int:
    return len(re.findall(r"(?:sync|sync_file_range)\(", log.read_text()))


def figures(contender: Contender, python: Path, work: Path, blocks: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds."""
    many = []
    for _ in range(rounds):
        row = Row(contender, python, Path(tempfile.mkdtemp(prefix="storage-", dir=work)))
        try:
            many.append(run(row, blocks))
        finally:
            row.kill()
            shutil.rmtree(row.folder, ignore_errors=True)
    out: dict[str, Any] = {name: statistics.median(one[name] for one in many) for name in many[0]}
    if shutil.which("strace"):
        row = Row(contender, python, Path(tempfile.mkdtemp(prefix="storage-", dir=work)))
        try:
            out["syncs_per_batch"] = syncs(row, blocks) / (blocks / BATCH)
        finally:
            row.kill()
            shutil.rmtree(row.folder, ignore_errors=True)
    return {**out, "versions": row.notes["versions"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="beginnings of stores' names, separated by commas; none: all")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvtier-peers", help="a directory")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="a directory for peers_storage.json")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for contender in CONTENDERS:
        if not contender.in_files or not any(contender.name.startswith(name) for name in given.only.split(",")):
            continue
        try:
            python = contender.python(given.work, print)
            found[contender.name] = figures(contender, python, given.work, given.blocks, given.rounds)
        except (Ended, AssertionError, subprocess.CalledProcessError) as failure:
            found[contender.name] = {"not_run": str(failure)[-300:]}
        print(contender.name, found[contender.name], file=sys.stderr)
    entry = record(
        "peers_storage", ["python", *sys.argv], {"blocks": given.blocks, "block_bytes": BLOCK, "stores": found}
    )
    if given.save:
        save(entry, given.save)


if __name__ == "__main__":
    main()
