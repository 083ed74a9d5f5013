"""A map in parts is a dictionary, whatever is done to it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvtier.identity.key_counts import KeyCounts
from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey
from kvtier.testing import chain_of, sample_namespace

KEYS = list(chain_of(sample_namespace(64), 40))


@pytest.mark.parametrize("seed", range(5))
def test_it_does_what_a_dictionary_does(seed: int) -> None:
    rng, mine, model = random.Random(seed), KeyMap[int](), dict[BlockKey, int]()
    for step in range(400):
        key, some = rng.choice(KEYS), rng.sample(KEYS, rng.randrange(4))
        verb = rng.choice(["set", "del", "pop", "pop or", "default", "set all", "drop all"])
        if verb == "set":
            mine[key] = model[key] = step
        elif verb == "del" and key in model:
            del mine[key], model[key]
        elif verb == "pop" and key in model:
            assert mine.pop(key) == model.pop(key)
        elif verb == "pop or":
            assert mine.pop(key, -1) == model.pop(key, -1)
        elif verb == "default":
            assert mine.setdefault(key, step) == model.setdefault(key, step)
        elif verb == "set all":
            mine.set_all(some, step)
            model.update(dict.fromkeys(some, step))
        elif verb == "drop all":
            mine.drop_all(some)
            model = {key: value for key, value in model.items() if key not in some}
        assert (key in mine, mine.get(key), len(mine), bool(mine)) == (
            key in model,
            model.get(key),
            len(model),
            bool(model),
        )
    assert mine == model and sorted(mine) == sorted(model) and mine.keys() == model.keys()
    for wrong in (lambda: mine[BlockKey(bytes(48))], lambda: mine.pop(BlockKey(bytes(48)))):
        with pytest.raises(KeyError):
            wrong()
    assert "no key" not in mine and len(mine) == len(model)


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_a_counter(seed: int) -> None:
    rng, mine, model = random.Random(seed), KeyCounts(), Counter[BlockKey]()
    for _ in range(200):
        some = rng.choices(KEYS, k=rng.randrange(5))
        if rng.random() < 0.5:
            mine.add(some)
            model.update(some)
        else:
            mine.remove(some)
            for key in some:
                model[key] = max(0, model[key] - 1)
        model = +model
        assert len(mine) == len(model) and all((key in mine) == (key in model) for key in KEYS)


def test_some_of_a_map_are_taken_out() -> None:
    keys = [BlockKey(bytes([number]) * 48) for number in range(20)]
    table = KeyMap[int]()
    table.update((key, number) for number, key in enumerate(keys))
    first, rest = table.take(7), table.take(100)
    assert (len(first), len(rest), len(table)) == (7, 13, 0)
    assert first | rest == {key: number for number, key in enumerate(keys)}
