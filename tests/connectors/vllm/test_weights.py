"""The name of weights as a worker reads them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from kvtier.connectors.vllm.weights import AdapterClaims, WeightsWatch

torch = pytest.importorskip("torch")


def stream(count: int = 3) -> Iterator[tuple[str, Any]]:
    return ((f"layer{number}", torch.full((4,), float(number))) for number in range(count))


def named(*reads: Any) -> str:
    watch = WeightsWatch()
    with watch.loading():
        for read in reads:
            read(watch)
    return watch.weights


def whole(watch: WeightsWatch) -> None:
    list(watch.read(stream(), full=False))


def test_weights_are_named_by_what_was_read() -> None:
    assert named(whole).startswith("w1:") and named(whole) == named(whole) != named(whole, whole)
    assert named() == ""


def test_weights_that_were_read_in_part_have_no_name() -> None:
    """A rank that reads only its own experts computes with those of the others, too."""
    assert named(lambda watch: list(watch.read(stream(), full=False, whole=False))) == ""
    assert named(lambda watch: list(islice(watch.read(stream(), full=False), 2)), whole) == ""


def test_no_loaded_block_of_an_unknown_adapter_is_forgotten() -> None:
    """More loads than are remembered: whoever is told that a block is right may read it."""
    claims = AdapterClaims(watch := WeightsWatch())
    right = set[int]()
    for block in range(3000):
        right |= {block} if claims.right(1, "lora:old", (block,)) else set()
        assert not claims.settle()
    watch.adapter(1, "lora:new")
    assert right and claims.settle() == right
    assert claims.right(2, "lora:old", (1,)), "there is room again"
