"""Codec: lossless compression of one verified unit whose elements are 16-bit floats, bfloat16 or IEEE half.

An element is sign (1 bit), then from bit 14 down exponent and mantissa. Two planes, one byte per element each:

    high    bits 14 … 7: exponents, few values of which are frequent (bfloat16: all 8 bits; half: 5, and 3 of mantissa)
    low     sign ‖ bits 6 … 0: as good as random, stored as it is

    offset 0        the low plane, n bytes for n elements
           n        one Zstandard frame with the high plane, its size declared; strategy "fast" with matches so rare
                    that it is Huffman coding

Nothing says how long a unit is: its container does, in a header that is authenticated, and checks the unit's stored
bytes before they are decoded and the decoded ones by their digest. Even so no input makes `decode_unit` write outside
of its buffer, allocate more than the unit has bytes, or raise anything but CorruptError.

A unit that would not shrink by SAVING_MIN is not coded: 8-bit elements hardly ever do, half does by 12 %, bfloat16 by
32 %. Beyond that nothing lossless is to be had: sign and mantissa carry 7.97 of their 8 bits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import zstandard

NONE, FLOAT16 = 0, 1
"""Identifiers of codecs in stored headers: none, and this one."""

SAVING_MIN = 0.10
ELEMENT_BYTES = 2

_STEP = 1 << 16
"""Elements that are split or joined at a time: few calls, and what they touch stays in a core's own cache."""
_SAMPLE, _SAMPLES = 1024, 16
_LOW = np.int16(-0x7F81)  # 0x807F: sign and the lower 7 bits of mantissa

_local = threading.local()

Bytes = npt.NDArray[np.uint8]


def require() -> None:
    """Raise ConfigError if the package that codes is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError("the codec needs the package zstandard: pip install 'kvtier[codec]'") from None


def encode_unit(unit: memoryview) -> memoryview | None:
    """The stored bytes of a unit; None if it would not shrink by SAVING_MIN, so that it is to be stored as it is.

    `unit`: contiguous little-endian elements. May run on any thread; the interpreter lock is free most of the time.
    """
    elements = _elements(unit)
    count = len(elements)
    if not count or _saving(elements) < SAVING_MIN:
        return None
    high, stored = np.empty(count, np.uint8), np.empty(stored_max(len(unit)), np.uint8)
    _split(elements, high, stored[:count])
    coded = _compressor().compress(high.data)
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
    counts = np.bincount((np.concatenate(parts[:_SAMPLES]) >> 7) & 0xFF)
    shares = counts[counts > 0] / counts.sum()
    return float(8 + (shares * np.log2(shares)).sum()) / 16


def _split(elements: npt.NDArray[np.uint16], high: Bytes, low: Bytes) -> None:
    """Fill both planes. Few passes over steps that stay in cache; narrowing drops the upper byte."""
    shifted, top = np.empty(min(_STEP, len(elements)), np.uint16), np.empty(min(_STEP, len(elements)), np.uint8)
    for first in range(0, len(elements), _STEP):
        part, to = elements[first : first + _STEP], low[first : first + _STEP]
        wide, upper = shifted[: len(part)], top[: len(part)]
        np.copyto(to, part, casting="unsafe")
        np.right_shift(part, 7, out=wide)
        np.copyto(high[first : first + _STEP], wide, casting="unsafe")
        np.right_shift(wide, 1, out=wide)
        np.copyto(upper, wide, casting="unsafe")
        # The sign of `upper` above the seven bits of `to`.
        np.bitwise_xor(to, upper, out=to)
        np.bitwise_and(to, 0x7F, out=to)
        np.bitwise_xor(to, upper, out=to)


def _join(high: Bytes, low: Bytes, elements: npt.NDArray[np.uint16]) -> None:
    """The inverse of `_split`. A low byte widened with its sign has that in bit 15, too."""
    size = min(_STEP, len(elements))
    shifted, rest = np.empty(size, np.uint16), np.empty(size, np.int16)
    signed = low.view(np.int8)
    for first in range(0, len(elements), _STEP):
        part = elements[first : first + _STEP]
        wide, lower = shifted[: len(part)], rest[: len(part)]
        np.left_shift(high[first : first + _STEP], 7, out=wide, dtype=np.uint16)
        np.bitwise_and(signed[first : first + _STEP], _LOW, out=lower, dtype=np.int16)
        np.bitwise_or(wide, lower.view(np.uint16), out=part)


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's own: one cannot be shared. Matches of 7 bytes in a small window are hardly looked for."""
    found: Any = getattr(_local, "compressor", None)
    if found is None:
        import zstandard

        found = _local.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
                target_length=0, write_content_size=True, write_checksum=False, write_dict_id=False,
            )
        )  # fmt: skip
    return found  # type: ignore[no-any-return]


def _decompressed(frame: memoryview, size: int) -> bytes:
    """The `size` bytes of a frame that ends where `frame` does. Raises CorruptError."""
    import zstandard

    try:
        # The library allocates what a frame declares, whatever the caller expects.
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise CorruptError("a coded plane of another size")
        plane = _decompressor().decompress(frame, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError:
        raise CorruptError("a coded plane that cannot be decoded") from None
    if len(plane) != size:
        raise CorruptError("a coded plane of another size")
    return plane


def _decompressor() -> zstandard.ZstdDecompressor:
    found: Any = getattr(_local, "decompressor", None)
    if found is None:
        import zstandard

        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found  # type: ignore[no-any-return]
