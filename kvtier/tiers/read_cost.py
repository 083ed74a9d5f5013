"""Learns what reading blocks from a tier costs, beside whatever else is read from it."""

from __future__ import annotations

from kvtier.cost_line import Bound, CostLine
from kvtier.times import Mono

FORGET_S = 60.0
"""A tier without reads for so long is judged anew: only reads can show that one found too slow has become faster."""
_READS_MIN, _FIRST_READS = 2, 4
"""Samples from which on a tier is judged: one alone may have been its first read, which is slow in many ways, and is so
again after each time without reads. So fewer than the latter judge it by the cheapest of them."""
_SAMPLE_S = 1.0
"""Reads that follow one another for so long make a sample, and those that begin afterwards another."""
_APART_MAX = 64
"""So do as many that lie apart, beside one that hangs."""


class ReadCost:
    """Seconds that a number of blocks take, told of reads as they begin and end.

    A prompt's blocks come in several reads side by side, each of which waits for the others. So a sample is the time
    in which at least one of some reads was under way, with all blocks that they brought. It ends where none is under
    way, or where another begins: not between reads that end with one another, the first of which would have the time
    of all, and the others their blocks. Reads that bring nothing count for nothing, however long they take. Pure: reads
    no clock.
    """

    def __init__(self) -> None:
        self._line = CostLine()
        self._under_way = 0
        self._blocks = 0  # since the last sample
        self._busy: list[tuple[Mono, Mono]] = []  # when they were read: apart, and ascending
        self._sampled_s = Mono(0.0)  # up to then
        self._latest_s = Mono(0.0)  # a read with blocks ended

    def began(self) -> None:
        """A read begins; its `ended` is called whatever comes of it."""
        if self._busy_s() >= _SAMPLE_S or len(self._busy) >= _APART_MAX:
            self._sample()
        self._under_way += 1

    def ended(self, blocks: int, began: Mono, now: Mono) -> None:
        """A read has ended that brought so many blocks."""
        self._under_way -= 1
        if blocks:
            self._latest_s = now
            self._blocks += blocks
            self._cover(max(began, self._sampled_s), now)
        if self._blocks and not self._under_way:
            self._sample()

    def _busy_s(self) -> float:
        return sum(end - begin for begin, end in self._busy)

    def _sample(self) -> None:
        self._line.add(self._blocks, self._busy_s())
        self._blocks, self._sampled_s = 0, self._busy[-1][1]
        self._busy.clear()

    def _cover(self, begin: Mono, end: Mono) -> None:
        while self._busy and self._busy[-1][1] >= begin:
            begin = min(begin, self._busy.pop()[0])
        self._busy.append((begin, end))

    def estimate(self, now: Mono) -> Bound | None:
        """The least that reads cost by those of late; None while too few were seen."""
        if now - self._latest_s > FORGET_S:
            self._line = CostLine()
        if (count := len(self._line)) < _READS_MIN:
            return None
        return self._line.bound() if count >= _FIRST_READS else self._line.cheapest_bound()
