"""Time as a straight line over size, learned from samples: a fixed cost and a cost per block, with uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

Sample = tuple[float, float]
"""Blocks and seconds."""

_YOUNG = 16
"""Samples that are kept one by one: a line through fewer is that of their medians, which one outlier does not move."""
_MEMORY = 128
"""Samples that count, about: older ones fade."""
_RECENT = 3
"""Latest samples that are set against all before them."""
_JUDGED = 4
"""Samples that the line's noise is told from, at least."""
_CHANGED = 2.0
"""Times its noise by which the latest samples must miss the line to count as a change, and not as noise."""
_LEAST_ERROR = 0.1
"""Share of an estimate below which its error is never taken to lie."""
_FIRST_ERROR = 0.4
"""The same while there are too few samples to tell the noise from."""
_CLIPPED = 4.0
"""Times its noise above the line from which on the rest of a sample is none of its size: it counts on the average of
all alike."""
_REST_MEMORY = 512
"""Samples over which that average is taken, about."""
_REST_FIRST = 32
"""As many samples without such a rest are taken to have gone before: one rare sample among a few tells little."""
_ALONE = 1024.0
"""Times the usual estimate that the rest of one sample counts beyond those of all others: it may not come again."""
_ALIKE = 0.25
"""Sizes are about one where their standard deviation is below this share of their mean."""
_ORIGIN = 0.1
"""Weight of a sample at the origin: one sample alone makes a line through it."""
_DEVIATION = 1.5
"""Standard deviations of a bell curve per median of its distances from the middle."""


class _Sums(NamedTuple):
    """Of weights, blocks x and seconds y."""

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def plus(self, x: float, y: float, keep: float = 1.0) -> _Sums:
        n, sx, sxx, sy, sxy, syy = self
        return _Sums(
            keep * n + 1.0, keep * sx + x, keep * sxx + x * x, keep * sy + y, keep * sxy + x * y, keep * syy + y * y
        )

    def fit(self) -> Sample:
        """Fixed seconds and seconds per block, of the least squares."""
        n = self.n + _ORIGIN
        spread = self.xx - self.x * self.x / n
        slope = (self.xy - self.x * self.y / n) / spread if spread > 1e-9 else 0.0
        return (self.y - slope * self.x) / n, slope

    def noise(self) -> float:
        """Root mean square of what the line misses samples by; infinite where there are too few."""
        if self.n < _JUDGED:
            return math.inf
        fixed, slope = self.fit()
        return math.sqrt(max(0.0, self.yy - fixed * self.y - slope * self.xy) / (self.n - 2))


class Bound(NamedTuple):
    """The least seconds that a number of blocks may cost: as a straight line has it, and never more than `most`."""

    fixed: float
    per_block: float
    most: float = math.inf

    def at(self, blocks: float) -> float:
        return max(0.0, min(self.fixed + self.per_block * blocks, self.most))


class _Course(NamedTuple):
    """A line that samples are set against, its noise (infinite where there were too few to tell it from), and the share
    of an estimate that comes to it."""

    fixed: float
    slope: float
    noise: float
    share: float = _LEAST_ERROR

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Course:
        """Of a few samples: the median of the slopes between two, and of what is left."""
        if len(samples) < _JUDGED:
            sums = _Sums()
            for x, y in samples:
                sums = sums.plus(x, y)
            return cls(*sums.fit(), math.inf)
        slopes = [(y - v) / (x - u) for (x, y), (u, v) in combinations(samples, 2) if abs(x - u) > 1e-9]
        slope = median(slopes) if slopes else 0.0
        fixed = median(y - slope * x for x, y in samples)
        missed = [(abs(y - fixed - slope * x), abs(fixed + slope * x)) for x, y in samples]
        share = max(_LEAST_ERROR, _DEVIATION * median(miss / (usual + 1e-9) for miss, usual in missed))
        return cls(fixed, slope, _DEVIATION * median(miss for miss, _ in missed), share)

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x

    def clipped(self, x: float, y: float) -> float:
        usual = self.at(x)
        return y if math.isinf(self.noise) else min(y, usual + _CLIPPED * (self.noise + self.share * abs(usual)))

    def is_left(self, latest: Sequence[Sample]) -> bool:
        """Whether each of these samples misses the line on one side, by more than its noise explains."""
        noise, share = (0.0, _FIRST_ERROR) if math.isinf(self.noise) else (self.noise, self.share)
        missed = [(y - self.at(x)) / (noise + share * abs(self.at(x)) + 1e-9) for x, y in latest]
        return min(missed) > _CHANGED or max(missed) < -_CHANGED


