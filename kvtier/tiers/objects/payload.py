"""Tags of payload: who has no key cannot make bytes that a reader with one takes.

Each block of a frame has a GMAC: AES-256-GCM over nothing, its stored bytes as associated data. The key is derived from
the frame's key and its salt, which is new for each payload, and the nonce is the block's index in the frame, so that no
nonce comes twice under one key. Without a trusted keyring there are no tags, and the digests stand alone.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier import checksum, codec
from kvtier.encryption import DataKey, UnitCipher
from kvtier.errors import ConfigError, CorruptError
from kvtier.identity.keys import SCOPE_BYTES, scope_of_key
from kvtier.keyring import Keyring, UnknownKey
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.objects.compression import decode
from kvtier.tiers.objects.encryption import UnitEncryption, encrypt_unit
from kvtier.tiers.objects.frame import SALT_BYTES, Frame
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.protocol import Loaded, Miss, Pieces, Sealed, Target

_PURPOSE = "payload"


def require_library() -> None:
    """Raises ConfigError where the extra `crypto` is missing."""
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("security: keys need the cryptography package: pip install 'kvtier[crypto]'")


def make_unit(
    namespace: bytes, blocks: Sequence[Sealed], life: Lifetime, keyring: Keyring, key: DataKey | None = None,
    stored: Sequence[Pieces] = (),
) -> tuple[Frame, bytearray]:  # fmt: skip
    """A frame of these blocks, one behind the other in a chain, and its bytes, in memory of their own: a request that
    outlives its caller must not read the caller's. Encrypted, if there is a `key`. `stored`: what is stored of each
    block, if not its own pieces (kvtier.tiers.objects.compression)."""
    stored = stored or [block.pieces for block in blocks]
    lengths = tuple(sum(map(len, pieces)) for pieces in stored)
    frame = Frame(
        namespace, scope_of_key(blocks[0].key), blocks[0].index, sum(map(len, blocks[0].pieces)),
        tuple(block.key[SCOPE_BYTES:] for block in blocks), tuple(block.digest for block in blocks), life,
        min(block.position for block in blocks), keyring.active.id,
        os.urandom(SALT_BYTES) if keyring.trusted else bytes(SALT_BYTES),
    )  # fmt: skip
    if set(lengths) != {frame.block_bytes}:
        frame = replace(frame, codec=codec.FLOAT16, lengths=lengths)
    data = bytearray(frame.header_bytes)  # grows block by block: one call that clears it all would stall other threads
    if key is not None:
        frame = encrypt_unit(frame, stored, key, data)
    else:
        for pieces in stored:
            for piece in pieces:
                data += piece
        with memoryview(data)[frame.header_bytes :] as payload:
            frame = replace(frame, tags=tag_blocks(frame, keyring, payload))
    data[: frame.header_bytes] = frame.encode(keyring)
    return frame, data


def tag_blocks(frame: Frame, keyring: Keyring, payload: memoryview) -> bytes:
    """`Frame.tags` of the blocks that lie in `payload` one after another; b"" for a keyring that is not trusted."""
    if not keyring.trusted:
        return b""
    gcm = _gcm(frame, keyring)
    start, out = frame.span(0, 0)[0], bytearray()
    for index in range(len(frame.hashes)):
        low, high = frame.span(index, index + 1)
        out += gcm.encrypt(_nonce(index), b"", payload[low - start : high - start])
    return bytes(out)


def is_right(frame: Frame, keyring: Keyring, index: int, stored: Pieces) -> bool:
    """Whether these are the bytes of block `index` as its writer stored them: by its tag where the keyring is trusted,
    else by the digest of the block."""
    if keyring.trusted:
        return _has_tag(frame, keyring, index, stored)
    block = stored
    if frame.lengths:
        block = (memoryview(bytearray(frame.block_bytes)),)
        try:
            decode(frame, stored, block)
        except CorruptError:
            return False
    return checksum.matches(frame.digests[index], block)


def verify_blocks(
    entry: ObjectEntry, targets: Sequence[Target], stored: Mapping[int, Pieces], keyring: Keyring,
    encryption: UnitEncryption, cipher: UnitCipher | None,
) -> Iterator[tuple[int, Loaded | Miss]]:  # fmt: skip
    """Check the bytes that were read for each target against the header, decrypt them if there is a `cipher`, and
    decode them into the target. Yields its depth, and Loaded or CORRUPT. `stored`, by depth: where they lie."""
    for target in targets:
        try:
            index = target.index - entry.frame.depth
            digest = _open(entry.frame, index, stored[target.index], target.into, keyring, encryption, cipher)
            yield target.index, Loaded(digest, entry.life)
        except CorruptError:
            yield target.index, Miss.CORRUPT


def _open(
    frame: Frame, index: int, stored: Pieces, into: Pieces, keyring: Keyring, encryption: UnitEncryption,
    cipher: UnitCipher | None,
) -> bytes:  # fmt: skip
    """Fill `into`, if the stored bytes do not lie there, and return the block's digest. Raises CorruptError."""
    digest = encryption.decrypt(frame, cipher, index, stored) if cipher is not None else frame.digests[index]
    if cipher is None and keyring.trusted and not _has_tag(frame, keyring, index, stored):
        raise CorruptError("a block does not match its tag")
    if stored is not into:
        decode(frame, stored, into)
    elif cipher is not None or keyring.trusted:
        return digest
    if cipher is not None:
        return checksum.digest_of(into)
    if not checksum.matches(digest, into):
        raise CorruptError("a block does not match its digest")
    return digest


def _has_tag(frame: Frame, keyring: Keyring, index: int, stored: Pieces) -> bool:
    from cryptography.exceptions import InvalidTag

    tag = frame.tag(index)
    try:
        if len(stored) == 1:
            _gcm(frame, keyring).decrypt(_nonce(index), tag, stored[0])
        else:
            _check_pieces(frame, keyring, index, stored)
    except (InvalidTag, ValueError, UnknownKey):
        return False
    return True


def _check_pieces(frame: Frame, keyring: Keyring, index: int, pieces: Sequence[memoryview]) -> None:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = keyring.accepted(frame.key_id).derive_once(_PURPOSE, frame.salt)
    context = Cipher(algorithms.AES(key), modes.GCM(_nonce(index), frame.tag(index))).decryptor()
    for piece in pieces:
        context.authenticate_additional_data(piece)
    context.finalize()


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "little")


def _gcm(frame: Frame, keyring: Keyring) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(keyring.accepted(frame.key_id).derive_once(_PURPOSE, frame.salt))
