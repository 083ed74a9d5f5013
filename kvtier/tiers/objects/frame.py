"""Frame: the bytes of one stride (1 … S consecutive blocks of a chain) as an object, with a header that names them.

    offset size
    0      8     magic "KVTFRAME"
    8      2     version (1)
    10     2     count: blocks in the frame, 1 … COUNT_MAX
    12     4     depth of the first block in its chain
    16     8     block_bytes
    24     8     header_bytes: where the payload starts, a multiple of 4096
    32     32    namespace digest
    64     16    scope
    80     77    lifetime as written (kvtier.retention.terms)
    157    3     zero
    160    48·n  for each block: chain hash (32) ‖ XXH3-128 of its payload (16)
    …      16    XXH3-128 of everything before
    …            zero up to header_bytes
    header_bytes count × block_bytes of payload

All integers little-endian. The header's digest covers the digests of the blocks, so every byte of the frame is
checked, and a reader of some blocks reads the header and their ranges only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.errors import CorruptError
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES, BlockKey, Scope
from kvtier.retention.lifetime import LIFETIME_BYTES, Lifetime

MAGIC = b"KVTFRAME"
VERSION = 1
COUNT_MAX = 1024
BLOCK_BYTES_MAX = 1 << 32
HEADER_ALIGN = 4096
_FIXED = struct.Struct(f"<8sHHIQQ{NAMESPACE_BYTES}s{SCOPE_BYTES}s{LIFETIME_BYTES}s3x")
_ENTRY_BYTES = HASH_BYTES + DIGEST_BYTES
HEADER_BYTES_MAX = -(-(_FIXED.size + COUNT_MAX * _ENTRY_BYTES + DIGEST_BYTES) // HEADER_ALIGN) * HEADER_ALIGN


class ForeignFrame(CorruptError):
    """Not ours to judge: the object of another version, of another stride, or none of kvtier's at all. Readers leave it
    alone.

    `junk`: it does not even begin as a frame, so that a writer may replace it. `etag`: the version that was read.
    """

    def __init__(self, why: str, *, junk: bool = False, etag: str = "") -> None:
        super().__init__(why)
        self.junk = junk
        self.etag = etag


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a frame. `hashes[i]` and `digests[i]` are of the block at depth `depth + i`."""

    namespace: bytes
    scope: Scope
    depth: int
    block_bytes: int
    hashes: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    life: Lifetime

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return header_bytes_of(len(self.hashes))

    @property
    def total_bytes(self) -> int:
        """Length of the whole frame; any other length is damage."""
        return self.header_bytes + len(self.hashes) * self.block_bytes

    @property
    def keys(self) -> list[BlockKey]:
        """The blocks' keys, in order."""
        return [self.key(index) for index in range(len(self.hashes))]

    def key(self, index: int) -> BlockKey:
        """The key of block `index`."""
        return BlockKey(self.scope + self.hashes[index])

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Byte range [start, end) of the blocks first … stop-1 inside the frame."""
        return self.header_bytes + first * self.block_bytes, self.header_bytes + stop * self.block_bytes

    def encode(self) -> bytes:
        """The header, `header_bytes` long. The payload follows it, block after block."""
        out = bytearray(
            _FIXED.pack(
                MAGIC, VERSION, len(self.hashes), self.depth, self.block_bytes, self.header_bytes,
                self.namespace, self.scope, self.life.encode(),
            )
        )  # fmt: skip
        for block_hash, digest in zip(self.hashes, self.digests, strict=True):
            out += block_hash + digest
        out += digest_of([out])
        return bytes(out).ljust(self.header_bytes, b"\0")


def header_bytes_of(count: int) -> int:
    """Bytes before the payload in a frame of `count` blocks. Pure."""
    raw = _FIXED.size + count * _ENTRY_BYTES + DIGEST_BYTES
    return -(-raw // HEADER_ALIGN) * HEADER_ALIGN


def check_version(raw: bytes | memoryview) -> None:
    """Raises ForeignFrame unless an object that begins with `raw` is a frame of this version, whole or damaged."""
    if bytes(raw[: len(MAGIC)]) != MAGIC:
        raise ForeignFrame("no frame: wrong magic", junk=True)
    version = int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 2], "little")
    if version != VERSION:
        raise ForeignFrame(f"frame version {version}, this code reads {VERSION}")


def decode(raw: bytes | memoryview) -> Frame:
    """Parse and check a header from the first bytes of a frame (HEADER_BYTES_MAX are always enough).

    Raises CorruptError for anything `Frame.encode` cannot have written, before allocating anything whose size the
    bytes declare; ForeignFrame, if this version has no right to call it damaged.
    """
    view = memoryview(raw).cast("B")
    check_version(view)
    if len(view) < _FIXED.size:
        raise CorruptError(f"a frame header has at least {_FIXED.size} bytes, got {len(view)}")
    _, _, count, depth, block_bytes, header_bytes, namespace, scope, life = _FIXED.unpack_from(view)
    if not 1 <= count <= COUNT_MAX or not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise CorruptError(f"frame with impossible sizes: {count} blocks of {block_bytes} bytes")
    end = _FIXED.size + count * _ENTRY_BYTES
    if header_bytes != header_bytes_of(count):
        raise CorruptError(f"frame header of {header_bytes} bytes for {count} blocks")
    if len(view) < header_bytes:
        raise ForeignFrame(f"a frame of {count} blocks, more than expected: another stride")
    if digest_of([view[:end]]) != view[end : end + DIGEST_BYTES]:
        raise CorruptError("frame header does not match its checksum")
    if (bytes(view[_FIXED.size - 3 : _FIXED.size]) + bytes(view[end + DIGEST_BYTES : header_bytes])).strip(b"\0"):
        raise CorruptError("frame header padding is not zero")
    hashes, digests = [], []
    for start in range(_FIXED.size, end, _ENTRY_BYTES):
        hashes.append(bytes(view[start : start + HASH_BYTES]))
        digests.append(bytes(view[start + HASH_BYTES : start + _ENTRY_BYTES]))
    return Frame(namespace, Scope(scope), depth, block_bytes, tuple(hashes), tuple(digests), Lifetime.decode(life))
