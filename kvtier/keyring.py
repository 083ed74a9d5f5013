"""The keys that authenticate and encrypt what kvtier stores, and the keys that are derived from them.

A keyring has secrets of 32 bytes, each with an id of 8 bytes that is stored beside whatever it protects, and a state:

    active    new data is written with it; exactly one is
    accept    data written with it is believed
    retired   data written with it is a miss: it is named only so that tools can tell

To rotate: add the new key as `accept` everywhere, make it `active` and the old one `accept`, retire the old one when
its data has expired. Beside them is the *name key*, from which the names of objects are made; it is never rotated,
since another one would hide everything that is stored.

No secret is used itself. Each purpose has a key of its own, by HKDF-SHA256 (RFC 5869):

    HKDF(secret, salt = "kvtier-keyring-1", info = purpose ‖ 0 ‖ context)

Without a keyring there is `Keyring.public`: the same formats with secrets that everybody knows. Its tags find damage,
not forgery; `trusted` is False.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError, CorruptError, KVTierError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_ID_BYTES = 8
SECRET_BYTES = 32
TAG_BYTES = 16
DATA_KEY_BYTES = 32
COMMITMENT_BYTES = 16
KEYS_MAX = 64

PUBLIC_ID = bytes(KEY_ID_BYTES)
"""The id of the key that everybody knows."""

_SALT = b"kvtier-keyring-1"
_PUBLIC = sha256(b"kvtier: no secret").digest()
_NONCE_BYTES = 12
WRAPPED_BYTES = KEY_ID_BYTES + _NONCE_BYTES + COMMITMENT_BYTES + DATA_KEY_BYTES + 16


class UnknownKey(KVTierError):
    """The key with this id is not in the keyring, or is retired. What it protects is left alone."""


class Forged(CorruptError):
    """A tag does not fit: damage or forgery. What it protects is left alone."""


class KeyState(StrEnum):
    """What a key is used for."""

    ACTIVE = "active"
    ACCEPT = "accept"
    RETIRED = "retired"


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """HKDF-SHA256, RFC 5869: at most 8160 bytes. Pure."""
    extracted = hmac.digest(salt or bytes(32), secret, "sha256")
    out, block = b"", b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([counter]), "sha256")
        out += block
    return out[:length]


class Key:
    """One key. Its repr shows the id and the state only."""

    __slots__ = ("__derived", "__secret", "id", "state")

    def __init__(self, id: bytes, secret: bytes, state: KeyState = KeyState.ACTIVE) -> None:
        """Raises ConfigError for an id or a secret of the wrong length."""
        if len(id) != KEY_ID_BYTES or len(secret) != SECRET_BYTES:
            raise ConfigError(f"a key has an id of {KEY_ID_BYTES} bytes and a secret of {SECRET_BYTES}")
        self.id = id
        self.state = state
        self.__secret = secret
        self.__derived = lru_cache(maxsize=4096)(self._derive)

    def __repr__(self) -> str:
        return f"Key({self.id.hex()}, {self.state})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not copied out of its process")

    def derive(self, purpose: str, context: bytes = b"", length: int = 32) -> bytes:
        """The key for one purpose and context; another pair gives an independent one. Pure."""
        derived: bytes = self.__derived(purpose, context, length)
        return derived

    def derive_once(self, purpose: str, context: bytes) -> bytes:
        """`derive` for a context that hardly comes again, such as a salt: it is not remembered. Pure."""
        return self._derive(purpose, context, 32)

    def _derive(self, purpose: str, context: bytes, length: int) -> bytes:
        return hkdf(self.__secret, _SALT, purpose.encode("ascii") + b"\0" + context, length)


class Keyring:
    """Keys by id, one of them active, and the name key. Immutable and thread-safe."""

    def __init__(self, keys: Iterable[Key], name_secret: bytes) -> None:
        """`name_secret`: 32 bytes from which object names are keyed, the same for ever. Raises ConfigError."""
        self._keys: dict[bytes, Key] = {}
        for key in keys:
            if key.id in self._keys:
                raise ConfigError(f"keys: the id {key.id.hex()} is given twice")
            self._keys[key.id] = key
        active = [key for key in self._keys.values() if key.state is KeyState.ACTIVE]
        if len(active) != 1 or len(self._keys) > KEYS_MAX:
            raise ConfigError(
                f"keys: {len(active)} of {len(self._keys)} are active; exactly one of 1 … {KEYS_MAX} must be"
            )
        self.active = active[0]
        self._names = Key(PUBLIC_ID, name_secret)

    @classmethod
    def public(cls) -> Keyring:
        """The keyring of those who have none: local trust. Everybody knows its secrets."""
        return cls([Key(PUBLIC_ID, _PUBLIC)], _PUBLIC)

    def __repr__(self) -> str:
        return f"Keyring({', '.join(map(repr, self._keys.values()))})"

    @property
    def keys(self) -> tuple[Key, ...]:
        """All of them, as they were given."""
        return tuple(self._keys.values())

    @property
    def trusted(self) -> bool:
        """Whether its tags prove anything: its secrets are secret."""
        return self.active.id != PUBLIC_ID

    def accepted(self, id: bytes) -> Key:
        """The key of that id, active or accepted. Raises UnknownKey."""
        key = self._keys.get(id)
        if key is None or key.state is KeyState.RETIRED:
            raise UnknownKey(f"key {id.hex()} is {'retired' if key else 'not in the keyring'}")
        return key

    # -- names ----------------------------------------------------------------------------------------------------

    def name(self, kind: str, content: bytes, size: int = 16) -> str:
        """The name of a thing of this kind in a place that others may list: keyed BLAKE2b, `size` bytes as
        hexadecimal digits. Nobody without the name key can test a guess of `content`. Pure."""
        return blake2b(content, digest_size=size, key=self._names.derive("name", kind.encode("ascii"))).hexdigest()

    # -- tags -----------------------------------------------------------------------------------------------------

    def tag(self, purpose: str, *parts: bytes | bytearray | memoryview) -> tuple[bytes, bytes]:
        """(id of the active key, tag of `parts`): keyed BLAKE2b over each part's length and bytes. Pure."""
        return self.active.id, _tag(self.active, purpose, parts)

    def tag_by(self, id: bytes, purpose: str, *parts: bytes | bytearray | memoryview) -> bytes:
        """The tag of `parts` by the key `id`, active or accepted. Raises UnknownKey."""
        return _tag(self.accepted(id), purpose, parts)

    def check(self, id: bytes, tag: bytes, purpose: str, *parts: bytes | bytearray | memoryview) -> None:
        """Raises UnknownKey, or Forged unless `tag` was made over `parts` for this purpose by the key `id`."""
        if not hmac.compare_digest(_tag(self.accepted(id), purpose, parts), tag):
            raise Forged(f"a {purpose} whose tag does not fit")

    # -- data keys ------------------------------------------------------------------------------------------------

    def wrap(self, data_key: bytes, context: bytes) -> bytes:
        """`data_key` (32 bytes) encrypted by the active key, for this context (a tenant): WRAPPED_BYTES. Needs the
        extra `crypto`.

            key id (8) ‖ nonce (12) ‖ commitment (16) ‖ AES-256-GCM(data key) (48)

        The commitment is derived from the wrapping key and the nonce: AES-GCM alone lets one ciphertext decrypt under
        two keys."""
        if len(data_key) != DATA_KEY_BYTES:
            raise ConfigError(f"a data key has {DATA_KEY_BYTES} bytes, got {len(data_key)}")
        nonce = os.urandom(_NONCE_BYTES)
        head = self.active.id + nonce
        sealed = _gcm(self.active, context).encrypt(nonce, data_key, head)
        return head + _commitment(self.active, context, nonce) + bytes(sealed)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """The inverse, for the same context. Raises UnknownKey or Forged."""
        from cryptography.exceptions import InvalidTag

        if len(wrapped) != WRAPPED_BYTES:
            raise Forged(f"a wrapped key has {WRAPPED_BYTES} bytes, got {len(wrapped)}")
        key = self.accepted(wrapped[:KEY_ID_BYTES])
        head = wrapped[: KEY_ID_BYTES + _NONCE_BYTES]
        nonce, rest = head[KEY_ID_BYTES:], wrapped[len(head) :]
        if not hmac.compare_digest(_commitment(key, context, nonce), rest[:COMMITMENT_BYTES]):
            raise Forged("a wrapped key of another key or context")
        try:
            return bytes(_gcm(key, context).decrypt(nonce, rest[COMMITMENT_BYTES:], head))
        except InvalidTag:
            raise Forged("a wrapped key whose tag does not fit") from None


def _tag(key: Key, purpose: str, parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    state = blake2b(digest_size=TAG_BYTES, key=key.derive("tag", purpose.encode("ascii")))
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _commitment(key: Key, context: bytes, nonce: bytes) -> bytes:
    return blake2b(nonce, digest_size=COMMITMENT_BYTES, key=key.derive("commit", context)).digest()


def _gcm(key: Key, context: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key.derive("wrap", context))
