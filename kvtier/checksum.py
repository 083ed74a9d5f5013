"""The checksum of payloads: XXH3-128, one function to compute it and one to compare.

It finds damage, not forgery: who can write the store can also write a matching digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

DIGEST_BYTES = 16


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """XXH3-128 (big-endian, as xxhash prints it) of the concatenation of `pieces`. Pure; 16 bytes."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def matches(digest: bytes, pieces: Iterable[Buffer]) -> bool:
    """Whether `pieces` still have `digest`. Every byte that comes back from outside RAM passes through here."""
    return digest_of(pieces) == digest
