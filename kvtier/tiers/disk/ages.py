"""How many bytes of a class were last used when: a histogram over ticks, for depths from the end that leaves next."""

from __future__ import annotations

from bisect import bisect_right

AGES_MAX = 32


class Ages:
    """Bytes by tick of last use, in up to AGES_MAX buckets of about equal bytes, the oldest first.

    A bucket begins at its tick and ends where the next one begins. Depths are exact to half a bucket.
    """

    def __init__(self, starts: list[int], sizes: list[int]) -> None:
        self.starts = starts
        self.sizes = sizes
        self._newest = 0  # tick added, here: a bucket must not begin at a tick that an older one has bytes of

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def add(self, tick: int, size: int) -> None:
        """So many bytes were used at `tick`."""
        starts, sizes = self.starts, self.sizes
        if not starts or (tick > max(starts[-1], self._newest) and sizes[-1] * AGES_MAX > 2 * self.total):
            starts.append(tick)
            sizes.append(size)
            self._merge()
        else:
            sizes[self._bucket(tick)] += size
        self._newest = max(self._newest, tick)

    def remove(self, tick: int, size: int) -> None:
        """So many bytes that were used at `tick` are gone, or were used again."""
        if self.starts:
            bucket = self._bucket(tick)
            self.sizes[bucket] = max(0, self.sizes[bucket] - size)

    def depth(self, tick: int) -> int:
        """Bytes that leave before what was used at `tick`."""
        if not self.starts:
            return 0
        bucket = self._bucket(tick)
        return sum(self.sizes[:bucket]) + self.sizes[bucket] // 2

    def tick_at(self, depth: int, now: int) -> int:
        """The tick at which what lies so many bytes from the end was used; `now` if there is less."""
        for bucket, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size > depth:
                end = self.starts[bucket + 1] if bucket + 1 < len(self.starts) else now
                return start + (end - start) * depth // size
            depth -= size
        return now

    def _bucket(self, tick: int) -> int:
        return max(0, bisect_right(self.starts, tick) - 1)

    def _merge(self) -> None:
        """Join the two neighbours that hold the least, if there are too many."""
        if len(self.starts) > AGES_MAX:
            at = min(range(len(self.sizes) - 2), key=lambda one: self.sizes[one] + self.sizes[one + 1])
            self.sizes[at] += self.sizes.pop(at + 1)
            del self.starts[at + 1]
