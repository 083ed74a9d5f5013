"""Codec: lossless compression of one verified unit whose elements are 16-bit floats, bfloat16 or IEEE half.

The bytes of an element go to two planes, one byte per element each:

    high    sign and the upper bits of the exponent (bfloat16: 7; half: all 5, and 2 of mantissa): few values, frequent
    low     the rest: as good as random, stored as it is

    offset 0        the low plane, n bytes for n elements
           n        one Zstandard frame with the high plane, its size declared; strategy "fast" with matches so rare
                    that it is Huffman coding

Nothing says how long a unit is: its container does, in a header that is authenticated, and checks the unit's stored
bytes before they are decoded and the decoded ones by their digest. Even so no input makes `decode_unit` write outside
of its buffer, allocate more than the unit has bytes, or raise anything but CorruptError.

A unit that would not shrink by SAVING_MIN is not coded: 8-bit elements hardly ever do, half does by 12 %, bfloat16 by
31 %. Beyond that little that is lossless is to be had: sign and mantissa carry 7.97 of their 8 bits. Planes of just the
exponents and of just the rest save 0.3 % more and take twice the time to split and join.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import zstandard

NONE, FLOAT16 = 0, 1
"""Identifiers of codecs in stored headers: none, and this one."""

SAVING_MIN = 0.10
ELEMENT_BYTES = 2

_STEP = 1 << 17
"""Elements that are split or joined at a time: few calls, and what they touch stays in a core's own cache."""
_SAMPLE, _SAMPLES = 512, 8

_encoders: list[_Encoder] = []
_decompressors: list[zstandard.ZstdDecompressor] = []

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


def codes(dtype: str) -> bool:
    """Whether elements of this type (`Namespace.dtype`) are 16-bit floats. Pure."""
    return dtype.removeprefix("torch.") in ("bfloat16", "float16", "half")


@functools.cache
def installed() -> bool:
    """Whether the package that codes is there."""
    return importlib.util.find_spec("zstandard") is not None


def require() -> None:
    """Raise ConfigError if the package that codes is not installed."""
    if not installed():
        raise ConfigError("the codec needs the package zstandard: pip install 'kvtier[codec]'")


def encode_unit(unit: memoryview) -> memoryview | None:
    """The stored bytes of a unit; None if it would not shrink by SAVING_MIN, so that it is to be stored as it is.

    `unit`: contiguous little-endian elements; one of an odd number of bytes has none, and is stored as it is. May run
    on any thread; the interpreter lock is free most of the time.
    """
    if len(unit) % ELEMENT_BYTES:
        return None
    elements = _elements(unit)
    count = len(elements)
    if not count or _saving(elements) < SAVING_MIN:
        return None
    stored = np.empty(stored_max(len(unit)), np.uint8)
    with _lent(_encoders, _Encoder) as encoder:
        high = encoder.plane(count)
        _split(elements, high, stored[:count])
        coded = encoder.compressor.compress(high.data)
    if count + len(coded) > len(stored):
        return None
    stored[count : count + len(coded)] = np.frombuffer(coded, np.uint8)
    return stored[: count + len(coded)].data


def decode_unit(stored: memoryview, into: memoryview) -> None:
    """Fill `into` with the unit whose stored bytes are `stored`. Raises CorruptError if they are not the coding of any
    unit of that size; `into` is then as it was."""
    elements = _elements(into)
    count = len(elements)
    if not count < len(stored) <= stored_max(len(into)):
        raise CorruptError(f"a unit of {len(into)} bytes is not stored in {len(stored)}")
    low = np.frombuffer(stored, np.uint8, count)
    high = np.frombuffer(_decompressed(stored[count:], count), np.uint8)
    _join(high, low, elements)


def stored_max(unit_bytes: int) -> int:
    """The most bytes in which a coded unit is stored. Pure."""
    return int(unit_bytes * (1 - SAVING_MIN))


def _elements(unit: memoryview) -> npt.NDArray[np.uint16]:
    """Raises CorruptError for a size that is no number of elements."""
    if len(unit) % ELEMENT_BYTES:
        raise CorruptError(f"a unit of {len(unit)} bytes has no whole number of 16-bit elements")
    return np.frombuffer(unit, np.dtype("<u2"))


def _saving(elements: npt.NDArray[np.uint16]) -> float:
    """The part of a unit that an entropy coder would save, by Shannon's formula over samples of its high plane: so
    that a unit that gains nothing costs nothing. Pure."""
    step = max(1, (len(elements) - _SAMPLE) // (_SAMPLES - 1))
    parts = [elements[first : first + _SAMPLE] for first in range(0, len(elements), step)]
    counts = np.bincount(np.concatenate(parts[:_SAMPLES]) >> 8)
    shares = counts[counts > 0] / counts.sum()
    return float(8 + (shares * np.log2(shares)).sum()) / 16


def _split(elements: npt.NDArray[np.uint16], high: Bytes, low: Bytes) -> None:
    """Fill both planes. Few passes over steps that stay in cache; narrowing drops the upper byte."""
    shifted = np.empty(min(_STEP, len(elements)), np.uint16)
    for first in range(0, len(elements), _STEP):
        part = elements[first : first + _STEP]
        wide = shifted[: len(part)]
        np.copyto(low[first : first + _STEP], part, casting="unsafe")
        np.right_shift(part, 8, out=wide)
        np.copyto(high[first : first + _STEP], wide, casting="unsafe")


def _join(high: Bytes, low: Bytes, elements: npt.NDArray[np.uint16]) -> None:
    """The inverse of `_split`."""
    for first in range(0, len(elements), _STEP):
        part = elements[first : first + _STEP]
        np.left_shift(high[first : first + _STEP], 8, out=part, dtype=np.uint16)
        np.bitwise_or(part, low[first : first + _STEP], out=part)


@contextlib.contextmanager
def _lent(idle: list[T], make: Callable[[], T]) -> Iterator[T]:
    """An object that no other thread uses meanwhile; there are as many as threads used them at once."""
    try:
        found = idle.pop()
    except IndexError:
        found = make()
    yield found
    idle.append(found)


class _Encoder:
    """A compressor for which matches of 7 bytes in a small window are hardly looked for, and memory for a plane: fresh
    pages would cost as much as the split."""

    def __init__(self) -> None:
        import zstandard

        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
                target_length=0, write_content_size=True, write_checksum=False, write_dict_id=False,
            )
        )  # fmt: skip
        self._plane = np.empty(0, np.uint8)

    def plane(self, count: int) -> Bytes:
        """The same memory each time."""
        if len(self._plane) < count:
            self._plane = np.empty(count, np.uint8)
        return self._plane[:count]


def _new_decompressor() -> zstandard.ZstdDecompressor:
    import zstandard

    return zstandard.ZstdDecompressor()


def _decompressed(frame: memoryview, size: int) -> bytes:
    """The `size` bytes of a frame that ends where `frame` does. Raises CorruptError."""
    import zstandard

    try:
        # The library allocates what a frame declares, whatever the caller expects.
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise CorruptError("a coded plane of another size")
        with _lent(_decompressors, _new_decompressor) as decompressor:
            plane = decompressor.decompress(frame, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError:
        raise CorruptError("a coded plane that cannot be decoded") from None
    if len(plane) != size:
        raise CorruptError("a coded plane of another size")
    return plane
