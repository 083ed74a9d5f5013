"""Terms by token range: one request's retention of its parts, as terms of its blocks.

A range covers a block if it covers the block's last token. Where ranges overlap, the block gets the longer ttl and
guarantee, the shorter max_age and the shallower ceiling: the duty to retain and the duty to forget both hold. The
guarantee or priority of a block is worth nothing without its parents, so both extend to the root.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import InvalidRequest
from kvtier.retention.terms import Terms, resolve

RANGES_MAX = 64


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens start … stop-1 of a request under `terms`."""

    start: int
    stop: int
    terms: Terms

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidRequest("a token range is empty or negative")


@dataclass(frozen=True, slots=True)
class BlockTerms:
    """The terms of one block. `guarantee_s`: its bytes are to be reserved for this long after each use, or from now on
    where uses do not renew that."""

    terms: Terms
    guarantee_s: float = 0.0
    renewed: bool = True


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """The terms of one request: `default` where no range covers a token.

    Raises InvalidRequest for more than RANGES_MAX ranges, or for two isolated classes in one request: isolation is
    of the whole chain, since its blocks name one another.
    """

    default: Terms
    ranges: tuple[TokenRange, ...] = ()

    def __post_init__(self) -> None:
        _check_count(len(self.ranges))
        _ = self.isolated

    @property
    def isolated(self) -> str:
        """The isolated class that enters the request's scope; empty if none does."""
        names = sorted({terms.name for terms in (self.default, *(r.terms for r in self.ranges)) if terms.isolate})
        if len(names) > 1:
            raise InvalidRequest(f"one request cannot be isolated in several classes: {', '.join(names)}")
        return names[0] if names else ""


def _check_count(ranges: int) -> None:
    if ranges > RANGES_MAX:
        raise InvalidRequest(f"{ranges} token ranges in one request, at most {RANGES_MAX} are allowed")


Wanted = str | Terms | RequestTerms | Sequence[tuple[int, int, str | Terms]] | None
"""As callers give it: a class by name or value, or `(start, stop, class)` per token range; None: the default."""


def request_terms(wanted: Wanted, classes: Iterable[Terms], default: str) -> RequestTerms:
    """`wanted` as a value; tokens in no range, and requests without a class, are of the class `default`. Pure.

    Raises InvalidRequest that names the fault.
    """
    known = tuple(classes)
    if isinstance(wanted, RequestTerms):
        return wanted
    if wanted is None or isinstance(wanted, str | Terms):
        return RequestTerms(_class(wanted or default, known))
    if not isinstance(wanted, Sequence):
        raise InvalidRequest(f"retention is a class or a list of token ranges, got {type(wanted).__name__}")
    _check_count(len(wanted))
    ranges = []
    for item in wanted:
        if not isinstance(item, tuple | list) or len(item) != 3 or not all(type(n) is int for n in item[:2]):
            raise InvalidRequest("a token range is (start, stop, retention class), such as (0, 4096, '24h')")
        ranges.append(TokenRange(item[0], item[1], _class(item[2], known)))
    return RequestTerms(_class(default, known), tuple(ranges))


def _class(given: object, known: tuple[Terms, ...]) -> Terms:
    if isinstance(given, Terms):
        return given
    if not isinstance(given, str):
        raise InvalidRequest(f"a retention class is named by a string, got {type(given).__name__}")
    return resolve(given, known)


class ChainTerms:
    """A request's terms by depth in its chain, however long that grows. Immutable; O(log ranges) per depth."""

    __slots__ = ("_starts", "_terms", "ceiling", "guarantees", "only")

    def __init__(self, request: RequestTerms, block_tokens: int) -> None:
        ranges = [(r.start // block_tokens, r.stop // block_tokens, r.terms) for r in request.ranges]
        starts = sorted({0, *(edge for first, stop, _ in ranges if first < stop for edge in (first, stop))})
        terms: list[BlockTerms] = []
        for depth in starts:
            covering = [t for first, stop, t in ranges if first <= depth < stop] or [request.default]
            terms.append(BlockTerms(_merge(covering), max(map(_guarantee, covering))))
        self._starts, self._terms = starts, _extended_to_root(terms)
        self.only = self._terms[0] if len(self._terms) == 1 else None  # where all blocks are alike
        self.guarantees = self._terms[0].guarantee_s > 0
        self.ceiling = min(block.terms.ceiling for block in self._terms)  # the nearest of all blocks'

    def unguaranteed(self) -> ChainTerms:
        """The same without guarantees."""
        other = copy.copy(self)
        other._terms = [BlockTerms(block.terms) for block in self._terms]
        other.only, other.guarantees = other._terms[0] if len(other._terms) == 1 else None, False
        return other

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, BlockTerms]]:
        """Depths start … stop-1 cut where the terms change."""
        while start < stop:
            place = bisect_right(self._starts, start)
            end = min(stop, self._starts[place]) if place < len(self._starts) else stop
            yield start, end, self._terms[place - 1]
            start = end


def uniform(terms: Terms) -> ChainTerms:
    """The same terms for every block."""
    return ChainTerms(RequestTerms(terms), 1)


def fixed(seconds: float) -> ChainTerms:
    """Terms that reserve the bytes of every block for so long from now on, whatever uses there are, and say no more."""
    terms = uniform(Terms("kept", ttl=seconds, guarantee=True))
    terms.only = BlockTerms(terms._terms[0].terms, seconds, renewed=False)
    terms._terms = [terms.only]
    return terms


def _extended_to_root(terms: Sequence[BlockTerms]) -> list[BlockTerms]:
    out: list[BlockTerms] = []
    strongest, priority = 0.0, 0
    for block in reversed(terms):
        own = block.terms
        strongest, priority = max(strongest, block.guarantee_s), max(priority, own.priority)
        if strongest > block.guarantee_s:
            own = replace(own, ttl=None if own.ttl is None else max(own.ttl, strongest), guarantee=True)
        if priority > own.priority:
            own = replace(own, priority=priority)
        out.append(BlockTerms(own, strongest))
    return out[::-1]


def _guarantee(terms: Terms) -> float:
    return (terms.ttl or 0.0) if terms.guarantee else 0.0


def _merge(several: Sequence[Terms]) -> Terms:
    if len(several) == 1:
        return several[0]
    ttls = [terms.ttl for terms in several]
    ages = [terms.max_age for terms in several if terms.max_age is not None]
    return Terms(
        name="+".join(sorted({terms.name for terms in several})),
        ttl=None if None in ttls else max(ttl for ttl in ttls if ttl is not None),
        max_age=min(ages) if ages else None,
        guarantee=any(terms.guarantee for terms in several),
        ceiling=min(terms.ceiling for terms in several),
        priority=max(terms.priority for terms in several),
        isolate=any(terms.isolate for terms in several),
    )
