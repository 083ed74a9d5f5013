"""A model that is changed in place while its cache is open: its KV is another model's then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

import kvtier
from kvtier.connectors.transformers import PrefixCache
from tests.connectors.transformers.support.models import generate, llama, prompt

torch = pytest.importorskip("torch")


@contextmanager
def adapters_off(model: Any) -> Any:
    """As PEFT's `disable_adapter` leaves its layers."""
    layer = model.model.layers[1].self_attn.q_proj
    layer.disable_adapters = True
    yield
    layer.disable_adapters = False


@contextmanager
def another_adapter(model: Any) -> Any:
    """As PEFT's `set_adapter`."""
    model.active_adapters = ["b"]
    yield
    model.active_adapters = ["a"]


@contextmanager
def adapters_by_row(model: Any) -> Any:
    """As PEFT's `generate(…, adapter_names=["b"])`, whose layers look at neither of the two above."""

    def inject(_layer: Any, args: Any, named: dict[str, Any]) -> Any:
        return (args[0] * 1.01, *args[1:]), named

    hook = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(inject, with_kwargs=True)
    yield
    hook.remove()


@contextmanager
def another_attention(model: Any) -> Any:
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation("sdpa")


def adapted() -> Any:
    model = llama()
    model.peft_config, model.active_adapters = {"a": None, "b": None}, ["a"]
    model.model.layers[1].self_attn.q_proj.disable_adapters = False
    return model


@pytest.mark.parametrize("changed", [adapters_off, another_adapter, adapters_by_row, another_attention])
def test_adapters_and_attention_that_are_switched(
    config: Any, changed: Callable[[Any], AbstractContextManager[None]]
) -> None:
    model, ids = adapted(), prompt(40)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        for inside, kept in ((nullcontext(), True), (changed(model), False), (nullcontext(), True)):
            cache, _ = prefixes.fetch(ids)
            with inside:
                output = generate(model, ids, cache, 8)
            ones = torch.ones_like(output)
            if kept:
                prefixes.store(output, cache, attention_mask=ones)
            else:
                with pytest.raises(
                    kvtier.InvalidRequest, match=r"a pass over it ran with (other adapters|another att)"
                ):
                    prefixes.store(output, cache, attention_mask=ones)
        with changed(model), pytest.raises(kvtier.InvalidRequest, match="open another PrefixCache"):
            prefixes.fetch(ids)
        assert prefixes.fetch(ids)[1] == 32


def test_a_step_of_training(config: Any) -> None:
    model, ids = llama(), prompt(40)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        cache, _ = prefixes.fetch(ids)
        output = generate(model, ids, cache, 8)
        prefixes.store(output, cache, attention_mask=torch.ones_like(output))
        assert prefixes.fetch(ids)[1] == 32
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
        for verb in (lambda: prefixes.fetch(ids), lambda: prefixes.store(output, cache)):
            with pytest.raises(kvtier.InvalidRequest, match="with other weights"):
                verb()


def test_weights_of_another_model_that_no_parameter_counts(config: Any) -> None:
    """As trainers hand them to a model that generates: past autograd, which counts writes, or in inference mode."""
    for mode in (nullcontext, torch.inference_mode):
        with mode():
            model, other = llama(), llama(seed=1)
        with PrefixCache(config(), model, tiers=[]) as prefixes, mode():
            assert prefixes.fetch(prompt(40))[1] == 0
            for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
                parameter.data.copy_(source.data)
            with pytest.raises(kvtier.InvalidRequest, match="with other weights"):
                prefixes.fetch(prompt(40))


def test_weights_in_other_memory(config: Any) -> None:
    """A parameter that moves is the same; new values in its stead are not."""
    model, other, ids = llama(), llama(seed=1), prompt(40)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert prefixes.fetch(ids)[1] == 0
        for name, source in other.named_parameters():
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, torch.nn.Parameter(source.detach().clone()))
        with pytest.raises(kvtier.InvalidRequest, match="with other weights"):
            prefixes.fetch(ids)


def test_a_parameter_whose_memory_is_given_back_meanwhile(config: Any) -> None:
    """As sharding has it between passes: what lies elsewhere is not compared, and what comes back is."""
    model, ids = llama(), prompt(40)
    with PrefixCache(config(), model, tiers=[]) as prefixes:
        kept = [parameter.data.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # memory that numpy has seen keeps its size
            parameter.untyped_storage().resize_(0)
        assert not prefixes._settled.weights_changed()
        for parameter, values in zip(model.parameters(), kept, strict=True):
            parameter.untyped_storage().resize_(values.untyped_storage().nbytes())
            parameter.data.copy_(values)
        assert prefixes.fetch(ids)[1] == 0
