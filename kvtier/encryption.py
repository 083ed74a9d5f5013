"""Encryption of a block: AES-256-GCM per unit, under a key of its own for every encryption.

    salt         16 random bytes, new whenever a block is encrypted
    unit key     HKDF-SHA256 (RFC 5869) of the tenant's data key with that salt, and a 16-byte commitment beside it
    unit         one rank's bytes of the block; its number is the nonce, so a unit is verified alone

The commitment says whether a key is the right one before anything is decrypted: AES-GCM alone accepts forgeries that
two keys can open. Associated data binds a unit to the block's name and sizes, never to times, which change. One call
encrypts one unit, into other memory, without the interpreter lock. Decryption works where the ciphertext lies.
"""

from __future__ import annotations

import functools
import hmac
import logging
import secrets
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier import checksum
from kvtier.errors import ConfigError, CorruptError
from kvtier.keyring import COMMITMENT_BYTES, DATA_KEY_BYTES, KEY_ID_BYTES, TAG_BYTES, hkdf

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger(__name__)

SALT_BYTES = 16
UNIT_BYTES_MAX = (1 << 31) - 1 - TAG_BYTES
"""The most that one call of the library takes."""
UNITS_MAX = 1024
STEP_BYTES = 256 << 10
"""Of a block that is decrypted: a part of it that a processor's own cache holds."""

_HEADER = struct.Struct(f"<{KEY_ID_BYTES}s{COMMITMENT_BYTES}s{SALT_BYTES}s")
_CHECK_BYTES, _CHECKS = 4 << 20, 20


class EncryptionHeader(NamedTuple):
    """What is stored beside an encrypted block: which key, that key's commitment, the salt, and a tag per unit."""

    key_id: bytes
    commitment: bytes
    salt: bytes
    tags: tuple[bytes, ...]

    def encode(self) -> bytes:
        """40 bytes, and 16 per unit."""
        return _HEADER.pack(self.key_id, self.commitment, self.salt) + b"".join(self.tags)

    @classmethod
    def decode(cls, raw: bytes) -> EncryptionHeader:
        """The inverse of `encode`. Raises CorruptError for a length that it cannot have."""
        count, rest = divmod(len(raw) - _HEADER.size, TAG_BYTES)
        if rest or not 1 <= count <= UNITS_MAX:
            raise CorruptError(f"an encryption header cannot have {len(raw)} bytes")
        tags = tuple(raw[start : start + TAG_BYTES] for start in range(_HEADER.size, len(raw), TAG_BYTES))
        key_id, commitment, salt = _HEADER.unpack_from(raw)
        return cls(key_id, commitment, salt, tags)


class DataKey:
    """A tenant's key: 32 random bytes, when it was made, and an id of 8 bytes that says nothing about it. Only that id
    is in its repr."""

    __slots__ = ("created", "id", "secret")

    def __init__(self, secret: bytes, created: float = 0.0) -> None:
        """Raises ConfigError for a secret of another length."""
        if len(secret) != DATA_KEY_BYTES:
            raise ConfigError(f"a data key has {DATA_KEY_BYTES} bytes, got {len(secret)}")
        self.secret = secret
        self.created = created
        self.id = hkdf(secret, b"", b"kvtier-data-key-id", KEY_ID_BYTES)

    def __repr__(self) -> str:
        return f"DataKey({self.id.hex()})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not copied out of its process")

    def new_cipher(self) -> UnitCipher:
        """A cipher with a fresh salt, for one encryption of one block."""
        return UnitCipher(self, secrets.token_bytes(SALT_BYTES))

    def cipher_of(self, header: EncryptionHeader) -> UnitCipher | None:
        """The cipher that a block was encrypted with; None if that was another key's."""
        cipher = UnitCipher(self, header.salt)
        return cipher if hmac.compare_digest(cipher.commitment, header.commitment) else None


