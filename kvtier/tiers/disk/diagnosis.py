"""What ails a G3 store, from its index alone, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.tiers.disk.index import Index, Use

AMPLIFICATION_MAX = 1.5
INDEX_BYTES_PER_BLOCK_MAX = 1000


@dataclass(frozen=True, slots=True)
class Ailment:
    """One figure of a store. `remedy` is empty where nothing is wrong."""

    name: str
    figure: str
    remedy: str = ""


def diagnose(index: Index) -> Iterator[Ailment]:
    """The figures of writes and of the index. The budget is as the last transaction left it. Reads a few records."""
    balance = index.balance()
    much = balance.amplification > AMPLIFICATION_MAX
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
