"""Models with sliding windows or recurrent states: what is restored at a boundary is what the model itself has there,
every byte of every layer; tokens are those of the same boundary in memory. Each comparison has a control that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvtier
from kvtier.connectors.transformers import PrefixCache
from kvtier.testing import MemoryTier, VirtualClock
from tests.connectors.transformers.support.models import (
    computed,
    gemma3,
    generate,
    held,
    prompt,
    qwen3_next,
)

torch = pytest.importorskip("torch")

KINDS = {"window": gemma3, "state": qwen3_next}
TITLES = {"window": "window 40", "state": "state"}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(kind: str, one_thread: None) -> Any:
    return KINDS[kind]()


def turn(prefixes: PrefixCache, ids: Any, new: int = 24, **options: Any) -> tuple[Any, int]:
    """One request: its output, and the tokens that were not computed."""
    cache, hit = prefixes.fetch(ids, **options)
    output = generate(prefixes.model, ids, cache, new)
    prefixes.store(output, cache, attention_mask=torch.ones_like(output), **options)
    prefixes.check()
    return output, hit


def boundary_chain(prefixes: PrefixCache, ids: Any, boundary: int) -> list[bytes]:
    """Names of the blocks that the other groups need at a boundary."""
    chain = prefixes.cache.chain_hashes(ids[0][:boundary])
    return list(prefixes._boundaries._keys(chain, boundary // 16))  # type: ignore[arg-type]


def below(prefixes: PrefixCache, name: str) -> None:
    """Leave the blocks in one tier and those below it."""
    for tier in ("g1", "g2", "g3")[: ("g1", "g2", "g3", "g4").index(name)]:
        prefixes.pool.evict() if tier == "g1" else prefixes.cache.evict(tier)


def test_bytes_and_tokens_are_the_same_from_every_tier_and_after_a_restart(
    config: Callable[..., kvtier.Config], hybrid: Any, kind: str
) -> None:
    ids = prompt(300)
    with PrefixCache(config(), hybrid) as prefixes:
        cache, hit = prefixes.fetch(ids)
        assert hit == 0 and cache.get_seq_length() == 288
        ends = list(prefixes._forwards.boundaries(cache))
        own = held(computed(hybrid, ids, ends))
        assert held(cache) == own, "computed in fetch as by the model itself"
        assert held(computed(hybrid, ids, ends[:-1])) != own != held(computed(hybrid, prompt(300, seed=8), ends))
        cold = generate(hybrid, ids, cache)
        assert len(set(cold[0, 300:].tolist())) > 12, "a model that repeats itself proves nothing"
        prefixes.store(cold, cache, attention_mask=torch.ones_like(cold))
        assert prefixes.flush().pending == 0
        for tier in ("g1", "g2", "g3", "g4"):
            below(prefixes, tier)
            before = prefixes.served[tier], prefixes.groups_served.get(TITLES[kind], {}).get(tier, 0)
            cache, hit = prefixes.fetch(ids)
            assert hit == 288 == prefixes.served[tier] - before[0]
            assert prefixes.groups_served[TITLES[kind]][tier] > before[1]
            assert held(cache) == own
            assert torch.equal(generate(hybrid, ids, cache), cold)
            prefixes.check()
    with PrefixCache(config(), hybrid) as prefixes:
        cache, hit = prefixes.fetch(ids)
        assert hit == 288 and held(cache) == own
        assert torch.equal(generate(hybrid, ids, cache), cold)


def test_other_bytes_in_one_group_change_the_tokens(config: Any, hybrid: Any) -> None:
    """Control: these comparisons can fail by the blocks of either group alone."""
    ids = prompt(300)
    for group in ("full", "beside"):
        with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
            cold, _ = turn(prefixes, ids)
            cache, _ = prefixes.fetch(ids)
            own = held(cache)
            keys = boundary_chain(prefixes, ids, 288) if group == "beside" else prefixes.cache.chain_hashes(ids[0])
            slots = prefixes.pool.match(keys, prefixes.clock.wall())  # type: ignore[arg-type]
            prefixes.pool.rows[slots] = prefixes.pool.rows[slots].roll(64, dims=1)
            cache, hit = prefixes.fetch(ids)
            assert hit == 288 and held(cache) != own
            assert not torch.equal(generate(hybrid, ids, cache), cold)


def test_the_next_turn_begins_at_the_end_of_the_answer(config: Any, hybrid: Any) -> None:
    """Its state or window is what the passes of `generate` left there."""
    seen: list[Any] = []
    with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
        ids = prompt(60)
        cache, _ = prefixes.fetch(ids)

        def look(module: Any, args: Any, named: Any, output: Any) -> None:
            if cache.get_seq_length() == 80:
                seen.append(held(cache))

        hook = hybrid.register_forward_hook(look, with_kwargs=True)
        output = generate(hybrid, ids, cache)
        hook.remove()
        prefixes.store(output, cache, attention_mask=torch.ones_like(output))
        longer = torch.cat([output, prompt(20, seed=8)], dim=1)
        cache, hit = prefixes.fetch(longer)
        assert hit == 80, "all 83 tokens in the cache are 5 full blocks"
        restored, hit = prefixes.fetch(longer[:, :81])
        assert hit == 80 and [held(restored)] == seen
        answer = generate(hybrid, longer, cache)
        again, hit = prefixes.fetch(longer)
        assert hit == 80, "nothing of this turn was stored"
        assert torch.equal(generate(hybrid, longer, again), answer)


def test_a_prompt_that_leaves_a_known_chain_leaves_a_boundary_there(config: Any, hybrid: Any) -> None:
    system = prompt(160)
    asked = [torch.cat([system, prompt(40, seed=seed)], dim=1) for seed in (8, 9, 10)]
    with PrefixCache(config(g1=200), hybrid, tiers=[]) as prefixes:
        hits = [turn(prefixes, ids)[1] for ids in asked]
        assert hits[0] == 0 and hits[2] == 160, "the first to branch off computes the boundary for those to come"
        cold = computed(hybrid, asked[2], [160])
        cache, hit = prefixes.fetch(asked[2][:, :161])
        assert hit == 160 and held(cache) == held(cold)


def test_several_turns_and_a_restart_end_at_the_tokens_of_one_process(config: Any, hybrid: Any) -> None:
    def talk(folder_config: Any, restarts: bool) -> tuple[list[int], Any]:
        ids, hits = prompt(50), []
        prefixes = PrefixCache(folder_config, hybrid)
        for number in range(3):
            output, hit = turn(prefixes, ids, 20)
            hits.append(hit)
            ids = torch.cat([output, prompt(15, seed=20 + number)], dim=1)
            if restarts:
                prefixes.close()
                prefixes = PrefixCache(folder_config, hybrid)
        prefixes.close()
        return hits, ids

    memory = kvtier.Config.parse({"tiers": {"g1": {"blocks": 200}, "g2": {"capacity": "8MiB"}}})
    hits, tokens = talk(memory, restarts=False)
    again, same = talk(config(), restarts=True)
    assert again == hits == [0, 64, 96] and torch.equal(tokens, same)


class TestOneGroup:
    """Of the blocks of one prompt, those of one group only are lost."""

    @pytest.mark.parametrize("group", ["full", "beside"])
    def test_damage_costs_the_boundary_and_nothing_else(self, config: Any, hybrid: Any, group: str) -> None:
        ids, clock = prompt(120), VirtualClock()
        with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
            namespace = prefixes.namespace
        memory = MemoryTier(namespace, clock)
        with PrefixCache(config(), hybrid, clock=clock, tiers=[memory]) as prefixes:
            turn(prefixes, ids[:, :70])
            cold, _ = turn(prefixes, ids)
            prefixes.flush()
            key = boundary_chain(prefixes, ids, 112)[0] if group == "beside" else prefixes.cache.chain_hashes(ids[0])[5]
            memory.store.damage(namespace.digest + key, 100)
            below(prefixes, "g3")
            output, hit = turn(prefixes, ids)
            assert hit == 64 and torch.equal(output, cold), "the boundary before it"

    def test_evicted_beside_the_chain(self, config: Any, hybrid: Any) -> None:
        ids = prompt(120)
        with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
            cold, _ = turn(prefixes, ids)
            assert prefixes.pool.evict(boundary_chain(prefixes, ids, 112)[1:])  # type: ignore[arg-type]
            output, hit = turn(prefixes, ids)
            assert hit == 0 and torch.equal(output, cold)
            assert turn(prefixes, ids)[1] == 112, "kept again"

    def test_the_chain_evicted_beside_it(self, config: Any, hybrid: Any) -> None:
        ids = prompt(120)
        with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
            cold, _ = turn(prefixes, ids)
            prefixes.pool.evict(prefixes.cache.chain_hashes(ids[0])[6:7])  # type: ignore[arg-type]
            output, hit = turn(prefixes, ids)
            assert hit == 0 and torch.equal(output, cold)

    def test_parts_of_a_boundary_in_two_tiers(self, config: Any, hybrid: Any) -> None:
        ids = prompt(120)
        with PrefixCache(config(), hybrid) as prefixes:
            cold, _ = turn(prefixes, ids)
            prefixes.flush()
            prefixes.cache.evict("g2")
            prefixes.pool.evict(boundary_chain(prefixes, ids, 112)[1:])  # type: ignore[arg-type]
            output, hit = turn(prefixes, ids)
            assert hit == 112 and torch.equal(output, cold)


def test_a_pool_smaller_than_the_prompt_loses_nothing(config: Any, hybrid: Any) -> None:
    ids = [prompt(length, seed) for seed, length in enumerate((200, 170))]
    with PrefixCache(config(g1=5, g2=48), hybrid) as prefixes:
        cold = []
        for one in ids * 2:
            output, hit = turn(prefixes, one)
            prefixes.flush()
            cold.append(output)
        assert hit == 160 and prefixes.pool.spill_lost == 0
        assert torch.equal(cold[0], cold[2]) and torch.equal(cold[1], cold[3])


def test_what_was_taken_back_is_not_kept(config: Any) -> None:
    """A cache that is cropped and goes on with other tokens has no boundary of those before."""
    model, ids, other = gemma3(), prompt(21), prompt(40, seed=8)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        cache, _ = prefixes.fetch(ids)
        generate(model, ids, cache, 13)
        assert list(prefixes._forwards.boundaries(cache)) == [16, 32]
        cache.crop(20 - cache.get_seq_length())
        assert list(prefixes._forwards.boundaries(cache)) == [16]
        ids = torch.cat([ids[:, :20], other[:, :20]], dim=1)
        output = generate(model, ids, cache, 2)
        prefixes.store(output, cache, attention_mask=torch.ones_like(output))
        cache, hit = prefixes.fetch(output[:, :33])
        assert hit == 16, "no pass ended at 32 with these tokens"


def test_tenants_share_no_boundary_and_a_purge_takes_it(config: Any, hybrid: Any) -> None:
    ids = prompt(120)
    with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
        turn(prefixes, ids, salt="alice")
        assert prefixes.fetch(ids, salt="bob")[1] == 0 == prefixes.fetch(ids)[1]
        assert prefixes.fetch(ids, salt="alice")[1] == 112
        keys = boundary_chain(prefixes, ids, 112)
        prefixes.purge("alice")
        assert prefixes.pool.resident == 0 and keys
        assert prefixes.fetch(ids, salt="alice")[1] == 0


def test_terms_hold_for_a_boundary(config: Any, hybrid: Any, clock: Any) -> None:
    ids = prompt(120)
    with PrefixCache(config(), hybrid, clock=clock, tiers=[]) as prefixes:
        turn(prefixes, ids, retention="5m")
        clock.advance(299)
        assert prefixes.fetch(ids)[1] == 112
        clock.advance(301)
        assert prefixes.fetch(ids)[1] == 0


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gemma3, {"sliding_window": 48}),
        (gemma3, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (gemma3, {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                                      "full_attention": {"rope_type": "default", "rope_theta": 1000000.0}}}),
        (qwen3_next, {"linear_conv_kernel_dim": 3}),
    ],
    ids=["window", "layers", "rope of the windows", "kernel"],
)  # fmt: skip
def test_another_hybrid_is_another_namespace(make: Any, options: dict[str, Any], one_thread: None) -> None:
    from kvtier.connectors.transformers.model import namespace_of, probe

    one, same, other = (namespace_of(model, probe(model), 16, weights="the same").digest
                        for model in (make(), make(), make(**options)))  # fmt: skip
    assert one == same != other


def test_the_model_is_left_as_it_was(config: Any, hybrid: Any) -> None:
    def hooks() -> list[int]:
        modules = (hybrid, hybrid.get_decoder())
        return [len(kept) for one in modules for kept in (one._forward_hooks, one._forward_pre_hooks)]

    before = hooks()
    prefixes = PrefixCache(config(), hybrid, tiers=[])
    assert sum(hooks()) > sum(before)
    prefixes.close()
    assert hooks() == before


def test_an_error_while_following_costs_boundaries_only(
    config: Any, hybrid: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    ids = prompt(60)
    with PrefixCache(config(), hybrid, tiers=[]) as prefixes:
        cold, _ = turn(prefixes, ids)
        prefixes.pool.evict()

        def broken(self: Any, cache: Any, boundary: int) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(type(prefixes.shape.groups), "take", broken)
        output, hit = turn(prefixes, ids)
        assert hit == 0 and torch.equal(output, cold) and "not followed" in caplog.text
