"""Damages to kvtier's storage and to that of its peers, one after another, the same for all.

    python benchmarks/peers/faults.py [--only kvtier,LMCache] [--damages flip,swap] [--work DIR] [--save DIR]

Each store runs through its own programming interface, over real files, in a process and an environment of its own
below --work, where the answers so far are kept as well: a run that was interrupted goes on where it was. Every row
begins with a new folder: one instance of the store puts blocks and closes, the damage is done, another instance reads
them. The rows of a failing disk need FUSE and the right to mount.

    right     every block had the bytes that were stored
    miss      none had other bytes, and some were misses: an engine computes them
    wrong     at least one block had other bytes, and was served as a hit
    raised    the call raised; what an engine makes of that is not part of this
    hang      no answer for a block within 30 s
    dead      the process ended
    -         the store has nothing of the kind
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, START_S, Contender
from damages import BYTES, Place, places_of, put_back
from serve import BLOCK, payload

from kvtier.bench.record import record, save
from kvtier.testing.child import Child, ChildFailed

HERE = Path(__file__).parent
BLOCKS = 8
PATIENCE_S = 30.0
"""For one block. An engine's request that waits so long has failed for whoever sent it."""
RECOVERY_S = 60.0
_BAD = ("hang", "dead")


class Ended(Exception):
    """The outcome is known: the store hangs, is dead or raised."""


@dataclass
class Row:
    """One damage on one store. `processes`: of stores that are well, by name; a row takes one, and leaves it there."""

    contender: Contender
    python: Path
    folder: Path
    processes: dict[str, Child] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def open(self, **terms: Any) -> None:
        """The store of this folder, by an instance that knows nothing of an earlier one."""
        store = self.folder / "store"
        store.mkdir(parents=True, exist_ok=True)
        (self.folder / "engine").mkdir(exist_ok=True)
        if self.contender.name not in self.processes:
            self.processes[self.contender.name] = self.contender.start(self.python)
        order = {"do": "open", "folder": str(store), "terms": {"engine": str(self.folder / "engine"), **terms}}
        self.notes["versions"] = self.ask(order, START_S)["versions"]

    def ask(self, order: dict[str, Any], patience_s: float = START_S) -> dict[str, Any]:
        """Raises Ended."""
        try:
            answer: dict[str, Any] = self.processes[self.contender.name].ask(order, patience_s)
        except ChildFailed as failure:
            self.kill()
            self.notes["words"] = str(failure).strip().splitlines()[-1][-200:]
            raise Ended("hang" if "did not answer" in str(failure) else "dead") from None
        if "error" in answer:
            self.notes["raised"] = answer["error"]
            raise Ended("raised")
        return answer

    def put(self, first: int = 0, generation: int = 0) -> int:
        """Returns how many blocks are stored, by the store's own account."""
        return int(self.ask({"do": "put", "first": first, "count": BLOCKS, "generation": generation})["stored"])

    def fill(self, first: int = 0, generation: int = 0) -> None:
        """Put blocks before any damage. Raises RuntimeError if not all are stored."""
        if (stored := self.put(first, generation)) != BLOCKS:
            raise RuntimeError(f"{stored} of {BLOCKS} blocks were stored before the damage")

    def get(self, first: int = 0, generation: int = 0, older: Sequence[int] = ()) -> str:
        """Each block by itself; the outcome. `older`: further generations of which a whole block is right."""
        counts = dict.fromkeys(("right", "miss", "wrong"), 0)
        for block in range(first, first + BLOCKS):
            order = {"do": "get", "first": block, "count": 1, "generation": generation, "or": list(older)}
            for word, count in self.ask(order, PATIENCE_S).items():
                counts[word] += count
        self.notes["blocks"] = counts
        return "wrong" if counts["wrong"] else "miss" if counts["miss"] else "right"

    def close(self) -> None:
        self.ask({"do": "close"})

    def reopen(self, **terms: Any) -> None:
        """As after a restart; a store that keeps blocks in memory goes on."""
        if self.contender.in_files:
            self.close()
            self.open(**terms)

    def kill(self) -> None:
        """End its process, which is not well, or may not be."""
        if (child := self.processes.pop(self.contender.name, None)) is not None:
            child.kill()

    def places(self, generation: int = 0) -> list[Place]:
        return places_of(self.folder / "store", [payload(block, generation, BLOCK) for block in range(BLOCKS)])

    def absent(self, why: str) -> str:
        self.notes["why"] = why
        return "-"


