"""Encryption of units: one salt and key for a frame, a tag for each block, which is decrypted alone.

The header, authenticated by the keyring, has salt, commitment and tags, and zeros for digests. A header that is written
anew with another life keeps all of them, and the ciphertext.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier import checksum
from kvtier.checksum import DIGEST_BYTES
from kvtier.encryption import DataKey, EncryptionHeader, UnitCipher, bound_to, check_library, wipe
from kvtier.errors import CorruptError
from kvtier.identity.keys import Scope
from kvtier.keyring import TAG_BYTES
from kvtier.tiers.data_keys import DataKeys, load, obtain
from kvtier.tiers.objects.frame import Frame
from kvtier.tiers.protocol import Miss, Pieces

ENCRYPTED = 1
"""`Frame.sealed` of an encrypted payload."""
_PURPOSE = b"kvtier-g4-block-1"


class UnitEncryption:
    """How one tier encrypts units; without `keys` it writes them plain, and encrypted ones are misses."""

    def __init__(self, keys: DataKeys | None) -> None:
        """Raises ConfigError if the library is missing."""
        if keys is not None:
            check_library()
        self._keys = keys

    async def key_for(self, scope: Scope) -> DataKey | None:
        """What units of this scope are encrypted with; None: nothing. Raises KeyUnavailable."""
        return None if self._keys is None else (await obtain(self._keys, [scope]))[scope]

    def miss_of(self, frame: Frame) -> Miss | None:
        """Why a unit cannot be decrypted, as far as that is known without asking a store. Pure."""
        if not frame.sealed:
            return None
        known = Miss.NO_KEY if self._keys is None else self._keys.peek(frame.scope)
        return known if known is Miss.NO_KEY else None

    async def cipher_of(self, frame: Frame) -> UnitCipher | Miss | None:
        """What decrypts a unit's blocks, else why none can; None if they are plain."""
        if not frame.sealed:
            return None
        known: DataKey | Miss = Miss.NO_KEY
        if self._keys is not None:
            known = (await load(self._keys, [frame.scope]))[frame.scope]
        return known if isinstance(known, Miss) else _cipher(known, frame) or Miss.WRONG_KEY

    def gives_way(self, frame: Frame, key: DataKey | None) -> bool | None:
        """Whether a unit that is there gives way to one that `key` encrypts; None if it is encrypted alike.

        Plain units do, and what an earlier key of the tenant encrypted, which is destroyed: a tenant has one key at a
        time. Other keys may be another replica's. Pure.
        """
        if not frame.sealed:
            return None if key is None else True
        if key is None:
            return False
        return None if _cipher(key, frame) is not None else frame.life.born < key.created

    def decrypt(self, frame: Frame, cipher: UnitCipher, index: int, pieces: Sequence[memoryview]) -> bytes:
        """Decrypt block `index` where it lies, in `pieces`. Returns the digest of its plain bytes. Raises CorruptError,
        the pieces being zero then."""
        digest = checksum.Digest()
        cipher.decrypt_in_place(index, pieces, frame.tag(index), _bound(frame, index), digest)
        return digest.value()

    def is_right(self, frame: Frame, cipher: UnitCipher, index: int, stored: memoryview) -> bool:
        """Whether `stored` is the ciphertext of block `index`."""
        copy = memoryview(bytearray(stored))
        try:
            self.decrypt(frame, cipher, index, [copy])
        except CorruptError:
            return False
        finally:
            wipe(copy)
        return True


def encrypt_unit(frame: Frame, blocks: Sequence[Pieces], key: DataKey, out: bytearray) -> Frame:
    """Encrypt the stored bytes of a frame's blocks to the end of `out`. Returns the frame with what its header is to
    say of that."""
    cipher, tags = key.new_cipher(), bytearray()
    frame = replace(
        frame, sealed=ENCRYPTED, salt=cipher.salt, commitment=cipher.commitment,
        digests=(bytes(DIGEST_BYTES),) * len(blocks),
    )  # fmt: skip
    one = memoryview(bytearray(max(frame.lengths, default=frame.block_bytes) + TAG_BYTES))
    for index, pieces in enumerate(blocks):
        whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        end = len(whole) + TAG_BYTES
        cipher.encrypt_into(index, whole, _bound(frame, index), one[:end])
        out += one[: len(whole)]
        tags += one[len(whole) : end]
    return replace(frame, tags=bytes(tags))


def _cipher(key: DataKey, frame: Frame) -> UnitCipher | None:
    return key.cipher_of(EncryptionHeader(key.id, frame.commitment, frame.salt, ()))


def _bound(frame: Frame, index: int) -> bytes:
    name = frame.namespace + frame.key(index)
    return bound_to(_PURPOSE, name, frame.block_bytes, frame.depth + index, frame.codec)
