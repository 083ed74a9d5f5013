"""A cache is kept only as the KV of the tokens that went into it. Each of these passes leaves other bytes than a
prefill of the tokens that `store` is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvtier
from kvtier.connectors.transformers import PrefixCache
from tests.connectors.transformers.support.models import (
    computed,
    gemma3,
    generate,
    gpt2,
    held,
    llama,
    prompt,
    qwen3_next,
)

torch = pytest.importorskip("torch")


def keep(prefixes: PrefixCache, output: Any, cache: Any, **options: Any) -> int:
    return prefixes.store(output, cache, attention_mask=torch.ones_like(output), **options)


def refused(prefixes: PrefixCache, output: Any, cache: Any, reason: str) -> None:
    resident = prefixes.pool.resident
    with pytest.raises(kvtier.InvalidRequest, match=reason):
        keep(prefixes, output, cache)
    assert prefixes.pool.resident == resident


def forward(model: Any, cache: Any, ids: Any, **options: Any) -> None:
    with torch.no_grad():
        model(ids, past_key_values=cache, **options)


class Broken:
    """The first pass over a model ends with an error before its second layer."""

    def __init__(self, model: Any) -> None:
        self._hook = model.model.layers[1].register_forward_pre_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        self._hook.remove()
        raise RuntimeError("out of memory")


class TestRefused:
    def test_a_pass_that_did_not_end(self, config: Any) -> None:
        """The state of its first layer went on; the cache's length did not."""
        model, ids = qwen3_next(), prompt(60)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            Broken(model)
            with pytest.raises(RuntimeError, match="out of memory"):
                generate(model, ids, cache)
            refused(prefixes, ids, cache, "ended with an error")
            output = generate(model, ids, cache)
            refused(prefixes, output, cache, "ended with an error")

    def test_padding_that_generate_found(self, config: Any, model: Any) -> None:
        ids = prompt(60)
        ids[0, :5] = 0
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            output = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
            refused(prefixes, output, cache, "padding")

    def test_a_prompt_advanced_over_the_answer_to_another(self, config: Any) -> None:
        model, ids = gemma3(), prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            generate(model, ids, cache)
            with pytest.raises(kvtier.InvalidRequest, match="token 40 is not its own"):
                prefixes.advance(cache, torch.cat([ids, prompt(80, seed=8)], dim=1))

    def test_the_output_of_another_request(self, config: Any, model: Any) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            generate(model, ids, cache, 4)
            refused(prefixes, prompt(50, seed=8), cache, "other tokens")

    def test_tokens_that_went_in_twice(self, config: Any, model: Any) -> None:
        """Assisted generation gives the model the whole prompt, whatever the cache holds."""
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[], tails=4) as prefixes:
            output = generate(model, ids, cache := prefixes.fetch(ids)[0], 4)
            keep(prefixes, output, cache)
            other = torch.cat([ids[:, :1], prompt(39, seed=8)], dim=1)
            cache, hit = prefixes.fetch(other)
            assert hit == 1
            lookup = {"max_new_tokens": 20, "do_sample": False, "prompt_lookup_num_tokens": 3}
            output = model.generate(other, attention_mask=torch.ones_like(other), past_key_values=cache, **lookup)
            assert cache.get_seq_length() <= output.shape[1], "its length says nothing"
            refused(prefixes, output, cache, "other tokens|positions")

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"num_beams": 2}, "layer 0 holds"),
            ({"do_sample": True, "num_return_sequences": 3}, "layer 0 holds"),
            ({"use_cache": False}, "tokens were given"),
        ],
        ids=["beams", "several answers", "no use of the cache"],
    )
    def test_answers_of_several_rows_or_of_no_cache(
        self, config: Any, model: Any, options: dict[str, Any], reason: str
    ) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            ones = torch.ones_like(ids)
            output = model.generate(ids, attention_mask=ones, past_key_values=cache, max_new_tokens=8, **options)
            refused(prefixes, output[:1], cache, reason)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"position_ids": torch.arange(7, 47)[None]}, "positions"),
            ({"attention_mask": torch.tensor([[0] * 3 + [1] * 37])}, "padding"),
            ({"attention_mask": torch.zeros((1, 1, 40, 40))}, "attention mask"),
            ({"is_causal": False}, "is_causal"),
        ],
        ids=["positions", "mask", "a mask of its own", "attention to later tokens"],
    )
    def test_what_a_pass_was_told(self, config: Any, model: Any, options: dict[str, Any], reason: str) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            forward(model, cache, ids, **options)
            refused(prefixes, ids, cache, reason)

    @pytest.mark.parametrize(
        "beside", [lambda ids: ids % 2, torch.zeros_like, lambda ids: ids.flip(1)], ids=["two kinds", "zeros", "all"]
    )
    def test_embeddings_beside_the_tokens(self, config: Any, beside: Callable[[Any], Any]) -> None:
        """GPT-2 adds the embeddings of `token_type_ids`, those of zeros, too."""
        model, ids = gpt2(), prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            ones = torch.ones_like(ids)
            options = {"token_type_ids": beside(ids), "max_new_tokens": 4, "do_sample": False}
            output = model.generate(ids, attention_mask=ones, past_key_values=cache, **options)
            assert not torch.allclose(cache.layers[0].keys[:, :, :40], computed(model, ids, [40]).layers[0].keys)
            refused(prefixes, output, cache, "token_type_ids")

    def test_an_argument_that_is_not_known(self, config: Any, model: Any) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            forward(model, cache, ids, of_a_later_release=torch.ones(1))
            refused(prefixes, ids, cache, "of_a_later_release")

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ((torch.tensor([[0] * 3 + [1] * 37]),), "padding"),
            ((None, torch.arange(7, 47)[None]), "positions"),
        ],
        ids=["mask", "positions"],
    )
    def test_what_a_pass_was_told_without_names(
        self, config: Any, model: Any, arguments: tuple[Any, ...], reason: str
    ) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            with torch.no_grad():
                model(ids, *arguments, past_key_values=cache)
            refused(prefixes, ids, cache, reason)

    @pytest.mark.parametrize("make", [llama, gemma3])
    def test_a_mask_of_the_new_tokens_alone(self, config: Any, make: Callable[..., Any]) -> None:
        """The library takes it for that of the first tokens, and masks the others."""
        model, ids = make(), prompt(64)
        with PrefixCache(config(g1=200), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids, advance=False)
            for part in ids.split(32, dim=1):
                forward(model, cache, part, attention_mask=torch.ones_like(part))
            refused(prefixes, ids, cache, "for fewer tokens than there were")

    def test_masks_by_kind_of_layer(self, config: Any) -> None:
        model, ids = gemma3(), prompt(32)
        masks = dict.fromkeys(("full_attention", "sliding_attention"), torch.zeros((1, 1, 32, 32), dtype=torch.bool))
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids, advance=False)
            forward(model, cache, ids, attention_mask=masks)
            refused(prefixes, ids, cache, "attention mask")

    @pytest.mark.parametrize("make", [gemma3, qwen3_next])
    def test_tokens_that_were_taken_back_from_some_layers(self, config: Any, make: Callable[..., Any]) -> None:
        """A window that is full and a state cannot be cropped: they have these tokens still."""
        model, ids = make(), prompt(80)
        other = torch.cat([ids[:, :64], prompt(16, seed=8)], dim=1)
        with PrefixCache(config(g1=200), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids, advance=False)
            forward(model, cache, ids)
            for index in prefixes.shape.groups.full:
                cache.layers[index].crop(-16)
            forward(model, cache, other[:, 64:])
            refused(prefixes, other, cache, "some of its layers still have them|layers .* hold 96 tokens")

    def test_embeddings(self, config: Any, model: Any) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            with torch.no_grad():
                model(inputs_embeds=torch.zeros(1, 40, 128), past_key_values=cache)
            refused(prefixes, ids, cache, "embeddings")

    def test_dropout(self, config: Any) -> None:
        model, ids = llama(attention_dropout=0.3), prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            forward(model.train(), cache, ids)
            refused(prefixes, ids, cache, "training mode")

    def test_autocast(self, config: Any) -> None:
        """The states have the same type with it, and other values."""
        model, ids = qwen3_next().float(), prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids, advance=False)
            with torch.autocast("cpu", torch.bfloat16):
                forward(model, cache, ids)
            for index in (1, 3):
                cache.layers[index].keys, cache.layers[index].values = (
                    cache.layers[index].keys.float(), cache.layers[index].values.float())  # fmt: skip
            refused(prefixes, ids, cache, "autocast")

    def test_a_pass_that_was_not_seen(self, config: Any, model: Any) -> None:
        ids = prompt(40)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            for layer in cache.layers:
                layer.update(torch.ones(1, 4, 40, 16), torch.ones(1, 4, 40, 16))
            refused(prefixes, ids, cache, "no pass was seen")

    def test_a_model_whose_passes_cannot_be_followed(self, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model = llama()
        monkeypatch.setattr(model, "get_decoder", lambda: model.lm_head)
        with pytest.raises(kvtier.InvalidRequest, match="cannot be followed"):
            PrefixCache(config(), model, tiers=[])


class TestKept:
    """Controls."""

    def same(self, prefixes: PrefixCache, ids: Any) -> None:
        """What is found for the tokens is what the model computes of them, within the order of its sums."""
        cache, hit = prefixes.fetch(ids, advance=False)
        own = computed(prefixes.model, ids, [hit])
        assert hit >= 48
        for one, other in zip(cache.layers, own.layers, strict=True):
            assert torch.allclose(one.keys, other.keys, atol=1e-3)
            assert torch.allclose(one.values, other.values, atol=1e-3)

    def test_candidates_that_were_taken_back(self, config: Any, model: Any) -> None:
        ids = prompt(16).repeat(1, 3)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            lookup = {"max_new_tokens": 24, "do_sample": False, "prompt_lookup_num_tokens": 3}
            output = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **lookup)
            keep(prefixes, output, cache)
            self.same(prefixes, output)

    def test_another_prompt_in_a_cache_that_was_taken_back(self, config: Any, model: Any) -> None:
        """Its first blocks were taken for those that `fetch` had found, and none was stored."""
        found, other = prompt(64), prompt(64, seed=8)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            keep(prefixes, generate(model, found, cache := prefixes.fetch(found)[0]), cache)
            cache, hit = prefixes.fetch(found)
            cache.crop(-hit)
            forward(model, cache, other)
            assert keep(prefixes, other, cache) == 4
            self.same(prefixes, torch.cat([other, other], dim=1))

    @pytest.mark.parametrize("make", [llama, gemma3])
    def test_sampling(self, config: Any, make: Callable[..., Any]) -> None:
        model, ids = make(), prompt(60)
        torch.manual_seed(0)
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids, advance=False)
            options = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.3, "prefill_chunk_size": 7}
            ones = torch.ones_like(ids)
            output = model.generate(ids, attention_mask=ones, past_key_values=cache, max_new_tokens=24, **options)
            keep(prefixes, output, cache)
            self.same(prefixes, output)

    def test_arguments_that_change_no_kv(self, config: Any, model: Any) -> None:
        ids = prompt(48)
        options = {"mm_token_type_ids": torch.zeros_like(ids), "output_hidden_states": True, "is_causal": True,
                   "labels": ids, "cache_position": torch.arange(48)}  # fmt: skip
        with PrefixCache(config(), model, tiers=[]) as prefixes:
            cache, _ = prefixes.fetch(ids)
            forward(model, cache, ids, **options)
            keep(prefixes, ids, cache)
            self.same(prefixes, torch.cat([ids, ids], dim=1))

    @pytest.mark.parametrize("make", [llama, gemma3])
    def test_two_requests_whose_passes_alternate(self, config: Any, make: Callable[..., Any]) -> None:
        model = make()
        asked = [prompt(48, seed=seed) for seed in (8, 9)]
        with PrefixCache(config(g1=200), model, tiers=[]) as prefixes:
            caches = [prefixes.fetch(ids, advance=False)[0] for ids in asked]
            for begin in range(0, 48, 8):
                for cache, ids in zip(caches, asked, strict=True):
                    forward(model, cache, ids[:, begin : begin + 8])
            refused(prefixes, asked[0], caches[1], "other tokens")
            for cache, ids in zip(caches, asked, strict=True):
                keep(prefixes, ids, cache)
                self.same(prefixes, torch.cat([ids, ids], dim=1))


def test_another_salt_gets_all_blocks(config: Any, model: Any) -> None:
    """Those that were found for the first salt do not lie below under the second."""
    ids = prompt(100)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        cache, _ = prefixes.fetch(ids, salt="alice")
        output = generate(model, ids, cache)
        keep(prefixes, output, cache, salt="alice")
        cache, hit = prefixes.fetch(output, salt="alice")
        assert hit == 112 and keep(prefixes, output, cache, salt="bob") == 7
        assert prefixes.fetch(output, salt="bob")[1] == 112


def test_a_boundary_holds_no_more_memory_than_its_bytes(config: Any) -> None:
    """A pass over a long prompt leaves windows as views of all its keys."""
    model, ids = gemma3(), prompt(600)
    with PrefixCache(config(g1=200), model, tiers=[]) as prefixes:
        cache, _ = prefixes.fetch(ids)
        own = held(cache)
        for tensors in prefixes._forwards.boundaries(cache).values():
            assert all(t.untyped_storage().nbytes() <= 2 * t.nbytes for group in tensors for t in group)
        assert held(cache) == own
