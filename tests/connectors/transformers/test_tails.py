"""Prompts that part inside of a block share its first tokens, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.connectors.transformers import PrefixCache
from tests.connectors.transformers.support.models import computed, gemma3, generate, held, llama, prompt

torch = pytest.importorskip("torch")


def stored(prefixes: PrefixCache, ids: Any, new: int = 4, **options: Any) -> Any:
    cache, _ = prefixes.fetch(ids, **options)
    output = generate(prefixes.model, ids, cache, new)
    prefixes.store(output, cache, attention_mask=torch.ones_like(output), **options)
    prefixes.check()
    return output


def leading(cache: Any, tokens: int) -> list[Any]:
    """Keys and values of the first tokens, layer by layer."""
    return [(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone()) for layer in cache.layers]


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 40, 47, 53, 54])
def test_any_number_of_tokens_is_reused(config: Any, model: Any, shared: int) -> None:
    """Of a prompt of 52 tokens and an answer of 4 the cache holds 55: three blocks and a tail of 7."""
    ids = prompt(52)
    with PrefixCache(config(), model, tiers=[], tails=16) as prefixes:
        cache, _ = prefixes.fetch(ids)
        output = generate(model, ids, cache, 4)
        own = leading(cache, shared)
        prefixes.store(output, cache, attention_mask=torch.ones_like(output))
        other = torch.cat([output[:, :shared], 511 - output[:, shared : shared + 1], prompt(30, seed=9)], dim=1)
        cache, hit = prefixes.fetch(other)
        assert hit == shared == cache.get_seq_length()
        assert same(leading(cache, shared), own)
        assert not same(leading(computed(model, prompt(80, seed=11), [80]), shared), own)
        assert sum(prefixes.served.values()) == 52 + other.shape[1]
        fresh = generate(model, other, cache)
        prefixes.store(fresh, cache, attention_mask=torch.ones_like(fresh))
        again, hit = prefixes.fetch(other)
        assert hit == other.shape[1] - 1, "its last token is computed"
        assert same(leading(again, shared), own)
        assert torch.equal(generate(model, other, again), fresh)


def test_without_them_a_prefix_ends_with_a_block(config: Any, model: Any) -> None:
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        output = stored(prefixes, prompt(52))
        assert prefixes.fetch(output)[1] == 48


def test_other_bytes_in_the_tail_change_the_cache(config: Any, model: Any) -> None:
    """Control."""
    with PrefixCache(config(), model, tiers=[], tails=16) as prefixes:
        output = stored(prefixes, prompt(52))
        own = leading(prefixes.fetch(output)[0], 55)
        prefixes.pool.rows[:] = prefixes.pool.rows.roll(64, dims=1)
        assert prefixes.fetch(output)[1] == 55 and not same(leading(prefixes.fetch(output)[0], 55), own)


def test_tenants_terms_and_purges_hold_for_tails(config: Any, model: Any, clock: Any) -> None:
    ids = prompt(52)
    with PrefixCache(config(), model, tiers=[], clock=clock, tails=16) as prefixes:
        output = stored(prefixes, ids, salt="alice", retention="5m")
        assert prefixes.fetch(output, salt="bob")[1] == 0 == prefixes.fetch(output)[1]
        assert prefixes.fetch(output, salt="alice", retention="in_memory")[1] == 0, "a scope of its own"
        assert prefixes.fetch(output, salt="alice")[1] == 55
        clock.advance(301)
        assert prefixes.fetch(output, salt="alice")[1] == 0
        stored(prefixes, ids, salt="alice")
        assert prefixes.fetch(output, salt="alice")[1] == 55
        stored(prefixes, ids, salt="bob")
        before = len(prefixes._tails)  # type: ignore[arg-type]
        prefixes.purge("alice")
        assert len(prefixes._tails) == before // 2, "her tokens are forgotten, too"  # type: ignore[arg-type]
        assert prefixes.fetch(output, salt="bob")[1] == 55
        prefixes.purge("bob")
        assert prefixes.fetch(output, salt="alice")[1] == 0 and prefixes.pool.resident == 0


@pytest.mark.parametrize("make", [llama, gemma3])
def test_what_may_have_been_purged_is_not_served_from_the_pool(
    config: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """security.purge: strict, and the purge log was not read within the bound."""
    with PrefixCache(config(g1=200), make(), tiers=[], tails=16) as prefixes:
        output = stored(prefixes, prompt(52))
        known = prefixes.fetch(output)[1]
        with monkeypatch.context() as patch:
            patch.setattr(type(prefixes.cache.manager.hierarchy), "unproven", True)
            cache, hit = prefixes.fetch(output, advance=False)
            assert known >= 48 and hit == 0 == cache.get_seq_length()
        assert prefixes.fetch(output)[1] == known


def test_a_tail_leaves_with_its_slot_and_reaches_no_lower_tier(config: Any, model: Any) -> None:
    with PrefixCache(config(), model, tails=16) as prefixes:
        output = stored(prefixes, prompt(52))
        prefixes.flush()
        prefixes.pool.evict()
        cache, hit = prefixes.fetch(output)
        assert hit == 48 == cache.get_seq_length()


def test_windows_have_no_tails(config: Any) -> None:
    model, ids = gemma3(), prompt(52)
    with PrefixCache(config(), model, tiers=[], tails=16) as prefixes:
        output = stored(prefixes, ids)
        cache, hit = prefixes.fetch(output[:, :51])
        assert hit == 48 and held(cache) == held(computed(model, output, [48]))
