"""The transformers connector on a real model: the same bytes, the same tokens, over every tier and a restart."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

import kvtier
from kvtier.connectors.transformers import PrefixCache
from kvtier.identity.keys import scope_of
from kvtier.kernels.copy import Lane
from kvtier.testing import Fault, FaultyTier, MemoryTier
from kvtier.tiers.device import torch_pool as device
from tests.connectors.transformers.support.models import blocks_of, generate, llama, prompt

torch = pytest.importorskip("torch")


def hold(pool: device.DevicePool, lane: Lane, started: Event, patch: pytest.MonkeyPatch) -> None:
    """Copies on this lane start with the event, and not before."""

    class After:
        query = staticmethod(started.is_set)

    mover = pool._engine._mover  # type: ignore[union-attr]
    launch = mover.launch

    def late(on: Lane, moves: Any, gate: Any, behind: Any, show: Any) -> Any:
        return launch(on, moves, mover.gate(After()) if on is lane else gate, behind, show)

    patch.setattr(mover, "launch", late)


def turn(prefixes: PrefixCache, model: Any, ids: Any, **options: Any) -> tuple[Any, int]:
    """One request: its output, and the tokens that were not computed."""
    cache, hit = prefixes.fetch(ids, **options)
    output = generate(model, ids, cache)
    prefixes.store(output, cache, attention_mask=torch.ones_like(output), **options)
    prefixes.check()
    return output, hit


@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.float32, "sdpa"), (torch.bfloat16, "sdpa"), (torch.bfloat16, "eager")]
)
def test_bytes_and_tokens_are_the_same_from_every_tier_and_after_a_restart(
    config: Any, dtype: Any, attention: str
) -> None:
    model, ids = llama(dtype, attention), prompt(500)
    cold = generate(model, ids, None)
    assert len(set(cold[0, 500:].tolist())) > 12, "a model that repeats itself proves nothing"
    with PrefixCache(config(), model) as prefixes:
        cache, hit = prefixes.fetch(ids)
        assert hit == 0
        output = generate(model, ids, cache)
        assert torch.equal(output, cold)
        stored = blocks_of(cache, 32)
        assert prefixes.store(output, cache, attention_mask=torch.ones_like(output)) == 32
        assert prefixes.flush().pending == 0
        for tier, empty in {"g1": (), "g2": ("g1",), "g3": ("g1", "g2"), "g4": ("g1", "g2", "g3")}.items():
            for name in empty:
                prefixes.pool.evict() if name == "g1" else prefixes.cache.evict(name)
            before = prefixes.served[tier]
            cache, hit = prefixes.fetch(ids)
            assert hit == 496 == prefixes.served[tier] - before
            assert blocks_of(cache, 31) == stored[:31]
            assert torch.equal(generate(model, ids, cache), cold)
            prefixes.check()
    with PrefixCache(config(), model) as prefixes:
        cache, hit = prefixes.fetch(ids)
        assert hit == 496 == sum(prefixes.served[tier] for tier in ("g3", "g4"))
        assert blocks_of(cache, 31) == stored[:31]
        assert torch.equal(generate(model, ids, cache), cold)


@pytest.mark.parametrize("blocks", [31, 15, 1])
def test_a_shorter_hit_gives_the_same_tokens(config: Any, model: Any, blocks: int) -> None:
    ids = prompt(500)
    with PrefixCache(config(), model) as prefixes:
        cache, _ = prefixes.fetch(ids)
        cold = generate(model, ids, cache)
        cache.crop(blocks * 16 - cache.get_seq_length())
        assert prefixes.store(cold, cache, attention_mask=torch.ones_like(cold)) == blocks
        output, hit = turn(prefixes, model, ids)
        assert hit == blocks * 16 and torch.equal(output, cold)


@pytest.mark.parametrize(("length", "hit_tokens"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_last_token_is_always_computed(config: Any, model: Any, length: int, hit_tokens: int) -> None:
    ids = prompt(length)
    with PrefixCache(config(), model) as prefixes:
        cold, hit = turn(prefixes, model, ids)
        assert hit == 0
        warm, hit = turn(prefixes, model, ids)
        assert hit == hit_tokens and torch.equal(warm, cold)


def test_decoded_tokens_are_reused_by_the_next_turn(config: Any, model: Any) -> None:
    with PrefixCache(config(), model) as prefixes:
        output, _ = turn(prefixes, model, prompt(60))
        longer = torch.cat([output, prompt(20, seed=8)], dim=1)
        _, hit = turn(prefixes, model, longer)
        assert hit == 80, "all 83 tokens in the cache are 5 full blocks"


def test_a_pool_smaller_than_the_prompt_loses_nothing(config: Any, model: Any) -> None:
    """G1 holds a quarter of a prompt; what it hands out was offloaded before."""
    ids = [prompt(length, seed) for seed, length in enumerate((400, 500, 330))]
    cold = [generate(model, one, None) for one in ids]
    with PrefixCache(config(g1=7, g2=48), model) as prefixes:
        for _ in range(2):
            for one, expected in zip(ids, cold, strict=True):
                output, hit = turn(prefixes, model, one)
                prefixes.flush()
                assert torch.equal(output, expected)
        assert hit == 320 and prefixes.pool.spill_lost == 0
        assert prefixes.stats()["requests"]["dropped"] == 0


def test_blocks_that_find_a_slot_late_keep_their_place(config: Any, model: Any, monkeypatch: Any) -> None:
    """A prefix longer than G2 comes in parts: the first found one slot of G1, the next one found more."""
    ids = prompt(300)
    with PrefixCache(config(g2=6), model) as prefixes:
        cold, _ = turn(prefixes, model, ids)
        prefixes.flush()
        own = blocks_of(prefixes.fetch(ids)[0], 18)
        prefixes.pool.evict()
        clean_ahead, asked = prefixes.pool.clean_ahead, iter([1, 1])
        monkeypatch.setattr(prefixes.pool, "clean_ahead", lambda count: next(asked, None) or clean_ahead(count))
        cache, hit = prefixes.fetch(ids)
        assert hit == 288 and blocks_of(cache, 18) == own
        assert torch.equal(generate(model, ids, cache), cold)


def test_rolled_values_change_the_tokens(config: Any, model: Any) -> None:
    """Control: these comparisons can fail."""
    ids = prompt(500)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        cold, _ = turn(prefixes, model, ids)
        kv = prefixes.pool.typed(prefixes.shape.dtype, prefixes.shape.block(16))
        kv[:, :, 1] = kv[:, :, 1].roll(1, dims=3)
        cache, hit = prefixes.fetch(ids)
        assert hit == 496 and not torch.equal(generate(model, ids, cache), cold)


class TestIdentity:
    @pytest.mark.parametrize(
        "other",
        [
            {"seed": 1},
            {"dtype": torch.bfloat16},
            {"attention": "eager"},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            {"rms_norm_eps": 1e-3},
        ],
        ids=["weights", "dtype", "attention", "rope", "config"],
    )
    def test_another_model_misses(self, config: Any, model: Any, other: dict[str, Any]) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model) as prefixes:
            turn(prefixes, model, ids)
        with PrefixCache(config(), llama(**other)) as prefixes:
            assert prefixes.fetch(ids)[1] == 0
        with PrefixCache(config(), llama()) as prefixes:
            assert prefixes.fetch(ids)[1] == 96

    def test_another_block_size_misses(self, config: Any, model: Any) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model) as prefixes:
            turn(prefixes, model, ids)
        with PrefixCache(config(), model, block_tokens=32) as prefixes:
            assert prefixes.fetch(ids)[1] == 0
            turn(prefixes, model, ids)
            assert prefixes.fetch(ids)[1] == 96

    def test_one_changed_weight_is_another_model(self, config: Any, model: Any) -> None:
        changed = llama()
        with PrefixCache(config(), changed, tiers=[]) as prefixes:
            same = prefixes.namespace.digest
        with torch.no_grad():
            changed.model.layers[3].mlp.down_proj.weight[5, 7] += 1e-3
        with PrefixCache(config(), model, tiers=[]) as one, PrefixCache(config(), changed, tiers=[]) as other:
            assert one.namespace.digest == same != other.namespace.digest

    def test_tenants_share_nothing(self, config: Any, model: Any) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model) as prefixes:
            turn(prefixes, model, ids, salt="alice")
            assert prefixes.fetch(ids, salt="bob")[1] == 0
            assert prefixes.fetch(ids)[1] == 0
            assert prefixes.fetch(ids, salt="alice")[1] == 96
            prefixes.purge("alice")
            assert prefixes.fetch(ids, salt="alice")[1] == 0

    def test_a_purge_of_elsewhere_reaches_the_pool(self, config: Any, model: Any) -> None:
        """Another process's, or the cache's own verb: what was made before it is served no more, and never stored."""
        ids = prompt(100)
        with PrefixCache(config(), model, tiers=[], tails=4) as prefixes:
            for salt in ("alice", "bob"):
                turn(prefixes, model, ids, salt=salt)
            prefixes.cache.purge("alice")
            assert prefixes.flush().pending == 0 and prefixes.fetch(ids, salt="alice")[1] == 0
            prefixes.pool.evict()
            assert prefixes.fetch(ids, salt="alice")[1] == 0 and prefixes.fetch(ids, salt="bob")[1] == 96
            turn(prefixes, model, ids, salt="alice")
            assert prefixes.fetch(ids, salt="alice")[1] == 99, "what is made behind it is kept"

    def test_a_purge_of_before_that_is_learned_under_an_offload_leaves_nothing_of_it(
        self, config: Any, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process of the machine purged; this one learns of it after it last looked."""
        ids = prompt(100)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            shared = MemoryTier(prefixes.namespace, clock)
        with PrefixCache(config(), model, clock=clock, tiers=[shared]) as prefixes:
            cache, purger = prefixes.cache, prefixes.cache.manager._purger
            cache.submit(purger.sync()).result(10)
            for salt in ("alice", "bob"):
                turn(prefixes, model, ids, salt=salt)
            clock.advance(1)
            cache.submit(shared.purge(scope_of("alice"), clock.wall())).result(10)
            clock.advance(1)
            pick, learned = prefixes.pool.pick, []

            def late(*arguments: Any, **named: Any) -> Any:
                picked = pick(*arguments, **named)
                if not learned:
                    cache.submit(purger.sync()).result(10)
                    learned.append(cache.submit(purger.forget()).result(10))
                return picked

            monkeypatch.setattr(prefixes.pool, "pick", late)
            assert prefixes.flush().pending == 0 and learned and not prefixes.pool.dirty
            prefixes.pool.evict()
            assert prefixes.fetch(ids, salt="alice")[1] == 0 and prefixes.fetch(ids, salt="bob")[1] == 96

    def test_a_purge_takes_the_classes_that_were_isolated(self, config: Any, model: Any) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            turn(prefixes, model, ids, salt="alice", retention="in_memory")
            turn(prefixes, model, ids, salt="bob", retention="in_memory")
            prefixes.purge("alice")
            assert prefixes.fetch(ids, salt="alice", retention="in_memory")[1] == 0
            assert prefixes.fetch(ids, salt="bob", retention="in_memory")[1] == 96