def control(row: Row) -> str:
    """Nothing is damaged: the store is closed, opened again and read."""
    row.open()
    row.fill()
    row.reopen()
    return row.get()


def of_bytes(damage: Callable[[list[Place]], None]) -> Callable[[Row], str]:
    """Stored bytes are damaged between two processes."""

    def run(row: Row) -> str:
        if not row.contender.in_files:
            return row.absent("it keeps blocks in memory")
        row.open()
        row.fill()
        row.close()
        damage(row.places())
        row.open()
        return row.get()

    run.__doc__ = damage.__doc__
    return run


def stale(row: Row) -> str:
    """Blocks have the bytes that were stored under the same names before, as after a lost write. A name stands for one
    computation, so these are right bytes as well, where a block is all of one version."""
    if not row.contender.in_files:
        return row.absent("it keeps blocks in memory")
    row.open()
    row.fill()
    row.close()
    older = [place.bytes_now() for place in row.places()]
    shutil.rmtree(row.folder / "store")
    row.open()
    row.fill(generation=1)
    row.close()
    put_back(row.places(1), older)
    row.open()
    return row.get(generation=1, older=[0])


def come_back(row: Row) -> str:
    """Blocks are purged and stored anew with other bytes, then what was stored before comes back, as from a backup."""
    if not row.contender.in_files:
        return row.absent("it keeps blocks in memory")
    row.open()
    row.fill()
    older = [place.bytes_now() for place in row.places()]
    if "absent" in row.ask({"do": "purge"}):
        return row.absent("it has no call that removes blocks")
    row.fill(generation=1)
    row.close()
    put_back(row.places(1), older)
    row.open()
    return row.get(generation=1)


def duplicate(row: Row) -> str:
    """What is stored of a block lies under the name of a block that was never stored as well."""
    if not row.contender.in_files:
        return row.absent("it keeps blocks in memory")
    row.open()
    row.fill(first=100)
    row.close()
    store = row.folder / "store"
    names = _names(store, [payload(block, 0, BLOCK) for block in range(100, 100 + BLOCKS)])
    shutil.rmtree(store)
    row.open()
    row.fill()
    row.close()
    _duplicate(store, [payload(block, 0, BLOCK) for block in range(BLOCKS)], names)
    row.open()
    return row.get(first=100)


def _names(store: Path, payloads: list[bytes]) -> list[Any]:
    """The files of blocks, relative to the store, or their keys in kvtier's index."""
    places = places_of(store, payloads)
    if places[0].alone:
        return [place.file.relative_to(store) for place in places]
    with _index(store) as rows:
        return [key for key, _ in rows()]


def _duplicate(store: Path, payloads: list[bytes], names: list[Any]) -> None:
    places = places_of(store, payloads)
    if places[0].alone:
        for place, name in zip(places, names, strict=True):
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place.file, store / name)
        return
    import lmdb

    with _index(store) as rows:
        entries = [value for _, value in rows()]
    with (
        lmdb.open(str(store / "index"), subdir=True, max_dbs=0, map_size=1 << 30) as index,
        index.begin(write=True) as txn,
    ):
        for key, value in zip(names, entries, strict=True):
            txn.put(key, value)


@contextmanager
def _index(store: Path) -> Iterator[Callable[[], list[tuple[bytes, bytes]]]]:
    """Entries of kvtier's G3 index (docs/format.md), whose keys begin with `b`."""
    import lmdb

    with lmdb.open(str(store / "index"), subdir=True, max_dbs=0, readonly=True) as index, index.begin() as txn:
        yield lambda: [(bytes(key), bytes(value)) for key, value in txn.cursor() if bytes(key[:1]) == b"b"]


