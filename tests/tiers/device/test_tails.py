"""Tails: the most shared tokens, by comparison; bounded."""

from __future__ import annotations

import random

import pytest

from kvtier.errors import ConfigError
from kvtier.identity.keys import SHARED, BlockKey, Scope
from kvtier.tiers.device.tails import Tails, tail_key


def key(number: int) -> BlockKey:
    return BlockKey(SHARED + number.to_bytes(32, "big"))


def test_the_most_shared_tokens_are_found_as_by_brute_force() -> None:
    rng = random.Random(3)
    for _ in range(300):
        tails = Tails(4)
        known = [(number, [rng.randrange(2) for _ in range(rng.randint(1, 6))]) for number in range(rng.randint(1, 8))]
        for number, tokens in known:
            tails.add(key(99), tokens, key(number))
        gone = {number for number, _ in known if rng.random() < 0.3}
        wanted = [rng.randrange(2) for _ in range(rng.randint(0, 6))]
        shared = {
            number: max(count for count in range(7) if tokens[:count] == wanted[:count] and count <= len(tokens))
            for number, tokens in known if number not in gone
        }  # fmt: skip
        shared = {number: min(count, len(wanted)) for number, count in shared.items()}
        here = {key(number) for number, _ in known if number not in gone}
        found = tails.longest(key(99), wanted, here.__contains__)
        most = max(shared.values(), default=0)
        assert (found[1] if found else 0) == most
        if found:
            assert found[0] in {key(number) for number, count in shared.items() if count == most}
        tails.check()


def test_the_latest_are_remembered() -> None:
    tails = Tails(2)
    for number in range(3):
        tails.add(key(number), [1], key(10 + number))
    assert len(tails) == 2 and tails.longest(key(0), [1], lambda one: True) is None
    for number in range(20):
        tails.add(key(2), [number], key(100 + number))
    assert tails.longest(key(2), [11], lambda one: True) is None
    assert tails.longest(key(2), [12], lambda one: True) == (key(112), 1)
    assert tails.longest(key(2), [12], lambda one: False) is None and len(tails) == 1, "forgotten: none is here"
    tails.check()


def test_names_depend_on_parent_tenant_and_tokens() -> None:
    other = BlockKey(b"t" * 16 + bytes(32))
    names = {tail_key(parent, tokens) for parent in (key(1), key(2), other) for tokens in ((1,), (1, 2), (2, 1))}
    assert len(names) == 9 and tail_key(other, (1,)).startswith(b"t" * 16)


def test_none_at_all_is_refused() -> None:
    with pytest.raises(ConfigError):
        Tails(0)


def test_a_purge_forgets_a_scopes_tokens_and_no_others() -> None:
    tails = Tails(8)
    mine = BlockKey(bytes([7]) * len(SHARED) + bytes(32))
    tails.add(mine, [1, 2], BlockKey(mine[:-1] + b"\1"))
    tails.add(key(1), [1, 2], key(2))
    tails.purge(Scope(mine[: len(SHARED)]))
    assert len(tails) == 1 and tails.longest(mine, [1], lambda _: True) is None
    assert tails.longest(key(1), [1], lambda _: True) == (key(2), 1)
    tails.check()
