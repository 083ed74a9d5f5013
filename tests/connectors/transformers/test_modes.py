"""torch's modes, in which a cache is opened, used and stored from: each may be another."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest

from kvtier.connectors.transformers import PrefixCache
from tests.connectors.transformers.support.models import gemma3, generate, llama, prompt, qwen3_next

torch = pytest.importorskip("torch")


def mode(name: str) -> AbstractContextManager[Any]:
    return nullcontext() if name == "grad" else getattr(torch, name)()


@pytest.mark.parametrize(("opened", "used"), list(product(("grad", "inference_mode"), repeat=2)))
def test_a_cache_may_be_opened_in_another_mode_than_it_is_used_in(
    config: Any, model: Any, opened: str, used: str
) -> None:
    ids = prompt(52)
    with mode(opened):
        prefixes = PrefixCache(config(), model, tiers=[], tails=4)
    with prefixes:
        for hit in (0, 51):
            with mode(used):
                cache, found = prefixes.fetch(ids)
                output = generate(model, ids, cache, 8)
                prefixes.store(output, cache, attention_mask=torch.ones_like(output))
            assert found == hit


@pytest.mark.parametrize("make", [llama, gemma3, qwen3_next])
def test_passes_with_gradients_leave_none_in_the_pool(config: Any, make: Any) -> None:
    """Else it would keep all that these passes computed, for as long as it lives."""
    model, ids = make(), prompt(52)
    with PrefixCache(config(g1=200), model, tiers=[], tails=4) as prefixes:
        cache, _ = prefixes.fetch(ids, advance=False)
        for begin, end in ((0, 48), (48, 52)):
            model(ids[:, begin:end], past_key_values=cache)
        assert cache.layers[1].keys.requires_grad
        taken = prefixes._forwards.boundaries(cache)
        assert not any(t.requires_grad for groups in taken.values() for group in groups for t in group)
        assert prefixes.store(ids, cache, attention_mask=torch.ones_like(ids)) == 3
        assert not prefixes._kv.requires_grad and not prefixes.pool.rows.requires_grad
        again, hit = prefixes.fetch(ids, advance=False)
        assert hit >= 48 and not again.layers[1].keys.requires_grad