def of_terms(about: str, before: dict[str, Any], after: dict[str, Any]) -> Callable[[Row], str]:
    """An engine of other terms meets the store. What it would compute has other bytes, so no block may be served."""

    def run(row: Row) -> str:
        if not row.contender.names_blocks:
            return row.absent("its caller names the blocks")
        row.open(**before)
        row.fill()
        row.reopen(**after)
        return row.get(generation=1)

    run.__doc__ = about
    return run


def purge(row: Row) -> str:
    """The store is told to forget the tenant's blocks, or all of them, and is opened again."""
    row.open()
    row.fill()
    if "absent" in row.ask({"do": "purge"}):
        return row.absent("it has no call that removes blocks")
    row.reopen()
    return row.get(generation=1)


def expiry(row: Row) -> str:
    """Blocks were stored to live for two seconds, and are read after four."""
    if not row.contender.name.startswith("kvtier"):
        return row.absent("blocks cannot be given a life")
    row.open(ttl_s=2)
    row.fill()
    time.sleep(4.0)
    row.reopen(ttl_s=2)
    return row.get(generation=1)


def of_server(verb: str, about: str) -> Callable[[Row], str]:
    """The process that serves the blocks ends, or stops, while the engine's lives."""

    def run(row: Row) -> str:
        row.open()
        row.fill()
        if "absent" in row.ask({"do": verb}):
            return row.absent("it runs in the engine's process")
        try:
            return row.get()
        finally:
            row.kill()

    run.__doc__ = about
    return run


