"""The parts of a request: consecutive blocks that were in one run, or are not known."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from kvtier.identity.keys import BlockKey
from kvtier.policies.run import RUN_BLOCKS, Counts, Run, Stretch, level_of

Part = tuple[Run | None, int, int]
"""Blocks of a request that were in one run, or unknown: (run, depth, count)."""


def runs_kept(old: list[Part], stretches: list[Stretch]) -> dict[int, tuple[Run, int, int]]:
    """Runs that are taken whole and go on as the run of a stretch, by its number: the most of it that one run has."""
    kept: dict[int, tuple[Run, int, int]] = {}
    number = 0
    for run, depth, count in old:
        if run is None or depth + count != (end := run.end):
            continue
        while stretches[number].stop <= depth:
            number += 1
        best, most, at = number, 0, number
        while at < len(stretches) and stretches[at].start < end:
            shared = min(stretches[at].stop, end) - max(stretches[at].start, depth)
            if shared > most:
                best, most = at, shared
            at += 1
        if best not in kept or most > kept[best][2] - kept[best][1]:
            kept[best] = (run, max(stretches[best].start, depth), min(stretches[best].stop, end))
    return kept


def bounded(stretches: list[Stretch], old: list[Part]) -> list[Stretch]:
    """The stretches; one that is longer than a run may be is cut where its parts begin. Pure."""
    cut: list[Stretch] = []
    for stretch in stretches:
        start = stretch.start
        for _, depth, count in old if stretch.stop - start > RUN_BLOCKS else ():
            if start < depth < stretch.stop and min(depth + count, stretch.stop) - start > RUN_BLOCKS:
                cut.append(stretch.part(start, depth))
                start = depth
        cut.append(stretch.part(start, stretch.stop) if start > stretch.start else stretch)
    return cut


def residence(old: list[Part], keys: list[BlockKey], chained: bool) -> bytearray:
    """1 for each block of a request that is resident, else 0."""
    here = bytearray()
    for run, depth, count in old:
        if run is None:
            here += bytes(count)
        elif chained:
            here += run.residence(depth, count)
        else:
            here += bytes(run.here[place] for place in run.places(keys, depth, count))
    return here


def references_after(old: list[tuple[Run | None, int]], keys: list[BlockKey]) -> tuple[Counts, int]:
    """References of each block, this one included, and how many leading blocks are remembered.

    A block counts at most as often as its parent, or a forgotten parent would outlive its child's rank. Stops
    at the first block that is unknown, or in another place (keys that are no chains).
    """
    counts = list[tuple[int, int]]()
    depth, lowest = 0, 1 << 62
    for run, count in old:
        if run is None or not run.has_at(keys[depth], depth):
            break
        end = depth + count
        for stop, references in run.counts:
            if stop > depth:
                depth = min(stop, end)
                if references < lowest:
                    lowest = references
                    counts.append((depth, lowest + 1))
                else:
                    counts[-1] = (depth, lowest + 1)
                if depth == end:
                    break
    if depth < len(keys):
        counts.append((len(keys), 1))
    return _shared(tuple(counts)), depth


@lru_cache(maxsize=1024)
def _shared(counts: Counts) -> Counts:
    """One object for equal ones: most requests of one length count alike."""
    return counts


def levels_in(counts: Counts) -> Iterator[tuple[int, int]]:
    """(depth where it ends, level) of each stretch of equal level. Pure."""
    last, end = -1, 0
    for stop, references in counts:
        level = level_of(references)
        if level != last and end:
            yield end, last
        last, end = level, stop
    yield end, last
