"""Compression of units: each block is coded alone (kvtier.codec), so that ranged reads stay possible.

The stored bytes of a block that has fewer than `block_bytes` are its coding; those of any other are the block itself.
Coding and decoding take milliseconds per block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier import codec
from kvtier.errors import ConfigError
from kvtier.tiers.objects.bucket.protocol import Scatter
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.protocol import Pieces, Sealed


def codes(compression: str, dtype: str) -> bool:
    """Whether a tier with this setting (`tiers.g4.compression`) codes the blocks of a namespace of this `dtype`. Raises
    ConfigError where that needs a package that is missing, or for another setting."""
    if compression not in ("none", "lossless"):
        raise ConfigError(f"tiers.g4.compression must be none or lossless, got {compression!r}")
    if compression == "none":
        return False
    try:
        codec.require()
    except ConfigError as missing:
        raise ConfigError(f"tiers.g4.compression: {missing}") from None
    return codec.codes(dtype)


def coded(blocks: Sequence[Sealed]) -> Iterator[Pieces]:
    """The stored bytes of each block: its coding, or its own pieces if it would not shrink."""
    for block in blocks:
        stored = codec.encode_unit(_joined(block.pieces))
        yield block.pieces if stored is None else (stored,)


def landing(frame: Frame, index: int, into: Pieces) -> Pieces:
    """Where the stored bytes of block `index` are to be read: `into`, or memory of their own if the block is coded."""
    start, stop = frame.span(index, index + 1)
    return into if stop - start == frame.block_bytes else (memoryview(bytearray(stop - start)),)


def landed(frame: Frame, read: Sequence[Pieces]) -> list[Pieces]:
    """The stored bytes of the frame's first blocks, of which `read` has the blocks' own memory: a reader that did not
    know the header read the payload as if nothing were coded."""
    if not frame.lengths:
        return list(read)
    copy = memoryview(bytearray(sum(frame.lengths[: len(read)])))
    scatter, start = Scatter([copy]), 0
    out: list[Pieces] = []
    for piece in (piece for pieces in read for piece in pieces):
        scatter.feed(piece)
    for length in frame.lengths[: len(read)]:
        out.append((copy[start : start + length],))
        start += length
    return out


def decode(frame: Frame, stored: Pieces, into: Pieces) -> None:
    """Fill `into` with the block whose stored bytes these are. Raises CorruptError."""
    if sum(map(len, stored)) == frame.block_bytes:
        _lay(stored, into)
    elif len(into) == 1:
        codec.decode_unit(_joined(stored), into[0])
    else:
        whole = memoryview(bytearray(frame.block_bytes))
        codec.decode_unit(_joined(stored), whole)
        _lay((whole,), into)


def _joined(pieces: Pieces) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _lay(stored: Pieces, into: Pieces) -> None:
    scatter = Scatter(into)
    for piece in stored:
        scatter.feed(piece)
