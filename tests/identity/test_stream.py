"""Weights are named by all that was read of them: names, types, shapes and bytes, in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtier.identity.stream import StreamDigest

torch = pytest.importorskip("torch")

BASE = [("first", torch.arange(12.0).reshape(3, 4)), ("second", torch.arange(9000.0))]
"""The second has 36 KB: more than a sample, less than what is read in part."""


def named(tensors: list[tuple[str, Any]], **mode: bool) -> str:
    digest = StreamDigest(**mode)
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.name()


def test_whatever_was_read_is_in_the_name() -> None:
    first, second = (tensor for _, tensor in BASE)
    ends = [second.index_put((torch.tensor([place]),), torch.tensor(-1.0)) for place in (0, 8999)]
    others = [
        [("first", first.reshape(4, 3)), BASE[1]],
        [("first", first.view(torch.int32)), BASE[1]],
        [("other", first), BASE[1]],
        BASE[:1],
        *([BASE[0], ("second", changed)] for changed in ends),
    ]
    assert len({named(BASE), *map(named, others)}) == len(others) + 1


def test_the_order_of_the_files_is_not() -> None:
    assert named(BASE) == named(BASE[::-1]) != ""
    assert named([]) == ""


def test_of_a_large_tensor_a_part_is_read_unless_all_is_asked_for() -> None:
    large = torch.arange(1e6)
    changed = [large.index_put((torch.tensor([random.Random(seed).randrange(10**6)]),), torch.tensor(-1.0))
               for seed in range(4)]  # fmt: skip
    assert {named([("large", each)]) for each in changed} == {named([("large", large)])}, "the control: a sample"
    assert len({named([("large", each)], full=True) for each in [large, *changed]}) == 5