class CostLine:
    """seconds ≈ fixed + per_block · blocks, by least squares over fading samples.

    When each of the latest samples misses the line on one side, and by more than its noise explains, all before them
    is forgotten. A rare outlier is noise: the line is fitted without its rest, which raises all estimates alike, so
    that their mean stays that of the samples. Keeps sums and at most `_YOUNG` samples, whatever it has seen.
    """

    def __init__(self) -> None:
        self._latest: list[Sample] = []  # all samples while there are few; then the last ones
        self._old: _Sums | None = None  # of those before, once there are more
        self._all = _Sums()
        self._rest = self._rest_count = 0.0  # what was clipped off samples, and of how many, both fading
        self._most = 0.0  # of it, what was clipped off the one that lost most: fading, too

    def __len__(self) -> int:
        """Samples that count, at most about `_MEMORY`."""
        return round(self._all.n)

    def add(self, blocks: float, seconds: float) -> None:
        """One sample. Any that is not finite is left out."""
        if not (math.isfinite(seconds) and math.isfinite(blocks)):
            return
        latest = self._latest
        latest.append((blocks, seconds))
        before = latest[:-_RECENT]
        course = _Course.of(before) if self._old is None else _Course(*self._old.fit(), self._old.noise())
        if (before or self._old is not None) and len(latest) >= _RECENT and course.is_left(latest[-_RECENT:]):
            self._latest, self._old = latest[-_RECENT:], None
            self._rest = self._rest_count = self._most = 0.0
        elif self._old is not None or len(latest) > _YOUNG:
            self._settle(before)
        self._sum_up()

    def _settle(self, before: Sequence[Sample]) -> None:
        """These are kept as sums only."""
        course = _Course.of(before) if self._old is None else _Course(*self._old.fit(), self._old.noise())
        self._old = self._old or _Sums()
        for x, y in before:
            clipped, keep = course.clipped(x, y), 1.0 - 1.0 / _REST_MEMORY
            self._old = self._old.plus(x, clipped, keep=1.0 - 1.0 / _MEMORY)
            self._rest, self._rest_count = keep * self._rest + y - clipped, keep * self._rest_count + 1.0
            self._most = max(keep * self._most, y - clipped)
        del self._latest[:-_RECENT]

    def _sum_up(self) -> None:
        if self._old is None:
            course, self._all = _Course.of(self._latest), _Sums()
        else:
            course, self._all = _Course(*self._old.fit(), self._old.noise()), self._old
        for x, y in self._latest:
            self._all = self._all.plus(x, course.clipped(x, y))

    def at(self, blocks: float) -> float:
        """The estimate for this size."""
        return self._on(self._all.fit(), blocks)

    def _on(self, line: Sample, blocks: float, alone: float = _ALONE) -> float:
        """This size on a line, with what the rests of samples add."""
        fixed, slope = line
        usual = fixed + slope * blocks
        return max(0.0, usual + self._rest_of(usual, alone))

    def _rest_of(self, usual: float, alone: float) -> float:
        """What the rests of samples add to a usual estimate; that of one alone, at most so many times the estimate."""
        others = self._rest - self._most
        rest = others + min(self._most, others + alone * max(0.0, usual))
        return rest / (self._rest_count + _REST_FIRST)

    def least(self, blocks: float) -> float:
        """The least that this size may cost. Samples that are all of about one size do not tell how much of their time
        is fixed: then more blocks may cost no more, and fewer no more than their share. And more never cost less,
        whatever noise has the line say."""
        if (middle := self._one_size()) is not None:
            return self._around(middle).at(blocks)
        return self._on(self._rising(), blocks)

    def bound(self) -> Bound:
        """`least` of all sizes, with the rests of samples as they are at the usual size. That of one sample alone is
        left out: who weighs by this looks at no other choice, so a process that stood still once, between reads that
        go on, would speak against small ones for hundreds of samples."""
        if (middle := self._one_size()) is not None:
            return self._around(middle, alone=0.0)
        fixed, slope = self._rising()
        usual = fixed + slope * self._middle()
        return Bound(fixed + self._rest_of(usual, alone=0.0), slope)

    def _rising(self) -> Sample:
        """Fixed seconds and seconds per block; of a line that falls, its middle."""
        fixed, slope = self._all.fit()
        return (fixed, slope) if slope >= 0 else (fixed + slope * self._middle(), 0.0)

    def _middle(self) -> float:
        return self._all.x / self._all.n if self._all.n else 0.0

    def cheapest_bound(self) -> Bound:
        """No more than `cheapest` of any size."""
        if not self._latest:
            return Bound(0.0, 0.0)
        return Bound(0.0, min(y / max(x, 1e-9) for x, y in self._latest), min(y for _, y in self._latest))

    def _one_size(self) -> float | None:
        """The size that all samples are about; None where they differ, or there are none."""
        n, x, xx, *_ = self._all
        alike = n > 0 and n * xx - x * x <= (_ALIKE * x) ** 2
        return self._middle() if alike and x > 0 else None

    def _around(self, middle: float, alone: float = _ALONE) -> Bound:
        seconds = self._on(self._all.fit(), middle, alone)
        return Bound(0.0, seconds / middle, seconds)

    def cheapest(self, blocks: float) -> float:
        """The least that any one of the latest samples tells: more blocks may cost no more, and fewer no more than
        their share."""
        return min((y * min(1.0, blocks / max(x, 1e-9)) for x, y in self._latest), default=0.0)

    def between(self, low: float, high: float) -> float:
        """What going from size `low` to `high` adds."""
        return max(0.0, self._all.fit()[1] * (high - low))

    def error(self) -> float:
        """Standard error of an estimate at a usual size; infinite before there are samples to tell it from."""
        return self._all.noise() / math.sqrt(max(1.0, self._all.n))
