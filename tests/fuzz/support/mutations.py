"""Mutations of valid bytes that know how records are built: lengths and counts, fields of 2, 4 and 8 bytes, texts."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[int]], int]
HUGE = tuple(
    struct.pack(order + kind, (1 << bits) - 1 - less)
    for kind, bits in (("H", 16), ("I", 32), ("Q", 64))
    for order in "<>"
    for less in (0, 1 << bits - 1)
)
ODD = (
    *(struct.pack("<d", value) for value in (math.nan, math.inf, -math.inf, -1.0, 1e300, 2.0**41)),
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1",
    b"[" * 3000, b'{"a":' * 600, b"NaN", b"-1", b"9" * 400, b"1e999", b"null", b"true", b'"\\ud800"', b"\xff\xfe",
    b"\0", b"\n- &a [*a]\n", b"\n<<: *x\n", b"!!python/object:os.system x", b"${HOME}", b": ", b"\t", b"\r\n", b",",
    b'"', b"}",
)  # fmt: skip


def _flip(raw: bytearray, other: bytes, draw: Draw) -> None:
    if raw:
        raw[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))


def _truncate(raw: bytearray, other: bytes, draw: Draw) -> None:
    del raw[draw(st.integers(0, len(raw))) :]


def _extend(raw: bytearray, other: bytes, draw: Draw) -> None:
    raw += bytes([draw(st.integers(0, 255))]) * draw(st.integers(1, 64))


def _swap(raw: bytearray, other: bytes, draw: Draw) -> None:
    """Two parts of one size change places."""
    size = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    if len(raw) >= 2 * size:
        one, two = sorted(draw(st.integers(0, len(raw) - size)) for _ in range(2))
        raw[one : one + size], raw[two : two + size] = raw[two : two + size], raw[one : one + size]


def _duplicate(raw: bytearray, other: bytes, draw: Draw) -> None:
    start, end = sorted(draw(st.integers(0, len(raw))) for _ in range(2))
    raw[end:end] = raw[start:end] * draw(st.integers(1, 3))


def _remove(raw: bytearray, other: bytes, draw: Draw) -> None:
    start = draw(st.integers(0, len(raw)))
    del raw[start : start + draw(st.integers(1, 64))]


def _splice(raw: bytearray, other: bytes, draw: Draw) -> None:
    """The end of another valid value."""
    start = draw(st.integers(0, len(raw)))
    raw[start:] = other[min(start, len(other)) :]


def _overwrite(raw: bytearray, other: bytes, draw: Draw) -> None:
    """A field becomes huge, or what no field should be."""
    value = draw(st.sampled_from([*HUGE, *ODD, bytes(8)]))  # type: ignore[arg-type]
    start = draw(st.integers(0, len(raw)))
    raw[start : start + len(value)] = value  # type: ignore[arg-type]


def _insert(raw: bytearray, other: bytes, draw: Draw) -> None:
    start = draw(st.integers(0, len(raw)))
    raw[start:start] = draw(st.sampled_from(ODD))  # type: ignore[arg-type]


KINDS = (_flip, _truncate, _extend, _swap, _duplicate, _remove, _splice, _overwrite, _insert)


@st.composite
def mutated(draw: Draw, samples: Sequence[bytes]) -> bytes:
    """One of the samples, changed one to four times."""
    raw = bytearray(draw(st.sampled_from(samples)))  # type: ignore[arg-type]
    for _ in range(draw(st.integers(1, 4))):
        draw(st.sampled_from(KINDS))(raw, draw(st.sampled_from(samples)), draw)  # type: ignore[arg-type, operator]
    return bytes(raw)
