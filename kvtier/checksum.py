"""The checksum of payloads, XXH3-128.

It detects damage, not forgery: whoever can write to the store can write a matching digest too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

DIGEST_BYTES = 16


class Digest:
    """XXH3-128 of bytes that come one after another."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: Buffer) -> None:
        """Add bytes."""
        self._state.update(piece)

    def value(self) -> bytes:
        """The digest of all bytes so far, as `digest_of` gives it."""
        return self._state.digest()


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """XXH3-128 (big-endian, as xxhash prints it) of the concatenation of `pieces`. Pure; 16 bytes."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def matches(digest: bytes, pieces: Iterable[Buffer]) -> bool:
    """Whether `pieces` still have `digest`. Every byte that is read from outside RAM is checked here."""
    return digest_of(pieces) == digest
