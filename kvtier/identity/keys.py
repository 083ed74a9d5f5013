"""Names of blocks.

    BlockKey   = scope (16 bytes) ‖ chain hash (32 bytes)          48 bytes, opaque to callers
    full name  = namespace digest (32 bytes) ‖ BlockKey            80 bytes, what leaves the process

A handle serves one namespace, so its digest is implied inside a process and spelled out in every index
entry, frame and object name. Sorted, full names group by namespace, then by scope: purge, quota and
listing are prefix operations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NewType

from kvtier.errors import InvalidRequest
from kvtier.identity.hashing import HASH_BYTES

BlockKey = NewType("BlockKey", bytes)
"""scope ‖ chain hash, 48 bytes."""

Scope = NewType("Scope", bytes)
"""The group of requests that may share a block, 16 bytes: a keyed digest, which does not reveal the tenant's salt."""

SCOPE_BYTES = 16
KEY_BYTES = SCOPE_BYTES + HASH_BYTES
NAMESPACE_BYTES = 32
NAME_BYTES = NAMESPACE_BYTES + KEY_BYTES

KEY_PARTS = 256
"""Dictionaries that share many blocks, by the last byte of the key, a hash's: none of them is large when it grows."""

TENANT_BYTES = 8
"""The first bytes of a scope name the tenant, the others the variant: adapter and isolated class."""

SHARED = Scope(bytes(SCOPE_BYTES))
"""The scope of requests without salt, adapter or isolated class."""


def scope_of(salt: str | bytes | None, adapter: bytes = b"", isolated: str = "", *, secret: bytes = b"") -> Scope:
    """The scope that a tenant's `salt`, an `adapter` fingerprint and an isolated retention class name.

        digest(salt, adapter, isolated)                                       without adapter and isolated class
        the tenant's first 8 bytes ‖ digest(salt, adapter, isolated)[8:16]    with one of them

    The digest is keyed BLAKE2b over the three length-prefixed parts; `secret` (0-64 bytes, from the configuration, the
    same on every replica) keeps a reader of the store from guessing salts. All parts absent gives `SHARED`, whatever
    the secret. All scopes of a tenant begin with the same 8 bytes, those of requests without a salt with zeros. Pure.
    Raises InvalidRequest for a salt that is neither text nor bytes.
    """
    if not adapter and not isolated:
        return SHARED if salt is None else Scope(_scope_digest(salt, b"", "", secret))
    tenant = bytes(TENANT_BYTES) if salt is None else _scope_digest(salt, b"", "", secret)[:TENANT_BYTES]
    return Scope(tenant + _scope_digest(salt, adapter, isolated, secret)[TENANT_BYTES:])


def _scope_digest(salt: str | bytes | None, adapter: bytes, isolated: str, secret: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=SCOPE_BYTES, key=secret, person=b"kvtier-scope-1")
    for part in (_salt_bytes(salt), adapter, isolated.encode()):
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def tenant_of(scope: bytes) -> Scope:
    """The tenant of a scope, or of a key, as a scope without a variant: what a purge names. Pure."""
    return Scope(scope[:TENANT_BYTES] + bytes(SCOPE_BYTES - TENANT_BYTES))


def _salt_bytes(salt: str | bytes | None) -> bytes:
    if salt is None:
        return b""
    if not isinstance(salt, str | bytes | bytearray | memoryview):  # `bytes` of a number is as many zeros
        raise InvalidRequest(f"a salt is text or bytes, got {type(salt).__name__}; write str(…) around an id")
    # The marker keeps "no salt" apart from "an empty salt", which is a tenant's salt.
    # Half of a surrogate pair comes through JSON: it is part of a name like any other.
    return b"\x01" + (salt.encode(errors="surrogatepass") if isinstance(salt, str) else bytes(salt))


def make_keys(scope: Scope, hashes: Sequence[bytes]) -> list[BlockKey]:
    """One key per chain hash. Pure."""
    return [BlockKey(scope + digest) for digest in hashes]


def scope_of_key(key: bytes) -> Scope:
    """The 16 bytes before the hash."""
    return Scope(key[:SCOPE_BYTES])


def check_keys(keys: Sequence[bytes], *, distinct: bool) -> None:
    """Raise InvalidRequest, naming the index, unless every key is 48 bytes, of the scope of the first one (and, if
    asked, no two equal)."""
    right = set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}  # three times faster than one by one
    for index, key in () if right else enumerate(keys):
        if type(key) is not bytes or len(key) != KEY_BYTES:
            got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise InvalidRequest(f"keys[{index}]: expected {KEY_BYTES} bytes from chain_hashes(), got {got}")
    if keys and scope_of_key(min(keys)) != scope_of_key(max(keys)):  # purges go by the scope of a whole chain
        index = next(index for index, key in enumerate(keys) if scope_of_key(key) != scope_of_key(keys[0]))
        raise InvalidRequest(f"keys[{index}] is of another scope than keys[0]; a chain has one")
    if distinct and len(set(keys)) != len(keys):
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        again = next(index for index, key in enumerate(keys) if first[key] != index)
        raise InvalidRequest(f"keys[{again}] repeats keys[{first[keys[again]]}]; a chain names each block once")
