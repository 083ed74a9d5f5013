"""Encryption of G3's blocks, on the threads that move them.

What is written is encrypted into memory of each thread's own, since others read the slots of G2; what is read is
decrypted in its target. No plain byte reaches a slab file, and no digest of plain bytes the index.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence

from kvtier.encryption import DataKey, EncryptionHeader, bound_to, check_library, decrypt_block, encrypt_block
from kvtier.identity.keys import NAMESPACE_BYTES, Scope, scope_of_key
from kvtier.keyring import TAG_BYTES
from kvtier.tiers.data_keys import DataKeys
from kvtier.tiers.disk.records import Entry, is_encrypted, key_id_in
from kvtier.tiers.protocol import Miss

_PURPOSE = b"kvtier-g3-block-1"


class Encryption:
    """How one tier encrypts. Thread-safe."""

    def __init__(self, keys: DataKeys) -> None:
        """Raises ConfigError if the library is missing."""
        check_library()
        self.keys = keys
        self._local = threading.local()

    def memory(self, length: int) -> memoryview:
        """`length` bytes from a page boundary on, and TAG_BYTES behind them: this thread's own until its next call."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < length + TAG_BYTES:
            buffer = self._local.buffer = mmap.mmap(-1, length + TAG_BYTES)
        return memoryview(buffer)[: length + TAG_BYTES]


def scope_in_name(name: bytes) -> Scope:
    """The scope in a block's full name. Pure."""
    return scope_of_key(name[NAMESPACE_BYTES:])


def encrypt(key: DataKey, name: bytes, depth: int, pieces: Sequence[memoryview], out: memoryview) -> EncryptionHeader:
    """Encrypt a block into `out`, which has TAG_BYTES more than the block. Returns its header."""
    return encrypt_block(key, pieces, _bound(name, len(out) - TAG_BYTES, depth), out)


def decrypt(key: DataKey, name: bytes, entry: Entry, pieces: Sequence[memoryview]) -> bytes | Miss:
    """Decrypt a block where it lies, in `pieces`. Returns the digest of its plain bytes, or WRONG_KEY. Raises
    CorruptError, the pieces being zero then."""
    assert entry.encryption is not None
    cipher = key.cipher_of(entry.encryption)
    if cipher is None:
        return Miss.WRONG_KEY
    return decrypt_block(cipher, entry.encryption, pieces, _bound(name, entry.length, entry.depth))


def key_miss_of(name: bytes, raw: bytes, keys: Mapping[Scope, DataKey | Miss]) -> Miss | None:
    """Why a block with the entry `raw` cannot be decrypted with these keys; None if it can, or is plain. Pure."""
    if not is_encrypted(raw):
        return None
    key = keys.get(scope_in_name(name), Miss.NO_KEY)
    if isinstance(key, Miss):
        return key
    return None if key.id == key_id_in(raw) else Miss.WRONG_KEY


def _bound(name: bytes, length: int, depth: int) -> bytes:
    return bound_to(_PURPOSE, name, length, depth)
