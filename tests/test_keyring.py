"""Keys: derivation, states, tags, names and wrapped data keys."""

from __future__ import annotations

import pickle

import pytest

from kvtier.errors import ConfigError
from kvtier.keyring import PUBLIC_ID, WRAPPED_BYTES, Forged, Key, Keyring, KeyState, UnknownKey, hkdf

A, B = bytes(range(8)), bytes(range(8, 16))
SECRET, OTHER, NAMES = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32


def ring(*states: tuple[bytes, bytes, KeyState]) -> Keyring:
    return Keyring([Key(*state) for state in states or [(A, SECRET, KeyState.ACTIVE)]], NAMES)


@pytest.mark.parametrize(
    ("secret", "salt", "info", "length", "wanted"),
    [  # RFC 5869, appendix A.1 to A.3
        (
            b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)), bytes(range(0x60, 0xB0)), bytes(range(0xB0, 0x100)), 82,
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            b"\x0b" * 22, b"", b"", 42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)  # fmt: skip
def test_derivation_is_hkdf(secret: bytes, salt: bytes, info: bytes, length: int, wanted: str) -> None:
    assert hkdf(secret, salt, info, length).hex() == wanted


def test_every_purpose_and_context_has_a_key_of_its_own() -> None:
    key = Key(A, SECRET)
    pairs = [("tag", b""), ("tag", b"x"), ("tagx", b""), ("name", b""), ("wrap", b"tag")]
    assert len({key.derive(*pair) for pair in pairs}) == len(pairs)
    assert key.derive("tag") == Key(B, SECRET).derive("tag") != Key(A, OTHER).derive("tag")


def test_a_tag_is_believed_from_active_and_accepted_keys_only() -> None:
    old = ring()
    id, tag = old.tag("header", b"bytes")
    old.check(id, tag, "header", b"bytes")
    ring((B, OTHER, KeyState.ACTIVE), (A, SECRET, KeyState.ACCEPT)).check(id, tag, "header", b"bytes")
    with pytest.raises(UnknownKey, match="retired"):
        ring((B, OTHER, KeyState.ACTIVE), (A, SECRET, KeyState.RETIRED)).check(id, tag, "header", b"bytes")
    with pytest.raises(UnknownKey, match="not in the keyring"):
        ring((B, OTHER, KeyState.ACTIVE)).check(id, tag, "header", b"bytes")


def test_a_tag_fits_its_purpose_its_parts_and_its_key_only() -> None:
    keys = ring()
    id, tag = keys.tag("header", b"by", b"tes")
    for purpose, parts in [("pin", (b"by", b"tes")), ("header", (b"bytes",)), ("header", (b"by", b"tex"))]:
        with pytest.raises(Forged):
            keys.check(id, tag, purpose, *parts)
    with pytest.raises(Forged):
        ring((A, OTHER, KeyState.ACTIVE)).check(id, tag, "header", b"by", b"tes")


def test_the_public_keyring_is_not_trusted_and_others_do_not_know_it() -> None:
    public = Keyring.public()
    id, tag = public.tag("header", b"bytes")
    assert id == PUBLIC_ID and not public.trusted and ring().trusted
    Keyring.public().check(id, tag, "header", b"bytes")
    with pytest.raises(UnknownKey):
        ring().check(id, tag, "header", b"bytes")
    with pytest.raises(UnknownKey):
        public.check(*ring().tag("header", b"bytes"), "header", b"bytes")


def test_names_outlive_a_rotation_and_depend_on_the_name_key() -> None:
    rotated = ring((B, OTHER, KeyState.ACTIVE), (A, SECRET, KeyState.ACCEPT))
    assert ring().name("unit", b"hash") == rotated.name("unit", b"hash")
    assert ring().name("unit", b"hash") != ring().name("tenant", b"hash")
    assert Keyring([Key(A, SECRET)], OTHER).name("unit", b"hash") != ring().name("unit", b"hash")
    assert len(ring().name("unit", b"hash", 32)) == 64


@pytest.mark.parametrize(
    "states",
    [
        [],
        [(A, SECRET, KeyState.ACCEPT)],
        [(A, SECRET, KeyState.ACTIVE), (B, OTHER, KeyState.ACTIVE)],
        [(A, SECRET, KeyState.ACTIVE), (A, OTHER, KeyState.ACCEPT)],
    ],
)
def test_exactly_one_key_is_active_and_no_id_is_twice(states: list[tuple[bytes, bytes, KeyState]]) -> None:
    with pytest.raises(ConfigError):
        Keyring([Key(*state) for state in states], NAMES)


def test_a_data_key_is_unwrapped_for_its_context_only() -> None:
    pytest.importorskip("cryptography")
    keys = ring()
    wrapped = keys.wrap(OTHER, b"tenant")
    assert len(wrapped) == WRAPPED_BYTES and OTHER not in wrapped
    assert wrapped != keys.wrap(OTHER, b"tenant")
    rotated = ring((B, OTHER, KeyState.ACTIVE), (A, SECRET, KeyState.ACCEPT))
    assert keys.unwrap(wrapped, b"tenant") == rotated.unwrap(wrapped, b"tenant") == OTHER
    with pytest.raises(Forged):
        keys.unwrap(wrapped, b"another")
    with pytest.raises(UnknownKey):
        ring((B, OTHER, KeyState.ACTIVE)).unwrap(wrapped, b"tenant")
    for place in range(len(wrapped)):
        damaged = bytearray(wrapped)
        damaged[place] ^= 1
        with pytest.raises((Forged, UnknownKey)):
            keys.unwrap(bytes(damaged), b"tenant")
    with pytest.raises(Forged):
        keys.unwrap(wrapped[:-1], b"tenant")


def test_no_secret_is_shown_or_copied() -> None:
    keys = ring()
    assert SECRET.hex() not in repr(keys) and repr(SECRET) not in repr(keys) and A.hex() in repr(keys)
    with pytest.raises(TypeError):
        pickle.dumps(keys.active)


def test_keys_of_another_length_are_refused() -> None:
    for id, secret in ((b"short", bytes(32)), (b"\1" * 8, b"short")):
        with pytest.raises(ConfigError, match="a key has an id of 8 bytes and a secret of 32"):
            Key(id, secret)
    pytest.importorskip("cryptography")
    with pytest.raises(ConfigError, match="a data key has 32 bytes, got 5"):
        Keyring([Key(b"\1" * 8, bytes(range(32)))], bytes(range(32))).wrap(b"short", b"context")
