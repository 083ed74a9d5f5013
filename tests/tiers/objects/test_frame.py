"""Frames: what was written comes back, anything else is one error, and no size is believed before it is checked."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CorruptError
from kvtier.identity.keys import Scope
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import LIFETIME_BYTES, Lifetime, Stamp
from kvtier.retention.terms import BUILTIN, Depth
from kvtier.testing import sample_namespace
from kvtier.tiers.objects.frame import COUNT_MAX, HEADER_BYTES_MAX, ForeignFrame, Frame, decode

NOW = 1.8e9
PUBLIC = Keyring.public()
GOLDEN_SHA256 = "1165be7aa8b88efaea16901956fab16303c573b8b3d15eed7fd297ab53f7182e"

stamps = st.builds(
    Stamp,
    created=st.floats(0, 2**35),
    ttl=st.none() | st.integers(1, 2**31).map(float),
    max_age=st.none() | st.integers(1, 2**31).map(float),
    ceiling=st.sampled_from(Depth),
)
lives = st.builds(Lifetime, st.floats(0, 2**35), st.lists(stamps, max_size=4).map(tuple))


def frame(blocks: int = 2, life: Lifetime | None = None) -> Frame:
    rng = random.Random(blocks)
    return Frame(
        sample_namespace().digest, Scope(bytes(16)), 4, 4096, tuple(rng.randbytes(32) for _ in range(blocks)),
        tuple(rng.randbytes(16) for _ in range(blocks)), life or Lifetime.of(BUILTIN["1h"], NOW), salt=bytes(16),
    )  # fmt: skip


def test_golden_bytes() -> None:
    """Objects of this release stay readable: their bytes may only change with the version."""
    golden = Frame(
        sample_namespace().digest, Scope(bytes(16)), 4, 4096, (bytes(range(32)), bytes(32)),
        (bytes(16), bytes(range(16))), Lifetime.of(BUILTIN["1h"], NOW), 7, salt=bytes(range(16)),
    )  # fmt: skip
    assert hashlib.sha256(golden.encode(PUBLIC)).hexdigest() == GOLDEN_SHA256


@pytest.mark.parametrize("blocks", [1, 2, 16, COUNT_MAX])
def test_round_trip(blocks: int) -> None:
    header = frame(blocks)
    raw = header.encode(PUBLIC)
    assert len(raw) == header.header_bytes <= HEADER_BYTES_MAX
    assert decode(raw, PUBLIC) == header
    assert decode(memoryview(raw + b"payload"), PUBLIC) == header
    assert header.span(0, blocks) == (header.header_bytes, header.total_bytes)


@given(lives)
def test_lifetimes_round_trip(life: Lifetime) -> None:
    raw = life.encode()
    assert len(raw) == LIFETIME_BYTES
    assert Lifetime.decode(raw) == life


def test_every_flipped_bit_is_found() -> None:
    raw = bytearray(frame().encode(PUBLIC))
    for offset in range(len(raw)):
        for bit in range(8):
            raw[offset] ^= 1 << bit
            with pytest.raises(CorruptError):
                decode(raw, PUBLIC)
            raw[offset] ^= 1 << bit
    assert decode(raw, PUBLIC) == frame()


@pytest.mark.parametrize("length", [0, 1, 207, 208, 300, 4095])
def test_short_headers_are_refused(length: int) -> None:
    with pytest.raises(CorruptError):
        decode(frame().encode(PUBLIC)[:length], PUBLIC)


@given(st.binary(max_size=5000))
def test_hostile_bytes_raise_one_class(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(b"KVTFRAME\x02\x00" + raw, PUBLIC)


@given(st.binary(min_size=LIFETIME_BYTES, max_size=LIFETIME_BYTES))
def test_hostile_lifetimes_raise_one_class_or_are_lifetimes(raw: bytes) -> None:
    try:
        Lifetime.decode(raw)
    except CorruptError:
        pass


@pytest.mark.parametrize("blocks", [0, COUNT_MAX + 1])
def test_an_impossible_number_of_blocks_is_refused(blocks: int) -> None:
    with pytest.raises(CorruptError, match="impossible sizes"):
        decode(frame(blocks).encode(PUBLIC), PUBLIC)


@pytest.mark.parametrize("later", [{"codec": 2}, {"codec": 255}, {"sealed": 2}])
def test_a_payload_of_a_later_release_is_left_alone(later: dict[str, int]) -> None:
    with pytest.raises(ForeignFrame, match="later release"):
        decode(replace(frame(), **later).encode(PUBLIC), PUBLIC)  # type: ignore[arg-type]


def test_blocks_of_several_lengths_lie_one_behind_the_other() -> None:
    header = replace(frame(3), codec=1, lengths=(4096, 3000, 2500))
    start = header.header_bytes
    assert [header.span(index, index + 1) for index in range(3)] == [
        (start, start + 4096), (start + 4096, start + 7096), (start + 7096, start + 9596),
    ]  # fmt: skip
    assert header.total_bytes == start + 9596


@pytest.mark.parametrize("length", [0, 2048, 5000, 2**40])
def test_a_stored_length_that_no_block_has_is_refused(length: int) -> None:
    with pytest.raises(CorruptError, match="lengths"):
        decode(replace(frame(), codec=1, lengths=(4096, length)).encode(PUBLIC), PUBLIC)


def test_declared_sizes_are_not_believed() -> None:
    """A header that claims 65,535 blocks of 2**63 bytes allocates nothing of the sort."""
    raw = bytearray(frame().encode(PUBLIC))
    raw[10:12] = b"\xff\xff"
    raw[16:24] = (2**63).to_bytes(8, "little")
    tracemalloc.start()
    with pytest.raises(CorruptError, match="impossible sizes"):
        decode(raw, PUBLIC)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
