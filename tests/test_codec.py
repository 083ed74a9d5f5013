"""The codec of 16-bit floats: every value comes back, and nothing else is taken for a coded unit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import codec
from kvtier.errors import CorruptError

zstandard = pytest.importorskip("zstandard")

Elements = npt.NDArray[np.uint16]
COUNT = 8 * 1024


def bfloat16(values: npt.NDArray[np.float32]) -> Elements:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def normal(count: int = COUNT, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def view(elements: npt.NDArray[np.uint16]) -> memoryview:
    return memoryview(elements.tobytes())


def stored_of(unit: memoryview) -> memoryview:
    stored = codec.encode_unit(unit)
    assert stored is not None
    return stored


def decoded(stored: bytes | memoryview, size: int) -> bytes:
    """Also proves that nothing around the buffer is written to."""
    around = bytearray(b"\xa5" * (size + 128))
    codec.decode_unit(memoryview(stored), memoryview(around)[64 : 64 + size])
    assert around[:64] == around[-64:] == b"\xa5" * 64
    return bytes(around[64:-64])


@pytest.mark.parametrize("kind", ["bfloat16", "half"])
@pytest.mark.parametrize("count", [1, 2, 1023, COUNT, (1 << 17) + 3])
def test_a_unit_comes_back(kind: str, count: int) -> None:
    values = normal(count)
    unit = view(bfloat16(values) if kind == "bfloat16" else values.astype(np.float16).view(np.uint16))
    stored = codec.encode_unit(unit)
    if count >= COUNT:
        assert stored is not None and len(unit) / len(stored) > (1.45 if kind == "bfloat16" else 1.13)
    if stored is not None:
        assert len(stored) <= codec.stored_max(len(unit)) and decoded(stored, len(unit)) == unit


def test_every_value_of_an_element_comes_back() -> None:
    """NaNs with their payload, infinities, denormals and both zeros: the split and the join know no numbers."""
    every = np.arange(1 << 16, dtype=np.uint16)
    high, low, back = np.empty(1 << 16, np.uint8), np.empty(1 << 16, np.uint8), np.empty_like(every)
    codec._split(every, high, low)
    codec._join(high, low, back)
    assert (back == every).all()
    assert (high == every >> 8).all() and (low == every & 0xFF).all()


def test_units_that_gain_nothing_are_not_coded() -> None:
    random = np.random.default_rng(0).integers(0, 1 << 16, COUNT, dtype=np.uint16)
    assert codec.encode_unit(view(random)) is None
    # e4m3 of normal values: sign, 4 bits of exponent and 3 of mantissa, two elements where one is expected.
    exponents = np.clip(np.floor(np.log2(np.abs(normal(2 * COUNT)) + 1e-9)) + 7, 0, 15).astype(np.uint8)
    rest = np.random.default_rng(1).integers(0, 16, 2 * COUNT, dtype=np.uint8)
    assert codec.encode_unit(view((exponents << 3 | rest & 7 | (rest & 8) << 4).view(np.uint16))) is None
    assert codec.encode_unit(memoryview(b"")) is None


def test_a_unit_in_memory_of_any_alignment() -> None:
    unit = view(bfloat16(normal()))
    shifted = memoryview(bytearray(b"\0" + bytes(unit)))[1:]
    assert bytes(stored_of(shifted)) == bytes(stored_of(unit))


def test_every_truncation_is_an_error_and_writes_nothing() -> None:
    unit = view(bfloat16(normal(1024)))
    stored = stored_of(unit)
    for length in range(len(stored)):
        into = bytearray(len(unit))
        with pytest.raises(CorruptError):
            codec.decode_unit(stored[:length], memoryview(into))
        assert not any(into)


def test_what_declares_another_size_is_refused_before_it_is_allocated() -> None:
    unit = view(bfloat16(normal()))
    low = bytes(stored_of(unit)[:COUNT])
    forged = [
        zstandard.compress(bytes(1 << 30)),
        zstandard.compress(bytes(COUNT - 1)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(COUNT)),
        zstandard.compress(bytes(COUNT)) + b"\0",
        zstandard.compress(bytes(COUNT)) * 2,
        b"\x50\x2a\x4d\x18" + COUNT.to_bytes(4, "little") + bytes(1024),
        # A frame that declares 2**62 bytes and has none.
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\x01\0\0",
        b"",
    ]
    for frame in forged:
        with pytest.raises(CorruptError):
            decoded(low + frame, len(unit))
    with pytest.raises(CorruptError):
        decoded(stored_of(unit), len(unit) + 1)
    with pytest.raises(CorruptError):
        decoded(stored_of(unit), len(unit) - 2)


UNIT = view(bfloat16(normal(2048, seed=7)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_forged_unit_is_an_error_or_other_values_of_the_same_size(data: st.DataObject) -> None:
    codec.require()
    raw = bytearray(stored_of(UNIT))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, 8))
    raw = raw[: len(raw) - cut] + data.draw(st.binary(max_size=16))
    try:
        assert len(decoded(raw, len(UNIT))) == len(UNIT)
    except CorruptError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4096), st.integers(0, 2048))
def test_any_bytes_are_an_error_or_a_unit(raw: bytes, count: int) -> None:
    try:
        decoded(raw, 2 * count)
    except CorruptError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 5000), st.integers(1, 65535))
def test_any_elements_come_back(seed: int, count: int, values: int) -> None:
    """Drawn from `values` distinct ones: the fewer, the more is saved."""
    rng = np.random.default_rng(seed)
    unit = view(rng.choice(rng.integers(0, 1 << 16, values, dtype=np.uint16), count))
    stored = codec.encode_unit(unit)
    assert stored is None or decoded(stored, len(unit)) == unit


@pytest.mark.long
@pytest.mark.timeout(900)
def test_values_of_a_real_model_shrink_by_a_third(tmp_path: Path) -> None:
    """KVTIER_REAL_MODEL names the directory of a Hugging Face checkpoint in bfloat16."""
    if "KVTIER_REAL_MODEL" not in os.environ:
        pytest.skip("KVTIER_REAL_MODEL names no checkpoint")
    from benchmarks.codec import units_of_model

    for name, units in units_of_model(os.environ["KVTIER_REAL_MODEL"]).items():
        stored = [codec.encode_unit(unit) for unit in units]
        for unit, coded in zip(units, stored, strict=True):
            assert coded is None or decoded(coded, len(unit)) == unit
        ratio = sum(map(len, units)) / sum(
            len(unit if coded is None else coded) for unit, coded in zip(units, stored, strict=True)
        )
        assert ratio >= 1.4, name