@contextmanager
def faulty_disk(row: Row) -> Iterator[Callable[[str], None]]:
    """The row's store on a disk that fails as it is told."""
    point, mode = row.folder / "store", row.folder / "mode"
    point.mkdir(parents=True)
    mode.write_text("well")
    command = [sys.executable, str(HERE / "faulty_fs.py"), str(point), str(mode)]
    with (
        (row.folder / "disk.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as disk,
    ):
        try:
            assert disk.stdout is not None
            if disk.stdout.readline().strip() != b"mounted":
                raise RuntimeError(f"no file system: {(row.folder / 'disk.log').read_text()[-300:]}")
            yield lambda word: mode.write_text(word) and None
        finally:
            mode.write_text("well")
            row.kill()
            subprocess.run(["umount", "-l", str(point)], check=False)
            disk.terminate()


def of_disk(word: str, about: str) -> Callable[[Row], str]:
    """Blocks are read while the disk fails, and again when it is well."""

    def run(row: Row) -> str:
        if not row.contender.in_files:
            return row.absent("it keeps blocks in memory")
        with faulty_disk(row) as tell:
            row.open()
            row.fill()
            row.reopen()
            tell(word)
            outcome = row.get()
            blocks = row.notes["blocks"]
            tell("well")
            row.notes["recovers"] = _within(lambda: row.get() == "right")
            row.notes["blocks"] = blocks
            return outcome

    run.__doc__ = about
    return run


def disk_full(row: Row) -> str:
    """The disk is full while blocks are stored. Earlier ones are read; with space again, the refused are stored anew.
    The outcome is that of the refused blocks at the end."""
    if not row.contender.in_files:
        return row.absent("it keeps blocks in memory")
    with faulty_disk(row) as tell:
        row.open()
        row.fill()
        tell("no-space")
        row.notes["stored while full"] = row.put(first=100)
        row.notes["read while full"] = [row.get(), row.get(first=100)]
        tell("well")
        row.notes["recovers"] = _within(lambda: row.put(first=100) >= 0 and row.get(first=100) == "right")
        if "wrong" in row.notes["read while full"]:
            return "wrong"
        row.reopen()
        return row.get(first=100)


def _within(well: Callable[[], bool]) -> bool:
    until = time.monotonic() + RECOVERY_S
    while not well():
        if time.monotonic() > until:
            return False
        time.sleep(1.0)
    return True


DAMAGES: dict[str, Callable[[Row], str]] = {
    "control": control,
    **{name: of_bytes(damage) for name, damage in BYTES.items()},  # type: ignore[arg-type]
    "stale version": stale,
    "duplicate": duplicate,
    "dtype": of_terms("KV of 32-bit numbers, then of 16-bit ones.", {}, {"dtype": "bfloat16"}),
    "weights": of_terms("Other weights at the same path.", {}, {"weights": 2}),
    "longrope": of_terms("A longer context, with which long-context RoPE rotates otherwise.", {}, {"context": 131_072}),
    "adapter": of_terms("A LoRA adapter that was trained anew at the same path.", {"adapter": 1}, {"adapter": 2}),
    "dummy load": of_terms("Weights drawn at random (load_format dummy), then the real ones.", {"load": "dummy"}, {}),
    "disk full": disk_full,
    "read error": of_disk("no-read", "Every read of the disk fails with EIO."),
    "permission": of_disk("no-open", "No file may be opened: EACCES."),
    "disk frozen": of_disk("frozen", "The disk does not answer."),
    "server killed": of_server(
        "kill_server", "SIGKILL to the process that serves the blocks, while the engine's lives."
    ),
    "server frozen": of_server("freeze_server", "SIGSTOP to the process that serves the blocks."),
    "purge": purge,
    "purge undone": come_back,
    "expiry": expiry,
}


def measured(
    contender: Contender, damage: str, python: Path, work: Path, processes: dict[str, Child]
) -> dict[str, Any]:
    """One row: its outcome and what was noted on the way. Never raises for what a store does."""
    row = Row(contender, python, Path(tempfile.mkdtemp(prefix="row-", dir=work)), processes)
    try:
        outcome = DAMAGES[damage](row)
        if contender.name in processes:
            row.close()
    except Ended as ended:
        outcome = str(ended)
    except (ChildFailed, LookupError, RuntimeError, OSError) as failure:
        outcome, row.notes["why"] = "not run", str(failure)[-300:]
    finally:
        shutil.rmtree(row.folder, ignore_errors=True)
    if outcome not in ("right", "miss", "wrong", "-"):
        row.kill()
    return {"outcome": outcome, **row.notes}


def main() -> None:
    given = _arguments()
    from rich.progress import Progress

    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / "faults.json"
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() and not given.anew else {}
    chosen = [each for each in CONTENDERS if any(each.name.startswith(name) for name in given.only.split(","))]
    damages = [name for name in DAMAGES if name in given.damages.split(",") or not given.damages]
    todo = [(each, name) for each in chosen for name in damages if name not in found.get(each.name, {})]
    processes: dict[str, Child] = {}
    with Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=len(todo))
        for contender, damage in todo:
            bar.update(task, description=f"{contender.name}: {damage}")
            try:
                python = contender.python(given.work, bar.console.print)
                answer = measured(contender, damage, python, given.work, processes)
            except subprocess.CalledProcessError as failure:
                answer = {"outcome": "not run", "why": f"it cannot be installed: {failure}"}
            found.setdefault(contender.name, {})[damage] = answer
            kept.write_text(json.dumps(found, indent=1))
            bar.advance(task)
            print(f"{contender.name:12} {damage:18} {answer['outcome']}", file=sys.stderr)
    for child in processes.values():
        child.kill()
    results = {
        "blocks": BLOCKS, "block_bytes": BLOCK, "patience_s": PATIENCE_S,
        "about": {each.name: each.about for each in CONTENDERS},
        "damages": {name: " ".join((run.__doc__ or "").split()) for name, run in DAMAGES.items()},
        "counts": {name: _counts(rows) for name, rows in found.items()},
        "stores": {each.name: found[each.name] for each in CONTENDERS if each.name in found},
    }  # fmt: skip
    entry = record("peers_faults", ["python", *sys.argv], results)
    if given.save:
        save(entry, given.save)


def _counts(rows: dict[str, Any]) -> dict[str, int]:
    """How many damages had which outcome, the control left out."""
    outcomes = [row["outcome"] for name, row in rows.items() if name != "control"]
    return {word: outcomes.count(word) for word in ("right", "miss", "wrong", "raised", "hang", "dead")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="beginnings of stores' names, separated by commas; none: all")
    parser.add_argument("--damages", default="", help="names of damages, separated by commas; none: all")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kvtier-peers", help="a directory")
    parser.add_argument("--anew", action="store_true", help="forget the answers of an earlier run")
    parser.add_argument("--save", type=Path, help="a directory for peers_faults.json")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ["PYTHONSAFEPATH"] = "1"
    main()
