"""Configurations as text: nothing that may change the KV is left out, however deep it lies."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from kvtier.connectors.configuration import described


def nested(depth: int, value: Any) -> Any:
    return value if depth == 0 else {"below": nested(depth - 1, value)}


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 20])
def test_plain_data_counts_at_every_depth(depth: int) -> None:
    texts = {described({"section": {"given": nested(depth, value)}}, ()) for value in ([1], [2], {"a": 1})}
    assert len(texts) == 3


def test_objects_that_refer_to_each_other_have_a_text() -> None:
    class Part:
        other: Any = None

    one, two = Part(), Part()
    one.other, two.other = two, [one]
    assert described({"section": {"part": one}}, ()) == described({"section": {"part": one}}, ())


def test_values_of_all_kinds_have_a_text_that_is_the_same_everywhere() -> None:
    class Kind(enum.Enum):
        PLAIN = 1

    one = described({"section": {"kind": Kind.PLAIN, "raw": b"\x01\xff", "some": {"b", "a", "c"}}}, ())
    again = described({"section": {"kind": Kind.PLAIN, "raw": bytearray(b"\x01\xff"), "some": frozenset("cab")}}, ())
    assert one == again and "Kind.PLAIN" in str(one) and "01ff" in str(one)
    assert described({"section": {"some": {"a", "b"}}}, ()) != described({"section": {"some": {"a"}}}, ())
