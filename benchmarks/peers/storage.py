"""Bytes, files, syncs, CPU and time of kvtier's storage and of that of its peers, on the same blocks.

    python benchmarks/peers/storage.py [--only kvtier,LMCache] [--work DIR] [--rounds 5] [--save benchmarks/results]

Counts, bytes, CPU and time on the same blocks. Stores take turns, another one first in each round; a run that was
broken off goes on with the rounds that its directory lacks. Each store runs as in faults.py. One process puts all
blocks, BATCH at a time, and closes; another opens the store, reads one block and then all, closes it, opens it
again and reads one. CPU is that of all processes of the store, in user and kernel mode; what the kernel does later
for a page cache is in none of them. The harness computes each payload and compares it, in all of them alike. Syncs
are counted in a run of their own, under strace.

kvtier syncs and verifies; of its peers none does either, so that it does more work than they do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from contenders import CONTENDERS, Contender
from faults import Ended, Row
from serve import BLOCK

from kvtier.bench.peers.rounds import summed, turned
from kvtier.bench.record import record, save

T = TypeVar("T")

BATCH = 16
_TICKS = os.sysconf("SC_CLK_TCK")
_SYNCS = "fsync,fdatasync,sync_file_range,syncfs,msync"


def _living(group: int) -> Iterator[tuple[Path, list[str]]]:
    """Processes of a group, with the fields of `stat` from the state on. Reads /proc."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            yield entry.parent, fields


def cpu_s(group: int) -> float:
    """CPU seconds so far of the living processes of a group, and of their children that ended."""
    return sum(int(field) for _, fields in _living(group) for field in fields[11:15]) / _TICKS


def written_bytes(group: int) -> int:
    """Bytes that the living processes of a group have had written to disks, or will: a dirty page counts at once."""
    return sum(
        int(line.split()[1])
        for process, _ in _living(group)
        for line in (process / "io").read_text().splitlines()
        if line.startswith("write_bytes:")
    )


def run(row: Row, blocks: int) -> dict[str, Any]:
    """One round. Raises Ended."""

    def group() -> int:
        return row.processes[row.contender.name].process.pid

    def spent(first: int, count: int, verb: str) -> tuple[float, float]:
        """Seconds of CPU and of the clock."""
        before, began = cpu_s(group()), time.perf_counter()
        answer = row.ask({"do": verb, "first": first, "count": count, "generation": 0}, 120.0)
        assert answer in ({"stored": count}, {"right": count, "miss": 0, "wrong": 0}), answer
        return cpu_s(group()) - before, time.perf_counter() - began

    def all_of(verb: str) -> tuple[float, float]:
        parts = [spent(first, BATCH, verb) for first in range(0, blocks, BATCH)]
        return sum(cpu for cpu, _ in parts), sum(clock for _, clock in parts)

    row.open()
    row.fill(first=10_000)  # what is loaded at the first put is none of the blocks' cost
    before = written_bytes(group())
    put, put_s = all_of("put")
    written = written_bytes(group()) - before
    row.close()
    row.kill()
    files = [path.stat() for path in (row.folder / "store").rglob("*") if path.is_file()]
    row.open()
    first, _ = spent(0, 1, "get")
    get, get_s = all_of("get")
    row.close()
    began = time.perf_counter()
    row.open()
    spent(0, 1, "get")
    restart_s = time.perf_counter() - began
    mib = blocks * BLOCK / 2**20
    return {
        "files": len(files),
        "allocated_bytes_per_block": sum(file.st_blocks * 512 for file in files) / (blocks + 8),
        "written_bytes_per_byte": written / (blocks * BLOCK),
        "put_cpu_ms_per_mib": 1e3 * put / mib,
        "get_cpu_ms_per_mib": 1e3 * get / mib,
        "put_ms_per_block": 1e3 * put_s / blocks,
        "get_ms_per_block": 1e3 * get_s / blocks,
        "first_get_cpu_ms": 1e3 * first,
        "open_to_hit_ms": 1e3 * restart_s,
        "versions": row.notes["versions"],
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


def measured(contender: Contender, python: Path, work: Path, what: Callable[[Row, int], T], blocks: int) -> T:
    """`what` of a store over a folder of its own, which is removed."""
    row = Row(contender, python, Path(tempfile.mkdtemp(prefix="storage-", dir=work)))
    try:
        return what(row, blocks)
    finally:
        row.kill()
        shutil.rmtree(row.folder, ignore_errors=True)


def summed_up(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`summed`, with the releases of the last round."""
    figures = [{name: value for name, value in one.items() if name != "versions"} for one in rounds]
    return {**summed(figures), "versions": rounds[-1].get("versions")}


def one_round(contender: Contender, work: Path, blocks: int) -> dict[str, Any]:
    """A store's figures, and its syncs where strace is installed."""
    try:
        python = contender.python(work, print)
        found = measured(contender, python, work, run, blocks)
        if shutil.which("strace"):
            found["syncs_per_batch"] = measured(contender, python, work, syncs, blocks) / (blocks / BATCH)
        return found
    except (Ended, AssertionError, subprocess.CalledProcessError) as failure:
        return {"not_run": str(failure)[-300:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="beginnings of stores' names, separated by commas; none: all")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvtier-peers", help="a directory")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--anew", action="store_true", help="forget the rounds of an earlier run")
    parser.add_argument("--save", type=Path, help="a directory for peers_storage.json")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / f"storage-{given.blocks}.json"
    found: dict[str, list[dict[str, Any]]] = json.loads(kept.read_text()) if kept.exists() and not given.anew else {}
    chosen = [
        each
        for each in CONTENDERS
        if each.in_files and any(each.name.startswith(name) for name in given.only.split(","))
    ]
    for number in range(given.rounds):
        for contender in turned(chosen, number):
            rounds = found.setdefault(contender.name, [])
            if len(rounds) <= number:
                rounds.append(one_round(contender, given.work, given.blocks))
                kept.write_text(json.dumps(found, indent=1))
                print(number + 1, contender.name, rounds[-1], file=sys.stderr)
    stores = {each.name: summed_up(found[each.name]) for each in chosen}
    entry = record(
        "peers_storage", ["python", *sys.argv], {"blocks": given.blocks, "block_bytes": BLOCK, "stores": stores}
    )
    if given.save:
        save(entry, given.save)


if __name__ == "__main__":
    main()
