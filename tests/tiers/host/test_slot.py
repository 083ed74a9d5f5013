"""A block's bytes go between its pieces and one buffer whole, in order, or not at all."""

from __future__ import annotations

import pytest

from kvtier.tiers.host.slot import copy_in, copy_out


def test_pieces_are_filled_and_gathered_in_order() -> None:
    source = memoryview(bytes(range(10)))
    pieces = [memoryview(bytearray(size)) for size in (3, 5, 2)]
    copy_in(pieces, source)
    assert [bytes(piece) for piece in pieces] == [bytes(source[:3]), bytes(source[3:8]), bytes(source[8:])]
    whole = memoryview(bytearray(10))
    copy_out(pieces, whole)
    assert whole == source


@pytest.mark.parametrize("size", [1, 7, 9])
def test_a_buffer_of_another_length_is_refused_and_nothing_is_copied(size: int) -> None:
    pieces = [memoryview(bytearray(4)), memoryview(bytearray(4))]
    buffer = memoryview(bytearray(b"x" * size))
    for copy in (copy_in, copy_out):
        with pytest.raises(ValueError, match="8 bytes"):
            copy(pieces, buffer)
    assert all(bytes(piece) == bytes(4) for piece in pieces) and bytes(buffer) == b"x" * size
