"""What is remembered of requests is bounded, goes with a purge, and is nothing while nobody can ask."""

from __future__ import annotations

import asyncio
from typing import Any

from kvtier.identity.keys import BlockKey, Scope, make_keys, scope_of
from kvtier.journal.journal import NAME_CHARS_MAX, Journal
from kvtier.journal.served import ServedRequest
from kvtier.times import Wall

ONE, OTHER = scope_of("one"), scope_of("other")


def prompt(scope: Scope, blocks: int) -> list[BlockKey]:
    return make_keys(scope, [number.to_bytes(32, "big") for number in range(blocks)])


def request(name: str, scope: Scope = ONE, at_s: float = 1.0) -> ServedRequest:
    return ServedRequest(name, scope, at_s, 40)


async def names(journal: Journal) -> list[str]:
    await asyncio.sleep(0)
    return [one.served.name for one in journal.latest()]


async def test_it_is_off_until_it_is_opened() -> None:
    journal = Journal(16)
    journal.record(request("a"), prompt(ONE, 2), range(40))
    assert not journal.active and await names(journal) == []
    journal.open()
    journal.record(request("b"), prompt(ONE, 2), range(40))
    assert await names(journal) == ["b"]
    (kept,) = journal.latest()
    assert kept.tokens.tolist() == list(range(40)) and kept.tails == b"".join(k[-8:] for k in prompt(ONE, 2))


async def test_requests_and_tokens_are_bounded() -> None:
    journal = Journal(16, requests_max=4, tokens_max=200)
    journal.open()
    for number in range(9):
        journal.record(request(f"r{number}"), prompt(ONE, 2), range(40))
    assert await names(journal) == ["r5", "r6", "r7", "r8"]
    journal.record(request("long"), prompt(ONE, 10), range(160))
    assert await names(journal) == ["r8", "long"]
    journal.record(request("too long"), prompt(ONE, 13), range(208))
    journal.record(request("too many names"), prompt(ONE, 13))
    journal.record(request("too short"), (), range(8))
    assert await names(journal) == ["r8", "long"]
    for number in range(3):
        journal.record(request(f"n{number}"), prompt(ONE, 4))
    assert await names(journal) == ["n0", "n1", "n2"]


async def test_a_purge_is_one_of_the_journal_too() -> None:
    journal = Journal(16)
    journal.open()
    for scope, name in ((ONE, "one"), (OTHER, "other"), (scope_of("one", b"adapter"), "adapter")):
        journal.record(request(name, scope), prompt(scope, 2), range(40))
    assert await names(journal) == ["one", "other", "adapter"]
    journal.record(request("of a clock that is ahead", ONE, at_s=7.0), prompt(ONE, 2), range(40))
    await asyncio.sleep(0)
    journal.purge({ONE: Wall(5.0)})
    assert await names(journal) == ["other"]
    journal.record(request("under way", ONE, at_s=4.0), prompt(ONE, 2), range(40))
    journal.record(request("later", ONE, at_s=6.0), prompt(ONE, 2), range(40))
    assert await names(journal) == ["other", "later"]
    journal.purge({scope_of(None): Wall(9.0)})
    assert await names(journal) == ["other", "later"]


async def test_a_name_is_cut() -> None:
    """Clients may choose it."""
    journal = Journal(16)
    journal.open()
    journal.record(request("x" * 100_000), prompt(ONE, 2), range(40))
    assert [len(name) for name in await names(journal)] == [NAME_CHARS_MAX]


async def test_tokens_that_are_none_are_left_out() -> None:
    journal, odd = Journal(16), list[Any]()
    journal.open()
    for tokens in ([-1, 2], [1 << 40], ["text"], [None]):
        odd = tokens
        journal.record(request("odd"), prompt(ONE, 2), odd)
    assert await names(journal) == ["odd"] * 4 and not any(one.tokens for one in journal.latest())
