"""Token ranges become terms of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidRequest
from kvtier.retention.ranges import (
    RANGES_MAX,
    BlockTerms,
    ChainTerms,
    RequestTerms,
    TokenRange,
    fixed,
    request_terms,
    uniform,
)
from kvtier.retention.terms import BUILTIN, Depth, Terms

DAY, HOUR = BUILTIN["24h"], BUILTIN["1h"]
KEEP = Terms("keep", ttl=1000.0, guarantee=True)
FORGET = Terms("forget", ttl=500.0, max_age=50.0, ceiling=Depth.G3)


def block_terms(ranges: list[TokenRange], default: Terms, blocks: int, block_tokens: int) -> list[BlockTerms]:
    chain = ChainTerms(RequestTerms(default, tuple(ranges)), block_tokens)
    got = [terms for depth in range(blocks) for _, _, terms in chain.spans(depth, depth + 1)]
    spans = list(chain.spans(0, blocks))
    assert [terms for first, stop, terms in spans for _ in range(first, stop)] == got
    assert chain.only is None or got == [chain.only] * blocks
    return got


def test_a_range_covers_a_block_by_its_last_token() -> None:
    got = block_terms([TokenRange(0, 31, DAY)], HOUR, blocks=3, block_tokens=16)
    assert [b.terms for b in got] == [DAY, HOUR, HOUR]
    assert [b.terms for b in block_terms([TokenRange(0, 32, DAY)], HOUR, 3, 16)] == [DAY, DAY, HOUR]


def test_overlaps_keep_longest_and_forget_soonest() -> None:
    (block,) = block_terms([TokenRange(0, 16, KEEP), TokenRange(0, 16, FORGET)], HOUR, 1, 16)
    assert (block.terms.ttl, block.terms.max_age, block.terms.ceiling) == (1000.0, 50.0, Depth.G3)
    assert block.terms.guarantee and block.guarantee_s == 1000.0


def test_of_two_ages_the_shorter_counts() -> None:
    ages = [TokenRange(0, 16, Terms(name, ttl=9.0, max_age=age)) for name, age in (("a", 70.0), ("b", 50.0))]
    (block,) = block_terms(ages, HOUR, 1, 16)
    assert block.terms.max_age == 50.0


def test_a_guarantee_reaches_the_root_and_not_beyond_its_end() -> None:
    got = block_terms([TokenRange(32, 48, KEEP)], Terms("short", ttl=10.0), blocks=5, block_tokens=16)
    assert [b.guarantee_s for b in got] == [1000.0, 1000.0, 1000.0, 0.0, 0.0]
    assert [b.terms.ttl for b in got] == [1000.0, 1000.0, 1000.0, 10.0, 10.0]


def test_isolation_is_of_the_whole_request() -> None:
    alone = BUILTIN["in_memory"]
    assert RequestTerms(DAY, (TokenRange(0, 16, alone),)).isolated == "in_memory"
    assert RequestTerms(DAY).isolated == ""
    with pytest.raises(InvalidRequest, match="several classes: in_memory, other"):
        block_terms([TokenRange(0, 16, alone)], Terms("other", isolate=True), 1, 16)


def test_bad_ranges_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty or negative"):
        TokenRange(5, 5, DAY)
    with pytest.raises(InvalidRequest, match=f"at most {RANGES_MAX}"):
        block_terms([TokenRange(0, 1, DAY)] * (RANGES_MAX + 1), DAY, 1, 16)


def test_callers_name_classes_and_ranges() -> None:
    classes = (*BUILTIN.values(), KEEP)
    assert request_terms(None, classes, "24h") == RequestTerms(DAY)
    assert request_terms("1h", classes, "24h") == RequestTerms(HOUR)
    assert request_terms(KEEP, (), "24h") == RequestTerms(KEEP)
    assert request_terms([(0, 64, "keep")], classes, "1h") == RequestTerms(HOUR, (TokenRange(0, 64, KEEP),))
    for wrong in ([(0, 64)], [(0, "64", "1h")], ["1h"], [(0, 64, 3)], [(0, 64, "2h")]):
        with pytest.raises(InvalidRequest):
            request_terms(wrong, classes, "24h")  # type: ignore[arg-type]


def test_a_priority_reaches_the_root() -> None:
    high = Terms("high", ttl=10.0, priority=90)
    got = block_terms([TokenRange(32, 48, high)], HOUR, blocks=4, block_tokens=16)
    assert [b.terms.priority for b in got] == [90, 90, 90, 50]


RANGE = st.builds(
    lambda start, length, terms: TokenRange(start, start + length, terms),
    st.integers(0, 100),
    st.integers(1, 100),
    st.sampled_from([DAY, HOUR, KEEP, FORGET]),
)


@given(st.lists(RANGE, max_size=6), st.integers(1, 12))
def test_guarantees_never_grow_along_the_chain(ranges: list[TokenRange], blocks: int) -> None:
    got: list[BlockTerms] = block_terms(ranges, HOUR, blocks, 16)
    assert len(got) == blocks
    strengths = [b.guarantee_s for b in got]
    assert strengths == sorted(strengths, reverse=True)
    for index, block in enumerate(got):
        last = index * 16 + 15
        for r in ranges:
            if r.start <= last < r.stop and r.terms.max_age is not None:
                assert block.terms.max_age is not None and block.terms.max_age <= r.terms.max_age
        assert block.terms.guarantee == (block.guarantee_s > 0)
        assert block.terms.ttl is None or block.terms.ttl >= block.guarantee_s


def test_terms_of_a_request_are_taken_as_they_are() -> None:
    terms = RequestTerms(DAY, (TokenRange(0, 16, HOUR),))
    assert request_terms(terms, (), "1h") is terms
    assert request_terms(KEEP, (), "1h").default is KEEP
    with pytest.raises(InvalidRequest, match="named by a string, got int"):
        request_terms([(0, 16, 3)], BUILTIN.values(), "1h")  # type: ignore[list-item]


def test_a_chain_without_its_guarantees_is_kept_as_long() -> None:
    chain = ChainTerms(RequestTerms(HOUR, (TokenRange(0, 16, KEEP),)), 16)
    plain = chain.unguaranteed()
    assert chain.guarantees and not plain.guarantees and plain.only is None
    spans = [list(each.spans(0, 3)) for each in (chain, plain)]
    assert [(a, b, t.terms) for a, b, t in spans[0]] == [(a, b, t.terms) for a, b, t in spans[1]]
    assert [t.guarantee_s for _, _, t in spans[1]] == [0.0, 0.0]
    alike = uniform(KEEP).unguaranteed()
    assert alike.only is not None and alike.only.guarantee_s == 0.0


def test_fixed_terms_reserve_for_so_long_and_are_not_renewed() -> None:
    chain = fixed(90.0)
    ((_, _, terms),) = chain.spans(0, 1000)
    assert terms is chain.only and chain.guarantees
    assert terms.guarantee_s == 90.0 and terms.terms.ttl == 90.0 and not terms.renewed
