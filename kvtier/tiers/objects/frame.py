"""Frame: the bytes of one unit (1 … S consecutive blocks of a chain) as an object, with a header that names them.

    offset size
    0      8     magic "KVTFRAME"
    8      2     version (2)
    10     2     count: blocks in the frame, 1 … COUNT_MAX
    12     4     depth of the first block in its chain
    16     8     block_bytes
    24     8     header_bytes: where the payload starts, a multiple of 4096
    32     32    namespace digest
    64     16    scope
    80     77    lifetime as written (kvtier.retention.terms)
    157    1     codec of the payload: 0, none; 1: kvtier.codec, for each block that has fewer stored bytes than others
    158    1     sealed: 1 if the payload is encrypted (kvtier.tiers.objects.encryption), else 0
    159    1     zero
    160    8     id of the key that authenticates the frame; zeros: the one that everybody knows
    168    8     position in the purge log that the writers of all blocks had read
    176    16    salt: random and new for each payload, zeros where the keyring is not trusted
    192    16    commitment to the key of a sealed payload, else zero
    208    72·n  for each block: chain hash (32) ‖ XXH3-128 of its payload (16) ‖ tag (16) ‖ stored bytes (8)
    …      16    tag of everything before, by the key (kvtier.keyring)
    …            zero up to header_bytes
    header_bytes the stored bytes of the blocks, in order

All integers little-endian. The header's tag covers the digests and tags of the blocks, so every byte of the frame is
checked, and a reader of some blocks reads the header and their ranges only. A block's tag is the GMAC of its stored
bytes (kvtier.tiers.objects.payload); zero where the keyring is not trusted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtier import codec
from kvtier.checksum import DIGEST_BYTES
from kvtier.errors import CorruptError
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES, BlockKey, Scope
from kvtier.keyring import COMMITMENT_BYTES, KEY_ID_BYTES, PUBLIC_ID, TAG_BYTES, Keyring, UnknownKey
from kvtier.retention.lifetime import LIFETIME_BYTES, Lifetime
from kvtier.tiers.protocol import Miss

MAGIC = b"KVTFRAME"
VERSION = 2
COUNT_MAX = 1024
BLOCK_BYTES_MAX = 1 << 32
HEADER_ALIGN = 4096
SALT_BYTES = 16
_FIXED = struct.Struct(
    f"<8sHHIQQ{NAMESPACE_BYTES}s{SCOPE_BYTES}s{LIFETIME_BYTES}sBBx{KEY_ID_BYTES}sQ{SALT_BYTES}s{COMMITMENT_BYTES}s"
)
_ENTRY = struct.Struct(f"<{HASH_BYTES}s{DIGEST_BYTES}s{TAG_BYTES}sQ")
HEADER_BYTES_MAX = -(-(_FIXED.size + COUNT_MAX * _ENTRY.size + TAG_BYTES) // HEADER_ALIGN) * HEADER_ALIGN
_PURPOSE = "unit"


class ForeignFrame(CorruptError):
    """Not ours to judge: the object of another version, of another stride, of a key that is not accepted, one whose tag
    does not fit, or none of kvtier's at all. Readers leave it alone.

    `miss`: why it cannot be had. `junk`: it does not even begin as a frame, so that a writer without a keyring may
    replace it. `etag`: the version that was read.
    """

    def __init__(self, why: str, *, miss: Miss = Miss.FOREIGN, junk: bool = False, etag: str = "") -> None:
        super().__init__(why)
        self.miss = miss
        self.junk = junk
        self.etag = etag


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a frame. `hashes[i]` and `digests[i]` are of the block at depth `depth + i`, its tag the i-th 16
    bytes of `tags` (b"": there are none). `lengths`: stored bytes of each block, () where all have `block_bytes`."""

    namespace: bytes
    scope: Scope
    depth: int
    block_bytes: int
    hashes: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    life: Lifetime
    position: int = 0
    key_id: bytes = PUBLIC_ID
    salt: bytes = bytes(SALT_BYTES)
    tags: bytes = b""
    codec: int = 0
    sealed: int = 0
    commitment: bytes = bytes(COMMITMENT_BYTES)
    lengths: tuple[int, ...] = ()

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return header_bytes_of(len(self.hashes))

    @property
    def total_bytes(self) -> int:
        """Length of the whole frame; any other length is damage."""
        return self.span(0, len(self.hashes))[1]

    @property
    def keys(self) -> list[BlockKey]:
        """The blocks' keys, in order."""
        return [self.key(index) for index in range(len(self.hashes))]

    def key(self, index: int) -> BlockKey:
        """The key of block `index`."""
        return BlockKey(self.scope + self.hashes[index])

    def tag(self, index: int) -> bytes:
        """The tag of block `index`; b"" if the frame has none."""
        return self.tags[index * TAG_BYTES : (index + 1) * TAG_BYTES]

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Byte range [start, end) of the blocks first … stop-1 inside the frame."""
        start = self.header_bytes
        if self.lengths:
            return start + sum(self.lengths[:first]), start + sum(self.lengths[:stop])
        return start + first * self.block_bytes, start + stop * self.block_bytes

    def encode(self, keyring: Keyring) -> bytes:
        """The header, `header_bytes` long, authenticated by the frame's key. The payload follows it, block after block.
        Raises UnknownKey."""
        out = bytearray(
            _FIXED.pack(
                MAGIC, VERSION, len(self.hashes), self.depth, self.block_bytes, self.header_bytes, self.namespace,
                self.scope, self.life.encode(), self.codec, self.sealed, self.key_id, self.position, self.salt,
                self.commitment,
            )
        )  # fmt: skip
        lengths = self.lengths or (self.block_bytes,) * len(self.hashes)
        for index, pair in enumerate(zip(self.hashes, self.digests, strict=True)):
            out += _ENTRY.pack(*pair, self.tag(index), lengths[index])
        out += keyring.tag_by(self.key_id, _PURPOSE, out)
        return bytes(out).ljust(self.header_bytes, b"\0")


def header_bytes_of(count: int) -> int:
    """Bytes before the payload in a frame of `count` blocks. Pure."""
    raw = _FIXED.size + count * _ENTRY.size + TAG_BYTES
    return -(-raw // HEADER_ALIGN) * HEADER_ALIGN


def blocks_in(size: int, block_bytes: int) -> int:
    """How many blocks a frame of `size` bytes holds; at least how many, if some are coded. Pure."""
    guess = min(size // block_bytes, COUNT_MAX)
    plain = next((n for n in range(guess, 0, -1) if header_bytes_of(n) + n * block_bytes == size), 0)
    return plain or max(0, min(COUNT_MAX, -(-(size - HEADER_ALIGN) // block_bytes)))


def check_version(raw: bytes | memoryview) -> None:
    """Raises ForeignFrame unless an object that begins with `raw` is a frame of this version, whole or damaged."""
    if bytes(raw[: len(MAGIC)]) != MAGIC:
        raise ForeignFrame("no frame: wrong magic", junk=True)
    version = int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 2], "little")
    if version != VERSION:
        raise ForeignFrame(f"frame version {version}, this code reads {VERSION}")


def decode(raw: bytes | memoryview, keyring: Keyring) -> Frame:
    """Parse and check a header from the first bytes of a frame (HEADER_BYTES_MAX are always enough).

    Raises ForeignFrame for what this reader has no right to call damaged: another version, a key that it does not
    accept, a codec that it does not know, and with a trusted keyring whatever lacks a right tag. Raises CorruptError
    for anything else that `Frame.encode` cannot have written, before allocating anything whose size the bytes declare.
    """
    view = memoryview(raw).cast("B")
    check_version(view)
    try:
        return _decode(view, keyring)
    except ForeignFrame:
        raise
    except UnknownKey as unknown:
        raise ForeignFrame(str(unknown), miss=Miss.UNKNOWN_KEY) from None
    except CorruptError as damage:
        if keyring.trusted:
            raise ForeignFrame(str(damage), miss=Miss.FORGED) from None
        raise


def _decode(view: memoryview, keyring: Keyring) -> Frame:
    if len(view) < _FIXED.size:
        raise CorruptError(f"a frame header has at least {_FIXED.size} bytes, got {len(view)}")
    (
        _, _, count, depth, block_bytes, header_bytes, namespace, scope, life, coding, sealed, key_id, position,
        salt, commitment,
    ) = _FIXED.unpack_from(view)  # fmt: skip
    if not 1 <= count <= COUNT_MAX or not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise CorruptError(f"frame with impossible sizes: {count} blocks of {block_bytes} bytes")
    end = _FIXED.size + count * _ENTRY.size
    if header_bytes != header_bytes_of(count):
        raise CorruptError(f"frame header of {header_bytes} bytes for {count} blocks")
    if len(view) < header_bytes:
        raise ForeignFrame(f"a frame of {count} blocks, more than expected: another stride")
    keyring.check(key_id, bytes(view[end : end + TAG_BYTES]), _PURPOSE, view[:end])
    if (bytes(view[159:160]) + bytes(view[end + TAG_BYTES : header_bytes])).strip(b"\0"):
        raise CorruptError("frame header padding is not zero")
    if coding > codec.FLOAT16 or sealed > 1:
        raise ForeignFrame(f"a payload of codec {coding}, sealed {sealed}: written by a later release")
    if coding and not codec.installed():
        raise ForeignFrame("a compressed payload: needs the package zstandard (pip install 'kvtier[codec]')")
    rows = list(_ENTRY.iter_unpack(view[_FIXED.size : end]))
    hashes, digests, tags, lengths = zip(*rows, strict=True)
    joined = b"".join(tags)
    sizes = set(lengths)
    coded = sizes - {block_bytes}
    if coded and not (coding and block_bytes // 2 < min(coded) and max(coded) <= codec.stored_max(block_bytes)):
        raise CorruptError("a frame with stored lengths that its blocks cannot have")
    return Frame(
        namespace, Scope(scope), depth, block_bytes, hashes, digests, Lifetime.decode(life), position, key_id, salt,
        joined if joined.strip(b"\0") else b"", coding, sealed, commitment, lengths if coded else (),
    )  # fmt: skip