class TestTerms:
    def test_what_stays_in_memory_reaches_no_disk(self, config: Any, model: Any) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model) as prefixes:
            turn(prefixes, model, ids, retention="in_memory")
            assert not any(prefixes.flush().durable.values())
            assert prefixes.fetch(ids, retention="in_memory")[1] == 96
            assert prefixes.fetch(ids)[1] == 0, "an isolated class shares with nobody"
        with PrefixCache(config(), model) as prefixes:
            assert prefixes.fetch(ids, retention="in_memory")[1] == 0

    def test_what_has_expired_is_served_from_no_tier(self, config: Any, model: Any, clock: Any) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model, clock=clock, tiers=[]) as prefixes:
            turn(prefixes, model, ids, retention="5m")
            clock.advance(299)
            assert prefixes.fetch(ids)[1] == 96
            clock.advance(301)
            assert prefixes.fetch(ids)[1] == 0

    @pytest.mark.parametrize(("later", "hit_tokens"), [(99, 96), (101, 0)])
    def test_a_spill_is_no_use(self, config: Any, model: Any, clock: Any, later: float, hit_tokens: int) -> None:
        ids = prompt(100)
        with PrefixCache(config(), model, clock=clock, tiers=[]) as prefixes:
            turn(prefixes, model, ids, retention="5m")
            clock.advance(200)
            assert prefixes.pool.dirty == 7 == prefixes.step(), "older than dirty_max_age"
            prefixes.pool.evict()
            clock.advance(later)
            assert prefixes.fetch(ids)[1] == hit_tokens

    def test_an_unknown_class_is_refused(self, config: Any, model: Any) -> None:
        with PrefixCache(config(), model, tiers=[]) as prefixes, pytest.raises(kvtier.InvalidRequest, match="known"):
            prefixes.fetch(prompt(20), retention="forever")


