"""Tokens that requests computed although an earlier one had had them: which, why, and at what price. Pure.

Two causes: the prompts part, so that what they have in common behind that place has other names; or they agree, and the
blocks were not there any more.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvtier.journal.parting import Hashes, Parting, Tokens, agreed, part, sampled_runs, tokens_of
from kvtier.journal.served import Remembered

SKETCH = 64
"""Runs of a prompt that stand for it, those of the lowest hashes: two prompts share them as they share text."""

NEIGHBOURS = 4
"""Latest earlier prompts with the same run that are looked at."""

TOP = 10
_TAIL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """What one request computed again. `same`: tokens that it has in common with the earlier request from the first on;
    `parting` None where only names of blocks are known. `parted` tokens lie behind the place where they part, for this
    `cause`; `gone` ones before it, and no tier gave them, for the reason `why`."""

    later: Remembered
    earlier: Remembered
    same: int
    parting: Parting | None
    cause: str
    parted: int
    gone: int
    why: str


@dataclass(slots=True)
class CostlyBreak:
    """Losses with the same cause at the same place. `prefix`: short name of what the prompts have in common."""

    prefix: str
    cause: str
    same_tokens: int
    requests: int = 0
    lost_tokens: int = 0
    lost_seconds: float | None = None
    latest: str = ""


def sketch_of(tokens: Tokens) -> Hashes:
    """The lowest hashes of its runs, SKETCH of them at most, ascending."""
    _, hashes = sampled_runs(tokens, 1 if len(tokens) < 16 * SKETCH else 8)
    return np.unique(hashes)[:SKETCH]


def nearest(latest: Sequence[Remembered], rest: Callable[[], None] = lambda: time.sleep(0)) -> list[int | None]:
    """For each request the earlier one whose prompt has most in common with it: which agrees in most blocks from the
    first on; of equals, the one that is most like it. None: none has an eighth of it. `rest` is called between two."""
    alike, agreeing = _most_alike(latest, rest), _longest_agreed(latest)
    best: list[int | None] = []
    for later, (number, other) in enumerate(zip(alike, agreeing, strict=True)):
        if number is None or other is None:
            best.append(other if number is None else number)
            continue
        blocks = [_agreed_in_scope(latest[earlier], latest[later]) for earlier in (number, other)]
        best.append(other if blocks[1] > blocks[0] else number)
    return best


def _most_alike(latest: Sequence[Remembered], rest: Callable[[], None]) -> list[int | None]:
    """By runs of tokens, wherever they lie; one that many prompts have says little."""
    runs: list[Hashes] = [np.empty(0, np.uint64)]
    owners: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for number, one in enumerate(latest):
        runs.append(found := sketch_of(tokens_of(one.tokens)))
        owners.append(np.full(len(found), number, np.int64))
        rest()
    hashes, numbers = np.concatenate(runs), np.concatenate(owners)
    order = np.lexsort((numbers, hashes))
    hashes, numbers = hashes[order], numbers[order]
    _, which, holders = np.unique(hashes, return_inverse=True, return_counts=True)
    telling = 1.0 / holders[which]
    pairs, weights = [np.empty(0, np.int64)], [np.empty(0)]
    for step in range(1, NEIGHBOURS + 1):
        equal = hashes[step:] == hashes[:-step]
        pairs.append(numbers[step:][equal] * len(latest) + numbers[:-step][equal])
        weights.append(telling[step:][equal])
    codes, place, counts = np.unique(np.concatenate(pairs), return_inverse=True, return_counts=True)
    sums = np.bincount(place, np.concatenate(weights), len(codes))
    best: list[int | None] = [None] * len(latest)
    most = [0.0] * len(latest)
    for code, count, weight in zip(codes.tolist(), counts.tolist(), sums.tolist(), strict=True):
        later, earlier = divmod(code, len(latest))
        if count >= SKETCH // 8 and weight >= 0.999 * most[later]:  # of equals the later one
            best[later], most[later] = earlier, weight
    return best


def _longest_agreed(latest: Sequence[Remembered]) -> list[int | None]:
    """By names of blocks from the first on, of the same scope; in blocks, an eighth of the prompt at least."""
    order = sorted(range(len(latest)), key=lambda number: (latest[number].served.scope, latest[number].tails))
    right = dict(pairwise(order))
    left = {two: one for one, two in right.items()}
    blocks = {two: _agreed_in_scope(latest[one], latest[two]) for two, one in left.items()}  # with its left neighbour
    best: list[int | None] = [None] * len(latest)
    for number in reversed(range(len(latest))):  # its neighbours among those that are left are all earlier
        one, other = left.get(number), right.get(number)
        with_one, with_other = blocks.get(number, 0), blocks.get(other, 0) if other is not None else 0
        most = max(with_one, with_other)
        if most and most * 8 >= len(latest[number].tails) // _TAIL_BYTES:
            best[number] = (
                one if one is not None and (with_one, one) > (with_other, -1 if other is None else other) else other
            )
        if other is not None:
            left.pop(other)
            blocks.pop(other)
            if one is not None:
                left[other], blocks[other] = one, min(with_one, with_other)
        if one is not None:
            right.pop(one)
            if other is not None:
                right[one] = other
    return best


def _agreed_in_scope(one: Remembered, other: Remembered) -> int:
    return _agreed_blocks(one.tails, other.tails) if one.served.scope == other.served.scope else 0


def loss_of(earlier: Remembered, later: Remembered, block_tokens: int) -> Loss:
    """What `later` computed that `earlier` had had."""
    blocks = _agreed_in_scope(earlier, later)
    one_scope = earlier.served.scope == later.served.scope
    given = sum(later.served.given.values())
    readable = max(0, later.served.input_tokens - 1) // block_tokens * block_tokens  # the last token is computed
    if not (earlier.tokens and later.tokens):
        same = blocks * block_tokens
        ended = blocks * 8 >= min(len(earlier.tails), len(later.tails))
        gone = max(0, min(same, readable) - given)
        return Loss(later, earlier, same, None, "none" if ended else "changed", 0, gone, later.served.why)
    one, two = tokens_of(earlier.tokens), tokens_of(later.tokens)
    parting = part(one, two)
    same, named = parting.same, blocks * block_tokens
    parted = parting.shared // block_tokens * block_tokens
    cause = parting.cause
    if not one_scope:
        cause, parted = "other_scope", max(0, min(same, readable) - given)
    elif same // block_tokens * block_tokens > min(named, len(later.tails) // 8 * block_tokens):
        cause, parted = "other_contents", max(0, min(same, readable) - max(named, given))
    elif same in (len(one), len(two)):
        cause, parted = "none", 0
    gone = max(0, min(named, readable) - given)
    return Loss(later, earlier, same, parting, cause, parted, gone, later.served.why)


def _agreed_blocks(one: bytes, other: bytes) -> int:
    return agreed(np.frombuffer(one, np.uint64), np.frombuffer(other, np.uint64))


def losses(
    latest: Sequence[Remembered], block_tokens: int, rest: Callable[[], None] = lambda: time.sleep(0)
) -> Iterator[Loss]:
    """Of each request that has an earlier one like it."""
    for number, earlier in enumerate(nearest(latest, rest)):
        rest()
        if earlier is not None:
            yield loss_of(latest[earlier], latest[number], block_tokens)


def prefix_name(one: Remembered, blocks: int, secret: bytes) -> str:
    """A short name of the prompt's first blocks, 0 of them included; of the scope, too."""
    head = one.tails[: blocks * _TAIL_BYTES]
    return hashlib.blake2b(one.served.scope + head, key=secret, digest_size=4).hexdigest()


def dearest(found: Iterator[Loss], block_tokens: int, block_s: float | None, secret: bytes) -> list[CostlyBreak]:
    """The breaks that cost most tokens, TOP of them at most. `block_s`: seconds that a block takes to compute."""
    breaks: dict[tuple[str, str], CostlyBreak] = {}
    for loss in found:
        blocks = loss.same // block_tokens
        for cause, tokens in ((loss.cause, loss.parted), (loss.why or "not_read", loss.gone)):
            if tokens <= 0:
                continue
            # What was not there any more is told by prompts' beginnings: it may end anywhere.
            name = prefix_name(loss.later, blocks if cause == loss.cause else 1, secret)
            row = breaks.setdefault((name, cause), CostlyBreak(name, cause, loss.same))
            row.requests += 1
            row.lost_tokens += tokens
            row.latest = loss.later.served.name
            row.same_tokens = min(row.same_tokens, loss.same)
    rows = sorted(breaks.values(), key=lambda row: -row.lost_tokens)[:TOP]
    for row in rows:
        row.lost_seconds = None if block_s is None else round(row.lost_tokens / block_tokens * block_s, 3)
    return rows
