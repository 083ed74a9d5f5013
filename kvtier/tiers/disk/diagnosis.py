"""What ails a G3 store, from its index alone, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.tiers.disk.bad_places import bad_places
from kvtier.tiers.disk.class_report import class_report
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.records import SLOT_ALIGN

AMPLIFICATION_MAX = 1.5
JUDGED_FROM_BYTES = 256 << 20
"""Of blocks: before that, the first pages of the index are most of what was written."""
INDEX_BYTES_PER_BLOCK_MAX = 1000
FRAGMENTED_MAX = 0.25


@dataclass(frozen=True, slots=True)
class Ailment:
    """One figure of a store. `remedy` is empty where nothing is wrong."""

    name: str
    figure: str
    remedy: str = ""


def diagnose(index: Index) -> Iterator[Ailment]:
    """The figures of writes, of the index and of the slots. The budget is as the last transaction left it. Reads a few
    records, and those of all segments."""
    yield from _of_writes(index)
    yield from _of_index(index)
    yield _of_bad_places(index)
    yield from _of_classes(index)


def _of_writes(index: Index) -> Iterator[Ailment]:
    balance = index.balance()
    much = balance.stored >= JUDGED_FROM_BYTES and balance.amplification > AMPLIFICATION_MAX
    yield Ailment(
        "write amplification",
        f"{balance.amplification:.2f} ({balance.written} bytes written for {balance.stored} of blocks)",
        "larger blocks, or more of them per write; a commit writes 20 KB of the index or more" if much else "",
    )
    known = balance.boot != bytes(16)
    yield Ailment(
        "write budget left",
        f"{balance.level:.0f} bytes" if known else "no process has a budget",
        "blocks are refused until it fills again; raise tiers.g3.write_budget" if known and balance.level <= 0 else "",
    )


def _of_index(index: Index) -> Iterator[Ailment]:
    blocks, _ = index.usage()
    size = index.disk_bytes()
    large = size > (64 << 20) + blocks * INDEX_BYTES_PER_BLOCK_MAX
    yield Ailment(
        "index",
        f"{size} bytes for {blocks} blocks",
        "a process stood still inside a read while others wrote; the pages are used again by later blocks"
        if large
        else "",
    )
    pid = index.pinned_by(Use.PUT)
    yield Ailment(
        "stopped reader",
        "none" if pid is None else f"process {pid}",
        "" if pid is None else "puts are refused until it goes on or ends",
    )


def _of_bad_places(index: Index) -> Ailment:
    with index.reading() as txn:
        places = bad_places(txn)
    size, parts = sum(place.units for place in places) * SLOT_ALIGN, index.geometry().parts
    drives = ", ".join(str(1 + part) for part in sorted({place.segment % parts for place in places}))
    return Ailment(
        "bad places",
        f"{len(places)}, of {size} bytes, on path {drives}" if places else "none",
        "they hold no block until a trial succeeds; replace the drive if there are more of them every day"
        if places
        else "",
    )


def _of_classes(index: Index) -> Iterator[Ailment]:
    """The share of each block size in the capacity, and what one size holds and does not use."""
    geometry, classes = index.geometry(), class_report(index)
    for one in classes:
        share, used = one["bytes"] / geometry.capacity, one["used_bytes"] / max(1, one["bytes"])
        yield Ailment(
            f"slots of {one['slot_bytes']} bytes",
            f"{one['segments']} segments, {share:.0%} of the capacity, {used:.0%} of it in use",
        )
    unused = sum(one["bytes"] - one["used_bytes"] for one in classes)
    full = len(classes) > 1 and sum(one["segments"] for one in classes) == geometry.segments
    yield Ailment(
        "fragmentation",
        f"{unused / geometry.capacity:.0%} of the capacity: unused slots in segments of one size of blocks",
        "blocks of another size cannot use them; give each size a directory of its own, or raise tiers.g3.capacity"
        if full and unused > geometry.capacity * FRAGMENTED_MAX
        else "",
    )
