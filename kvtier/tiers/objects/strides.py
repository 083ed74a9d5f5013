"""Arithmetic of strides: S consecutive blocks of a chain, aligned in depth, which G4 stores as one object.

A short stride has fewer blocks, the last ones that a chain had when it was stored; it starts at a multiple of S too.
Pure. Blocks are collected into strides in `kvtier.manager.coalesce`.
"""

from __future__ import annotations

from collections.abc import Sequence

STRIDE_BYTES = 32 << 20
STRIDE_MAX = 16
PROBES_FIRST = 6
"""Probes of the first round: a prompt that nobody stored is to cost few requests."""

PROBES = 32
"""Probes of later rounds, for a prompt of which something is there: a round trip takes as long for many as for one."""


def default_stride(block_bytes: int) -> int:
    """About 32 MiB, 1 … 16 blocks."""
    return max(1, min(STRIDE_MAX, STRIDE_BYTES // block_bytes))


def spread(low: int, high: int, width: int) -> list[int]:
    """At most `width` points of [low, high), evenly spaced, `low` among them: one round of a k-ary search."""
    span = high - low
    return list(range(low, high)) if span <= width else sorted({low + span * i // width for i in range(width)})


def probe_width(rounds: int) -> int:
    """Probes of the round after so many. The end of 198 prefix-closed strides is found in two rounds, of 6,500 in
    three. Pure."""
    return PROBES if rounds else PROBES_FIRST


def narrow(low: int, high: int, found: dict[int, bool]) -> tuple[int, int]:
    """The bounds of the first absent stride after one round's answers; all strides before `low` are there.

    Assumes prefix closure: before a stride that is there all are there, unless a probe said no.
    """
    for point in sorted(found):
        if not found[point]:
            return low, point
        low = point + 1
    return low, high


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as half-open ranges of neighbours."""
    out: list[tuple[int, int]] = []
    for index in indices:
        if out and out[-1][1] == index:
            out[-1] = (out[-1][0], index + 1)
        else:
            out.append((index, index + 1))
    return out
