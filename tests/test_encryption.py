"""Encryption of blocks, against published vectors and an HKDF of the test's own."""

from __future__ import annotations

import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier import encryption
from kvtier.checksum import Digest, digest_of
from kvtier.encryption import DataKey, EncryptionHeader, bound_to, decrypt_block, encrypt_block
from kvtier.errors import ConfigError, CorruptError

KEY = DataKey(bytes(range(32)), 7.0)
OTHER = DataKey(bytes(range(1, 33)), 7.0)
BOUND = bound_to(b"test", b"name", 12288, 3)

# Test case 16 of "The Galois/Counter Mode of Operation (GCM)", McGrew and Viega, appendix B.
GCM_KEY = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
GCM_NONCE = bytes.fromhex("cafebabefacedbaddecaf888")
GCM_BOUND = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
GCM_PLAIN = bytes.fromhex(
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
)
GCM_SEALED = bytes.fromhex(
    "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
    "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
    "76fc6ece0f4e1768cddf8853bb2d551b"
)


def test_the_librarys_calls_give_the_published_bytes() -> None:
    out, back = bytearray(len(GCM_SEALED)), bytearray(len(GCM_PLAIN))
    AESGCM(GCM_KEY).encrypt_into(GCM_NONCE, GCM_PLAIN, GCM_BOUND, out)
    assert out == GCM_SEALED
    AESGCM(GCM_KEY).decrypt_into(GCM_NONCE, GCM_SEALED, GCM_BOUND, back)
    assert back == GCM_PLAIN


def test_a_units_key_commitment_and_nonce_are_those_of_the_format() -> None:
    """What a program without this package computes: RFC 5869 by hand, then AES-256-GCM with the unit's number."""
    pieces = [memoryview(bytes([number]) * 4096) for number in range(3)]
    out = memoryview(bytearray(3 * 4096 + 16))
    header = encrypt_block(KEY, pieces, BOUND, out)
    extracted = hmac.digest(header.salt, bytes(range(32)), "sha256")
    first = hmac.digest(extracted, b"kvtier-unit-key\1", "sha256")
    second = hmac.digest(extracted, first + b"kvtier-unit-key\2", "sha256")
    assert header.commitment == second[:16]
    assert b"test\4\0" + (12288).to_bytes(8, "little") + (3).to_bytes(4, "little") + b"\0" + b"name" == BOUND
    for unit in range(3):
        ciphertext = bytes(out[unit * 4096 : (unit + 1) * 4096])
        plain = AESGCM(first).decrypt(unit.to_bytes(12, "big"), ciphertext + header.tags[unit], BOUND)
        assert plain == pieces[unit]


@pytest.mark.parametrize("into", [(12288,), (4096, 4096, 4096), (6144, 6144), (1, 12287)])
@pytest.mark.parametrize("pieces", [(12288,), (4096, 4096, 4096), (100, 12188)])
def test_a_block_comes_back_whatever_pieces_it_is_read_into(pieces: tuple[int, ...], into: tuple[int, ...]) -> None:
    plain = bytes(number % 251 for number in range(12288))
    out = memoryview(bytearray(12288 + 16))
    header = encrypt_block(KEY, _cut(memoryview(plain), pieces), BOUND, out)
    assert EncryptionHeader.decode(header.encode()) == header
    back = memoryview(bytearray(12288))
    cipher = KEY.cipher_of(header)
    assert cipher is not None
    back[:] = out[:12288]
    assert decrypt_block(cipher, header, _cut(back, into), BOUND) == digest_of([plain])
    assert back == plain
    assert OTHER.cipher_of(header) is None


@pytest.mark.parametrize("cuts", [(12288,), (1, 4095, 8192), (4099, 8189)])
def test_a_unit_is_decrypted_where_it_lies_or_wiped_there(cuts: tuple[int, ...]) -> None:
    plain, cipher = bytes(number % 251 for number in range(12288)), KEY.new_cipher()
    out = memoryview(bytearray(12288 + 16))
    for tag_differs in (0, 1):
        cipher.encrypt_into(7, memoryview(plain), BOUND, out)
        tag = bytes(out[12288:-1]) + bytes([out[-1] ^ tag_differs])
        if tag_differs:
            with pytest.raises(CorruptError):
                cipher.decrypt_in_place(7, _cut(out[:12288], cuts), tag, BOUND, Digest())
        else:
            cipher.decrypt_in_place(7, _cut(out[:12288], cuts), tag, BOUND, Digest())
        assert out[:12288] == (bytes(12288) if tag_differs else plain)


@pytest.mark.parametrize("wrong", ["byte", "tag", "bound", "swapped", "missing"])
def test_what_does_not_match_is_refused_and_wiped(wrong: str) -> None:
    pieces = [memoryview(bytes([number]) * 4096) for number in range(3)]
    out = memoryview(bytearray(3 * 4096 + 16))
    header, bound = encrypt_block(KEY, pieces, BOUND, out), BOUND
    tags = list(header.tags)
    if wrong == "byte":
        out[5000] ^= 1
    elif wrong == "tag":
        tags[2] = bytes(16)
    elif wrong == "bound":
        bound = bound_to(b"test", b"name", 12288, 4)
    elif wrong == "swapped":
        first = bytes(out[:4096])
        out[:4096], out[4096:8192] = out[4096:8192], first
        tags[:2] = tags[1::-1]
    else:
        tags.pop()
    back = memoryview(bytearray(out[:12288]))
    cipher = KEY.cipher_of(header)
    assert cipher is not None
    with pytest.raises(CorruptError):
        decrypt_block(cipher, header._replace(tags=tuple(tags)), [back], bound)
    assert back == bytes(12288)


@pytest.mark.parametrize("length", [0, 40, 55, 57, 40 + 16 * 1025])
def test_a_seal_of_an_impossible_length_is_damage(length: int) -> None:
    with pytest.raises(CorruptError, match="header"):
        EncryptionHeader.decode(bytes(length))


def test_no_two_encryptions_share_a_salt_and_keys_show_no_secret() -> None:
    assert len({KEY.new_cipher().salt for _ in range(1000)}) == 1000
    assert repr(KEY) == f"DataKey({KEY.id.hex()})" and KEY.secret.hex() not in repr(KEY)
    with pytest.raises(TypeError):
        KEY.__reduce__()
    with pytest.raises(ConfigError, match="32 bytes"):
        DataKey(b"short")


def test_the_library_lets_other_threads_run_and_one_that_does_not_is_noticed() -> None:
    encryption.check_library()
    assert encryption.releases_interpreter(AESGCM(bytes(32)))

    class Selfish:
        def encrypt_into(self, *_arguments: object) -> None:
            sum(range(50_000))

    assert not encryption.releases_interpreter(Selfish())  # type: ignore[arg-type]


def _cut(view: memoryview, lengths: tuple[int, ...]) -> list[memoryview]:
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return [view[start : start + length] for start, length in zip(starts, lengths, strict=True)]
