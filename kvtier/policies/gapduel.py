"""GapDuel: leaf-first LRU that learns from shadow caches when to refuse newcomers and when to favour frequent blocks.

    rank of a resident run   last reference + beta · G · level/2
    rank of a newcomer       its reference - theta · its own gap + beta · G · level/2

A newcomer may evict the coldest resident only if it ranks higher: with theta = 1, only if that resident has been idle
for longer than the newcomer's own gap between references. Under thrashing, LRU would admit 240 blocks of a session that
returns after 60 s by evicting sessions idle for 10 s; this rule keeps the quick sessions and lets the slow ones miss.
G is the mean gap of requests that continue a chain, so no constant has a unit of time. Four shadows follow the rules
{0, 1.5} × {0, 1}; the real order follows the rule with the most recent hits. (0, 0) is leaf-first LRU, so where the
working set fits, GapDuel is LRU.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.errors import CorruptError
from kvtier.identity.keys import BlockKey
from kvtier.policies.parts import Part, levels_in, references_after
from kvtier.policies.run import Counts, Run, Standing, Stretch
from kvtier.policies.runs import MEMORY_MIN, MEMORY_PER_BLOCK, Ranking
from kvtier.policies.shadows import ChainReference, Duel, Rule
from kvtier.times import Mono

RULES: tuple[Rule, ...] = ((0.0, 0.0), (0.0, 1.0), (1.5, 0.0), (1.5, 1.0))
"""(beta, theta). Leaving the last out costs 0.9 points on chats, the first two 1.6."""

NEW_GAP = 8.0  # predicted gap of a chain never continued, in units of G; 4 … 16 alike
WINDOW_PER_BLOCK, WINDOW_MIN = 5, 20000  # references over which scores fade; 5,000 is too noisy
GAP_FIRST_S = 60.0  # G before the first reuse is seen
GAP_MIN_S = 1e-3
GAP_FADE = 0.999
LAG_MAX = 64  # requests that may wait for `train`; past it `reference` replays some, the more the more wait
REPLAYED_AT_ONCE = 16
_END = object()

_MAGIC = b"KVGAPDU2"
_HEAD = struct.Struct("<8sQdddIB")


class GapDuel(Ranking):
    """The rule above for a tier of `capacity` blocks. Starts as LRU and needs about one window to learn.

    Shadows replay requests in `train`, which the owner calls after it has answered. Where it does not, `reference`
    replays them, so the lag stays bounded.
    """

    def __init__(self, capacity: int, *, refuses: bool = True, rules: tuple[Rule, ...] = RULES) -> None:
        super().__init__(max(MEMORY_PER_BLOCK * capacity, MEMORY_MIN) - min(capacity, MEMORY_MIN), refuses=refuses)
        self._capacity = capacity
        self._duel = Duel(capacity, rules, _window(capacity))
        self._waiting: deque[ChainReference] = deque()
        self._training: Iterator[None] | None = None  # of the request before those
        self._resizing: Iterator[None] | None = None  # after that one
        self._gap_sum = 0.0
        self._gap_count = 0.0
        self._theta = 0.0

    @property
    def gap_s(self) -> float:
        """G: the fading mean of the gaps after which a chain was continued."""
        return self._gap_sum / self._gap_count if self._gap_count else GAP_FIRST_S

    def _refer(
        self, chain: list[BlockKey], old: list[Part], depth: int, mono_s: Mono
    ) -> tuple[list[BlockKey], Run, int]:
        referred = super()._refer(chain, old, depth, mono_s)
        if len(self._waiting) > LAG_MAX:
            self._replay(8 * (len(self._waiting) // LAG_MAX))
        return referred

    def resize(self, capacity: int) -> None:
        """The shadows follow in `train`, between two requests."""
        self._capacity = capacity
        self._resizing = self._duel.resize(capacity, _window(capacity))

    def train_steps(self) -> Iterator[None]:
        """Replay the waiting requests in the shadows: some 20 µs each. Under the owner's lock, after the request."""
        while self._replay(REPLAYED_AT_ONCE):
            yield

    def _replay(self, steps: int) -> bool:
        """Make so many steps, mostly a request each. Whether there may be more to do."""
        for _ in range(steps):
            if self._training is None:
                self._training, self._resizing = self._resizing, None
            if self._training is None:
                if not self._waiting:
                    return False
                self._training = self._duel.train(self._waiting.popleft())
            if next(self._training, _END) is _END:
                self._training = None
        return True

    def stats(self) -> dict[str, float]:
        """For metrics: the rule in force, every rule's score, switches, refused newcomers, G."""
        scores = {f"score_{number}": score for number, score in enumerate(self._duel.scores)}
        return {"rule": self._duel.best, "switches": self._duel.switches, "refused": self.refused, "gap_s": self.gap_s,
                **scores}  # fmt: skip

    def encode(self) -> bytes:
        """The learned state (not the residents), to survive a restart. Layout: _HEAD, f64 scores, XXH3-128."""
        scores = self._duel.scores
        head = _HEAD.pack(
            _MAGIC, self._capacity, self._gap_sum, self._gap_count, self._duel.lead, self._duel.best, len(scores)
        )
        body = head + struct.pack(f"<{len(scores)}d", *scores)
        return body + digest_of([body])

    def restore(self, raw: bytes) -> None:
        """Go on from what `encode` wrote, under the same or another capacity. Raises CorruptError, unchanged."""
        count = len(self._duel.scores)
        if len(raw) != _HEAD.size + 8 * count + DIGEST_BYTES:
            raise CorruptError(f"GapDuel's state has {_HEAD.size + 8 * count + DIGEST_BYTES} bytes, got {len(raw)}")
        magic, _, gap_sum, gap_count, lead, best, rules = _HEAD.unpack_from(raw)
        foreign = magic != _MAGIC or rules != count or best >= count
        if foreign or digest_of([raw[:-DIGEST_BYTES]]) != raw[-DIGEST_BYTES:]:
            raise CorruptError("not a state of GapDuel")
        self._gap_sum, self._gap_count, self._duel.best, self._duel.lead = gap_sum, gap_count, best, lead
        self._duel.scores = list(struct.unpack_from(f"<{count}d", raw, _HEAD.size))

    def check(self, resident: set[BlockKey]) -> None:
        super().check(resident)
        self.train()
        self._duel.check()

    def _cut(self, keys: list[BlockKey], old: list[tuple[Run | None, int]], mono_s: Mono) -> list[Stretch]:
        counts, known = references_after(old, keys)
        taken: list[tuple[Standing, int, int]] = []
        gaps: list[tuple[int, float]] = []  # (end depth, gap)
        depth, length = 0, 0
        for run, count in old:
            if depth >= known or run is None:
                break
            stop = min(depth + count, known)
            gap = max(GAP_MIN_S, mono_s - run.last)
            if gaps and gaps[-1][1] == gap:
                gaps[-1] = (stop, gap)
            else:
                gaps.append((stop, gap))
            if taken and taken[-1][0] is run.standing:  # several runs of one stretch
                taken[-1] = (taken[-1][0], taken[-1][1], stop)
            elif run.standing is not None:  # else it arrived before any reference named it
                taken.append((run.standing, depth, stop))
            depth, length = stop, run.length
        if known and known >= length - 1:  # the last request continued (its last block may have been partial)
            gap = gaps[-1][1]
            self._gap_sum = self._gap_sum * GAP_FADE + gap
            self._gap_count = self._gap_count * GAP_FADE + 1
            gaps[-1] = (len(keys), gap)
        elif known < len(keys):
            gaps.append((len(keys), NEW_GAP * self.gap_s))
        stretches = self._split(counts, gaps, mono_s)
        new = [(part.standing, part.start, part.stop) for part in stretches if part.standing is not None]
        self._waiting.append(ChainReference(mono_s, self.gap_s, len(keys), taken, new))
        beta, self._theta = self._duel.rules[self._duel.best]
        self._bonus_s = beta * self.gap_s
        return stretches

    def _split(self, counts: Counts, gaps: list[tuple[int, float]], mono_s: Mono) -> list[Stretch]:
        """One per stretch of equal level and equal gap."""
        stretches: list[Stretch] = []
        start, place, length = 0, 0, gaps[-1][0]
        for end, level in levels_in(counts):
            while start < end:
                stop, gap_s = min(end, gaps[place][0]), gaps[place][1]
                part = Stretch(start, stop, length, level, counts)
                part.gap_s = gap_s
                part.standing = Standing(level, mono_s, gap_s)
                stretches.append(part)
                start = stop
                if stop == gaps[place][0]:
                    place += 1
        return stretches

    def _yields(self, run: Run, claim: Run | None) -> bool:
        if not self._theta or (claim is not None and run.tick >= claim.tick):
            return True
        rank = run.last + self._bonus_s * run.level / 2
        if claim is None:
            return rank < self._mono_s - self._theta * NEW_GAP * self.gap_s
        return rank < claim.last - self._theta * claim.gap_s + self._bonus_s * claim.level / 2

    def _needed_depth(self, run: Run) -> int:
        return 0 if run.standing is None else self._duel.held(run.standing)


def _window(capacity: int) -> int:
    """References over which scores fade. Pure."""
    return max(WINDOW_PER_BLOCK * capacity, WINDOW_MIN)
