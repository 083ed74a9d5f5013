"""Amounts as people write them: `64GiB`, `500MiB/s`, `3DWPD`, `10m`.

All parsers raise InvalidRequest with the remedy and an example; all are pure and bounded in time.
"""

from __future__ import annotations

import re
from decimal import Decimal

from kvtier.errors import InvalidRequest

TEXT_CHARS_MAX = 64
"""No amount is longer than this; what is gets refused unread."""

SIZE_BYTES_MAX = 2**60
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,9})?)\s*([KMGTP]iB|[kKMGTP]?B|)\s*", re.ASCII)
_DWPD = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*DWPD\s*", re.ASCII)
_TIME_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", re.ASCII)


def shorten(value: object) -> str:
    """A wrong value as messages show it: within a line."""
    if isinstance(value, str | bytes):
        # Cut before quoting: repr of a megabyte costs more than the message is worth.
        return repr(value) if len(value) <= TEXT_CHARS_MAX else f"{value[:TEXT_CHARS_MAX]!r}…"
    if value is None or isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 128):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def printable(text: str) -> str:
    """A text as a terminal may have it: what controls one, or turns letters about, is spelt; lines stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def parse_size(value: str | int) -> int:
    """`"64GiB"` → bytes. KiB MiB GiB TiB are powers of 1024, kB MB GB TB of 1000; a plain integer is bytes."""
    if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and (match := _SIZE.fullmatch(value)):
        whole, _, fraction = match[1].partition(".")
        unit = _BINARY.get(match[2]) or _DECIMAL.get(match[2]) or 1
        # Integers throughout: a float would lose bytes above 2**53.
        size = int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
    elif type(value) is int:
        size = value
    else:
        raise InvalidRequest(f"{shorten(value)} is not a size; write bytes or a number with a unit, such as 64GiB")
    if not 0 < size <= SIZE_BYTES_MAX:
        raise InvalidRequest(f"{shorten(value)} is out of range; a size lies above 0 and at most 1EiB, such as 64GiB")
    return size


def parse_rate(value: str | int) -> int:
    """`"500MiB/s"` → bytes per second."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and not text.endswith("/s"):
        raise InvalidRequest(f"{shorten(value)} is not a rate; write a size per second, such as 500MiB/s")
    try:
        return parse_size(text.removesuffix("/s") if isinstance(text, str) else text)
    except InvalidRequest as wrong:
        message = f"{shorten(value)} is not a rate above 0; write a size per second, such as 500MiB/s"
        raise InvalidRequest(message) from wrong


def parse_endurance(value: str) -> float:
    """`"3DWPD"` → 3.0 drive writes per day: multiples of the tier's capacity that may be written each day."""
    match = _DWPD.fullmatch(value) if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX else None
    if match is None or float(match[1]) <= 0:
        raise InvalidRequest(f"{shorten(value)} is not a write budget; write drive writes per day, such as 3DWPD")
    return float(match[1])


def parse_duration(text: str) -> float:
    """`"10m"` → 600.0 seconds. Units ms s m h d w."""
    match = _DURATION.fullmatch(text) if len(text) <= TEXT_CHARS_MAX else None
    if match is None:
        raise InvalidRequest(f"{shorten(text)} is not a duration; write a number and one of ms s m h d w, such as 24h")
    return float(match[1]) * (0.001 if match[2] == "ms" else _TIME_UNITS[match[2]])


def format_size(size: int) -> str:
    """The shortest exact way to write a size: 68719476736 → `64GiB`."""
    for name, unit in reversed(_BINARY.items()):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def plain(number: float) -> str:
    """All digits of a number and no exponent, as no amount has one: 1e-06 → `0.000001`, 3.0 → `3`."""
    return f"{Decimal(repr(number)):f}".removesuffix(".0")


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration: 86400 → `1d`; parts of a second in ms."""
    if seconds != int(seconds):
        short = f"{plain(float(f'{seconds * 1000:g}'))}ms"
        return short if parse_duration(short) == seconds else f"{plain(seconds)}s"
    for name, unit in _TIME_UNITS.items():
        if seconds >= unit and seconds % unit == 0:
            return f"{int(seconds // unit)}{name}"
    return f"{int(seconds)}s"
