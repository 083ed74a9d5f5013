"""Learns what reading blocks from a tier costs, beside whatever else is read from it."""

from __future__ import annotations

from kvtier.cost_line import Bound, CostLine
from kvtier.times import Mono

FORGET_S = 60.0
"""A tier without reads for so long is judged anew: only reads can show that one found too slow has become faster."""
_READS_MIN = 2
"""Samples from which on a tier is judged: one alone may have been its first read, which is slow in many ways."""
_SAMPLE_S = 1.0
"""Reads that follow one another for so long make a sample, and those after it another."""


class ReadCost:
    """Seconds that a number of blocks take, told of reads as they begin and end.

    A prompt's blocks come in several reads side by side, each of which waits for the others. So a sample is a time
    in which the tier was busy, from the first read to the end of the last, with all blocks that were read in it. Pure:
    reads no clock.
    """

    def __init__(self) -> None:
        self._line = CostLine()
        self._under_way = 0
        self._since_s = Mono(0.0)  # of the reads under way, the first of which began then
        self._blocks = 0  # that came since
        self._latest_s = Mono(0.0)  # a read with blocks ended

    def began(self, now: Mono) -> None:
        """A read begins; its `ended` is called whatever comes of it."""
        if not self._under_way:
            self._since_s, self._blocks = now, 0
        self._under_way += 1

    def ended(self, blocks: int, now: Mono) -> None:
        """A read has ended that brought so many blocks."""
        self._under_way -= 1
        self._blocks += blocks
        if blocks:
            self._latest_s = now
        if self._under_way and now - self._since_s < _SAMPLE_S:
            return
        if self._blocks:
            self._line.add(self._blocks, now - self._since_s)
        self._since_s, self._blocks = now, 0

    def estimate(self, now: Mono) -> Bound | None:
        """The least that reads cost by those of late; None while too few were seen."""
        if now - self._latest_s > FORGET_S:
            self._line = CostLine()
        return self._line.bound() if len(self._line) >= _READS_MIN else None
