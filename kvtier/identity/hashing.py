"""Identity of token blocks: a chain of SHA-256 digests.

    root      = SHA-256("kvtier-chain-1" ‖ namespace digest ‖ scope)
    hash(i)   = SHA-256(hash(i-1) ‖ tokens of block i as little-endian u32 ‖ extras)
    extras    = for each extra: length as little-endian u32 ‖ bytes        (nothing if there are none)

Two processes on two machines compute the same 32 bytes for the same (namespace, scope, tokens), and a
block's hash commits to every token before it. `kvtier bench index` measures the cost per block.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

HASH_BYTES = 32
_U32_MAX = 0xFFFF_FFFF


def chain_root(namespace: bytes, scope: bytes) -> bytes:
    """The parent of every first block in (namespace digest, scope). Pure; returns 32 bytes."""
    return hashlib.sha256(b"kvtier-chain-1" + namespace + scope).digest()


def flatten(tokens: Any) -> bytes:
    """Token ids as one little-endian u32 buffer.

    Takes a sequence of ints, `array('I')`, or anything with the buffer protocol or `__array__`
    (NumPy, a CPU torch tensor). Raises InvalidRequest for ids below 0 or above 2**32 - 1, for
    non-integers and for more than one dimension.
    """
    if isinstance(tokens, (bytes, bytearray, str)):
        raise InvalidRequest(f"tokens must be integers, not {type(tokens).__name__}")
    if isinstance(tokens, array) and tokens.typecode == "I":
        flat = tokens
    elif hasattr(tokens, "__array__") or hasattr(tokens, "__array_interface__"):
        return _flatten_array(tokens)
    else:
        try:
            flat = array("I", tokens)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"tokens must be integers in 0 … {_U32_MAX}: {error}") from None
    if sys.byteorder == "big":
        flat = array("I", flat)
        flat.byteswap()
    return flat.tobytes()


def _flatten_array(tokens: Any) -> bytes:
    import numpy as np

    values = np.asarray(tokens)
    if values.ndim != 1:
        raise InvalidRequest(f"tokens must have one dimension, got shape {values.shape}")
    if values.size == 0:
        return b""
    if values.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be integers, got dtype {values.dtype}")
    if values.dtype.itemsize > 4 or values.dtype.kind == "i":
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > _U32_MAX:
            raise InvalidRequest(f"tokens must lie in 0 … {_U32_MAX}, got {low} … {high}")
    return values.astype("<u4", copy=False).tobytes()


def chain_hashes(
    parent: bytes, tokens: Any, block_tokens: int, extras: Sequence[Sequence[bytes]] | None = None
) -> list[bytes]:
    """Hash every full block of `tokens`, head first.

    `parent` is the 32-byte digest before the first token (`chain_root`, or a block's hash to continue
    from it). `extras[i]` are byte strings that block i's content depends on beside its tokens (the
    digest of an image, say). A partial last block has no name. Pure; 32 bytes per block.
    """
    flat = flatten(tokens)
    step = 4 * block_tokens
    sha256 = hashlib.sha256
    out: list[bytes] = []
    append = out.append
    if extras is None:
        for start in range(0, len(flat) - step + 1, step):
            parent = sha256(parent + flat[start : start + step]).digest()
            append(parent)
        return out
    for index, start in enumerate(range(0, len(flat) - step + 1, step)):
        tail = _encode_extras(extras[index]) if index < len(extras) else b""
        parent = sha256(parent + flat[start : start + step] + tail).digest()
        append(parent)
    return out


def _encode_extras(extras: Iterable[bytes]) -> bytes:
    return b"".join(len(extra).to_bytes(4, "little") + extra for extra in extras)