class TestRefusals:
    def test_a_batch(self, config: Any, model: Any) -> None:
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            with pytest.raises(kvtier.InvalidRequest, match="row by row"):
                prefixes.fetch(prompt(20).repeat(2, 1))
            assert prefixes.fetch(prompt(20))[1] == 0

    def test_padding(self, config: Any, model: Any) -> None:
        ids = prompt(40)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            output = generate(model, ids, cache)
            with pytest.raises(kvtier.InvalidRequest, match="all ones"):
                prefixes.fetch(ids, attention_mask=mask)
            with pytest.raises(kvtier.InvalidRequest, match="all ones"):
                prefixes.store(ids, cache, attention_mask=mask)
            assert prefixes.pool.resident == 0
            assert prefixes.store(output, cache, attention_mask=torch.ones_like(output)) == 3

    def test_a_padding_id_in_the_tokens_without_a_mask(self, config: Any, model: Any) -> None:
        """`generate` would have masked it, and the KV behind it would be another prompt's."""
        ids = prompt(40)
        ids[0, 10] = model.generation_config.pad_token_id
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            output = generate(model, ids, cache)
            with pytest.raises(kvtier.InvalidRequest, match="padding id 0"):
                prefixes.store(output, cache)
            assert prefixes.store(output, cache, attention_mask=torch.ones_like(output)) == 3

    def test_layers_that_hold_a_window(self, config: Any) -> None:
        from transformers import MistralConfig, MistralForCausalLM

        small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
        with pytest.raises(kvtier.InvalidRequest, match="DynamicSlidingWindowLayer"):
            PrefixCache(config(), MistralForCausalLM(MistralConfig(sliding_window=32, **small)).eval())
        full = MistralForCausalLM(MistralConfig(sliding_window=None, **small)).eval()
        PrefixCache(config(), full, tiers=[]).close()

    def test_caches_of_other_kinds(self, config: Any, model: Any) -> None:
        from transformers import DynamicCache, StaticCache

        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            with pytest.raises(kvtier.InvalidRequest, match="StaticLayer"):
                prefixes.store(ids, StaticCache(config=model.config, max_cache_len=64))
            other = llama(torch.bfloat16)
            cache = DynamicCache(config=other.config)
            generate(other, ids, cache, 1)
            with pytest.raises(kvtier.InvalidRequest, match="casts nothing"):
                prefixes.store(ids, cache)
            assert prefixes.pool.resident == 0

    def test_tokens_that_stand_for_an_image(self, config: Any) -> None:
        """Two images have the same tokens, and not the same KV."""
        shown = llama(image_token_id=77)
        ids = prompt(40)
        ids[0, 5:9] = 77
        with PrefixCache(config(), shown, tiers=[]) as prefixes:
            with pytest.raises(kvtier.InvalidRequest, match="image_token_id"):
                prefixes.fetch(ids)
            with pytest.raises(kvtier.InvalidRequest, match="image_token_id"):
                prefixes.store(ids, prefixes.fetch(ids[:, :4])[0], attention_mask=torch.ones_like(ids))

    def test_a_cache_fetched_for_other_tokens(self, config: Any, model: Any) -> None:
        ids, other = prompt(100), prompt(100, seed=8)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            turn(prefixes, model, ids)
            cache, hit = prefixes.fetch(ids)
            output = generate(model, other, cache)
            with pytest.raises(kvtier.InvalidRequest, match="fetched for other tokens"):
                prefixes.store(output, cache, attention_mask=torch.ones_like(output))
            assert hit == 96 and prefixes.fetch(other)[1] == 0

    def test_rope_that_depends_on_the_length(self, config: Any) -> None:
        parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        with pytest.raises(kvtier.InvalidRequest, match="dynamic"):
            PrefixCache(config(), llama(rope_parameters=parameters))

    def test_a_cache_that_is_longer_than_its_tokens(self, config: Any, model: Any) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            generate(model, ids, cache)
            with pytest.raises(kvtier.InvalidRequest, match="40 tokens were given"):
                prefixes.store(ids, cache)