class UnitCipher:
    """Encrypts or decrypts the units of one block, under one salt. Thread-safe.

    An instance made for encryption must not encrypt a unit twice with different bytes.
    """

    __slots__ = ("_aes", "_secret", "commitment", "key_id", "salt")

    def __init__(self, key: DataKey, salt: bytes) -> None:
        derived = hkdf(key.secret, salt, b"kvtier-unit-key", DATA_KEY_BYTES + COMMITMENT_BYTES)
        self.key_id = key.id
        self.salt = salt
        self.commitment = derived[DATA_KEY_BYTES:]
        self._secret = derived[:DATA_KEY_BYTES]
        self._aes = _aesgcm()(self._secret)

    def encrypt_into(self, unit: int, plain: memoryview, bound: bytes, out: memoryview) -> None:
        """Fill `out` (16 bytes longer than `plain`, elsewhere) with the unit's ciphertext and its tag. `bound` is
        authenticated with it."""
        self._aes.encrypt_into(_nonce(unit), plain, bound, out)

    def decrypt_in_place(
        self, unit: int, pieces: Sequence[memoryview], tag: bytes, bound: bytes, digest: checksum.Digest
    ) -> None:
        """Replace a unit's ciphertext, which lies in these pieces one after another, by its plain bytes, and add them
        to `digest` while they are in the processor's cache. Raises CorruptError, the pieces being zero then. Holds the
        interpreter for STEP_BYTES at a time."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        context = Cipher(AES(self._secret), GCM(_nonce(unit), tag)).decryptor()
        context.authenticate_additional_data(bound)
        for piece in pieces:
            for start in range(0, len(piece), STEP_BYTES):
                part = piece[start : start + STEP_BYTES]
                context.update_into(part, part)
                digest.update(part)
        try:
            context.finalize()
        except InvalidTag:
            for piece in pieces:
                wipe(piece)
            raise CorruptError(f"unit {unit} does not match its tag") from None

    def header(self, tags: Sequence[bytes]) -> EncryptionHeader:
        """What is to be stored beside the ciphertext."""
        return EncryptionHeader(self.key_id, self.commitment, self.salt, tuple(tags))


def encrypt_block(key: DataKey, pieces: Sequence[memoryview], bound: bytes, out: memoryview) -> EncryptionHeader:
    """Encrypt a block under a fresh salt, a unit per piece, into `out`: its ciphertext, as long as the pieces, and 16
    bytes that are free again. `bound`: as `bound_to` makes it. The pieces must not change meanwhile."""
    if len({len(piece) for piece in pieces}) > 1:  # a reader takes units to be of one size
        pieces = [memoryview(b"".join(pieces))]
    cipher, tags, start = key.new_cipher(), [], 0
    for unit, piece in enumerate(pieces):
        end = start + len(piece)
        cipher.encrypt_into(unit, piece, bound, out[start : end + TAG_BYTES])
        tags.append(bytes(out[end : end + TAG_BYTES]))  # the next unit begins where the tag lies
        start = end
    return cipher.header(tags)


def decrypt_block(cipher: UnitCipher, header: EncryptionHeader, pieces: Sequence[memoryview], bound: bytes) -> bytes:
    """Replace a block's ciphertext, which lies in these pieces one after another, by its plain bytes. Returns their
    digest. Raises CorruptError, the pieces being zero then."""
    length, count = sum(map(len, pieces)), len(header.tags)
    size = length // count
    digest = checksum.Digest()
    try:
        if size * count != length:
            raise CorruptError(f"a block of {length} bytes in {count} units")
        for unit, tag in enumerate(header.tags):
            cipher.decrypt_in_place(unit, _part(pieces, unit * size, (unit + 1) * size), tag, bound, digest)
    except CorruptError:
        for piece in pieces:
            wipe(piece)
        raise
    return digest.value()


def _part(pieces: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The bytes [start, stop) of the pieces' concatenation, where they lie."""
    out = []
    for piece in pieces:
        part = piece[max(0, start) : max(0, stop)]
        if len(part):
            out.append(part)
        start, stop = start - len(piece), stop - len(piece)
    return out


def bound_to(purpose: bytes, name: bytes, length: int, depth: int, codec: int = 0) -> bytes:
    """The associated data of a block's units: what never changes while its ciphertext is kept. Pure."""
    return purpose + struct.pack("<HQIB", len(name), length, depth, codec) + name


def wipe(memory: memoryview) -> None:
    """Overwrite with zeros."""
    flat = memory.cast("B")
    zeros = bytes(min(len(flat), 1 << 16))
    for start in range(0, len(flat), len(zeros) or 1):
        part = flat[start : start + len(zeros)]
        part[:] = zeros[: len(part)]


@functools.cache
def check_library() -> None:
    """Raise ConfigError unless `cryptography` can do what encryption needs; log a warning if it keeps the interpreter
    lock meanwhile, which stalls every other thread. Milliseconds, once per process."""
    aes = _aesgcm()(bytes(range(32)))
    plain, out = memoryview(bytearray(b"k" * 64)), memoryview(bytearray(64 + TAG_BYTES))
    aes.encrypt_into(_nonce(1), plain, b"check", out)
    if bytes(out) != aes.encrypt(_nonce(1), bytes(plain), b"check") or not _decrypts_in_place():
        raise ConfigError("the package cryptography encrypts wrongly; install it anew, in version 50 or later")
    if not releases_interpreter(aes):
        log.warning("cryptography keeps the interpreter lock while it encrypts: other threads wait for it")


def _decrypts_in_place() -> bool:
    """The library does not say that a buffer may be input and output; here it is seen, with pieces of odd lengths."""
    cipher, length = DataKey(bytes(range(32))).new_cipher(), 3 * STEP_BYTES
    plain = memoryview(bytes(range(251)) * (length // 251 + 1))[:length]
    out, digest = memoryview(bytearray(length + TAG_BYTES)), checksum.Digest()
    cipher.encrypt_into(2, plain, b"check", out)
    cipher.decrypt_in_place(2, [out[:4099], out[4099:length]], bytes(out[length:]), b"check", digest)
    return out[:length] == plain and digest.value() == checksum.digest_of([plain])


def releases_interpreter(aes: AESGCM) -> bool:
    """Whether another thread runs inside a call that encrypts. Takes 20 ms; meanwhile threads switch only where one
    gives up the interpreter itself, since otherwise this could be seen between two calls, too."""
    plain, out = bytearray(_CHECK_BYTES), bytearray(_CHECK_BYTES + TAG_BYTES)
    inside, done = False, False

    def encrypt() -> None:
        nonlocal inside, done
        for _ in range(_CHECKS):
            inside = True
            aes.encrypt_into(_nonce(0), plain, b"", out)
            inside = False
            time.sleep(0.0001)
        done = True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        thread = threading.Thread(target=encrypt, name="kvtier-check", daemon=True)
        thread.start()
        seen = False
        while not done:
            time.sleep(0.0001)
            seen = seen or inside
        thread.join()
        return seen
    finally:
        sys.setswitchinterval(interval)


def _nonce(unit: int) -> bytes:
    return unit.to_bytes(12, "big")


@functools.cache
def _aesgcm() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigError("encryption needs the package cryptography: pip install 'kvtier[crypto]'") from None
    if not hasattr(AESGCM, "encrypt_into"):
        raise ConfigError("encryption needs cryptography 50 or later: pip install -U 'kvtier[crypto]'")
    return AESGCM
