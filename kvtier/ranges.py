"""Terms of token ranges: what one request asks for its parts, as terms of its blocks.

A range covers a block if it covers the block's last token. Where ranges overlap, the block gets the longer ttl and
guarantee, the shorter max_age and the shallower ceiling: a promise to keep and a promise to forget both hold. A
guarantee of a block is worth nothing without its parents, so it extends to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.errors import InvalidRequest
from kvtier.terms import Terms

RANGES_MAX = 64


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens start … stop-1 of a request under `terms`."""

    start: int
    stop: int
    terms: Terms

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidRequest(f"token range {self.start} … {self.stop} is empty or negative")


@dataclass(frozen=True, slots=True)
class BlockTerms:
    """What one block was asked for. `guarantee_s`: its bytes are to be reserved for this long after each use."""

    terms: Terms
    guarantee_s: float = 0.0


def block_terms(ranges: Sequence[TokenRange], default: Terms, blocks: int, block_tokens: int) -> list[BlockTerms]:
    """Per block of a request, from the root on; `default` where no range covers it. Pure.

    Raises InvalidRequest for more than RANGES_MAX ranges, or for two isolated classes in one request: isolation is
    of the whole chain, since its blocks name one another.
    """
    if len(ranges) > RANGES_MAX:
        raise InvalidRequest(f"{len(ranges)} token ranges in one request, at most {RANGES_MAX} are allowed")
    isolated_class(ranges, default)
    out: list[BlockTerms] = []
    for index in range(blocks):
        last = (index + 1) * block_tokens - 1
        covering = [r.terms for r in ranges if r.start <= last < r.stop] or [default]
        out.append(BlockTerms(_merge(covering), max((_guarantee(t) for t in covering), default=0.0)))
    strongest = 0.0
    for index in range(blocks - 1, -1, -1):
        strongest = max(strongest, out[index].guarantee_s)
        if strongest > out[index].guarantee_s:
            terms = out[index].terms
            ttl = None if terms.ttl is None else max(terms.ttl, strongest)
            out[index] = BlockTerms(replace(terms, ttl=ttl, guarantee=True), strongest)
    return out


def isolated_class(ranges: Sequence[TokenRange], default: Terms) -> str:
    """The isolated class that enters the request's scope; empty if none does. Raises InvalidRequest for two."""
    names = sorted({terms.name for terms in [default, *(r.terms for r in ranges)] if terms.isolate})
    if len(names) > 1:
        raise InvalidRequest(f"one request cannot be isolated in several classes: {', '.join(names)}")
    return names[0] if names else ""


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