class TestFaults:
    @pytest.mark.parametrize("kind", ["error", "crash", "drop"])
    @pytest.mark.parametrize("verb", ["lookup", "read", "write", "*"])
    def test_a_tier_that_fails_is_a_miss(self, config: Any, model: Any, verb: str, kind: str) -> None:
        ids = prompt(200)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            namespace, clock = prefixes.namespace, prefixes.clock
        faulty = FaultyTier(MemoryTier(namespace, clock))
        with PrefixCache(config(), model, tiers=[faulty]) as prefixes:
            faulty.faults.append(Fault(verb, kind))
            cold, _ = turn(prefixes, model, ids)
            prefixes.flush(2.0)
            prefixes.pool.evict()
            faulty.faults.clear()
            prefixes.cache.evict("g2")
            faulty.faults.append(Fault(verb, kind))
            output, hit = turn(prefixes, model, ids)
            assert hit == 0 and torch.equal(output, cold)

    def test_a_corrupt_block_shortens_the_hit(self, config: Any, model: Any, clock: Any) -> None:
        ids = prompt(200)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            namespace = prefixes.namespace
        memory = MemoryTier(namespace, clock)
        with PrefixCache(config(), model, clock=clock, tiers=[memory]) as prefixes:
            cold, _ = turn(prefixes, model, ids)
            prefixes.flush()
            memory.store.damage(namespace.digest + prefixes.cache.chain_hashes(ids[0])[5], 100)
            prefixes.pool.evict()
            prefixes.cache.evict("g2")
            output, hit = turn(prefixes, model, ids)
            assert hit == 5 * 16 and torch.equal(output, cold)

    @pytest.mark.parametrize("lane", [Lane.STORE, Lane.LOAD])
    def test_a_late_copy_keeps_its_memory_until_it_ends_and_costs_hits_only(
        self, config: Any, model: Any, clock: Any, lane: Lane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = prompt(200)
        with PrefixCache(config(g1=16, deadlines={"put": "200ms"}), model, clock=clock, tiers=[]) as prefixes:
            cold, _ = turn(prefixes, model, ids)
            prefixes.flush()
            prefixes.pool.evict()
            monkeypatch.setattr(device, "_COPY_TIMEOUT_S", 0.01)
            pool, host, started = prefixes.pool, prefixes.cache.manager.host, Event()
            hold(pool, lane, started, monkeypatch)
            for other in (ids, prompt(250, seed=8), ids):
                clock.advance(10)
                output, _ = turn(prefixes, model, other)
            assert torch.equal(output, cold)
            held = [slot for slot in range(16) if pool._copying.get(slot) or pool._refs[slot]]
            assert held and not pool.recovered(), "one copy is overdue, and no other was asked for"
            free = pool.allocate(pool.free_blocks)
            assert not set(free) & set(held)
            pool.free(free)
            assert host.quarantined == (len(held) if lane is Lane.STORE else 0)
            started.set()
            clock.advance(10)
            output, _ = turn(prefixes, model, ids)
            assert torch.equal(output, cold) and pool.recovered()
            assert host.quarantined == 0 and not host.stale_messages
            assert not pool._copying and not any(pool._refs)
            prefixes.flush()
            pool.evict()
            output, hit = turn(prefixes, model, ids)
            assert hit == 192 and torch.equal(output, cold)

    def test_a_lost_device_is_not_asked_again(
        self, config: Any, model: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device, "_COPY_TIMEOUT_S", 0.01)
        ids = prompt(200)
        with PrefixCache(config(g1=16), model, clock=clock, tiers=[]) as prefixes:
            hold(prefixes.pool, Lane.STORE, Event(), monkeypatch)  # for good
            cold, _ = turn(prefixes, model, ids)
            for _ in range(3):
                clock.advance(10)
                output, _ = turn(prefixes, model, ids)
                assert torch.equal(output, cold)
            quarantined = prefixes.cache.manager.host.quarantined
            assert quarantined and prefixes.pool._engine.stats().in_flight == quarantined

    def test_a_closed_cache_says_so(self, config: Any, model: Any) -> None:
        prefixes = PrefixCache(config(), model, tiers=[])
        prefixes.close()
        prefixes.close()
        with pytest.raises(kvtier.ClosedError):
            prefixes.fetch(prompt(40))
