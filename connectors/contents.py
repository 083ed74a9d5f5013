"""What blocks hold, as bytes: the pages that `kvtier.tiers.protocol.Describing` keeps, for routers after a restart.

    part of a page    scope (16) ‖ hash of the block before, or zeros (32) ‖ blocks u16 ‖ tokens per block u16 ‖ bits
                      per token u8 ‖ length of the JSON u16 ‖ JSON ‖ hashes (32 each) ‖ tokens, packed, most
                      significant bit first

The JSON has what lies beside the tokens: {"salt": …, "lora": [id, name], "extra": {"place": [extra keys]},
"extra_key": …}. A block of 16 tokens of a vocabulary of 2^18 takes 68 bytes, and its share of a part's 59.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvtier.errors import CorruptError
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, scope_of_key
from kvtier.tiers.protocol import CONTENT_BYTES_MAX, CONTENT_PART_BYTES

_HEAD = struct.Struct(f"<{SCOPE_BYTES}s{HASH_BYTES}sHHBH")
_NO_HASH = bytes(HASH_BYTES)
_BITS_MAX = 32
_U16_MAX = 0xFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Consecutive blocks of one prompt: their keys, the hash before the first, the tokens of all, and what the engine
    hashed beside the tokens, per block. `adapter`: its number in the engine, and its name. `extra_key`: SGLang's, of
    the request."""

    keys: list[BlockKey]
    parent: bytes | None
    tokens: Sequence[int]
    extra_keys: Sequence[tuple[Any, ...] | None]
    salt: str | None = None
    adapter: tuple[int, str] | None = None
    extra_key: str | None = None

    def tokens_of(self, begin: int, stop: int) -> Sequence[int]:
        """The tokens of some of the blocks."""
        if (begin, stop) == (0, len(self.keys)):
            return self.tokens
        size = len(self.tokens) // len(self.keys)
        return self.tokens[begin * size : stop * size]

    def part(self, begin: int, stop: int) -> Passage:
        """Some of the blocks."""
        return Passage(
            self.keys[begin:stop],
            self.keys[begin - 1][-HASH_BYTES:] if begin else self.parent,
            self.tokens_of(begin, stop),
            self.extra_keys[begin:stop],
            self.salt,
            self.adapter,
            self.extra_key,
        )

    def joined(self, *others: Passage) -> Passage:
        """This, and passages that go on from it, each from the one before."""
        if not others:
            return self
        parts = (self, *others)
        return Passage(
            [key for part in parts for key in part.keys],
            self.parent,
            [token for part in parts for token in part.tokens],
            [keys for part in parts for keys in part.extra_keys],
            self.salt,
            self.adapter,
            self.extra_key,
        )


@dataclass(slots=True)
class ContentPage:
    """A page while it fills up. `number`: of the page that it was last written as; 0: none yet."""

    parts: list[bytes] = field(default_factory=list)
    number: int = 0

    def add(self, passage: Passage) -> int:
        """Describe the first blocks of a passage, as many as there is room for; returns how many. One that no page can
        have counts as described."""
        size = len(passage.tokens) // len(passage.keys)
        used = sum(CONTENT_PART_BYTES + len(part) for part in self.parts)
        room = CONTENT_BYTES_MAX - used - CONTENT_PART_BYTES - _HEAD.size
        some = passage.part(0, max(1, room // (HASH_BYTES + 2 * size)))  # about what fits: all of it is looked at
        tokens, beside = np.array(some.tokens, np.int64), _encoded_beside(some)
        bits = max(1, int(tokens.max()).bit_length())
        if beside is None or bits > _BITS_MAX or int(tokens.min()) < 0 or not 0 < size <= _U16_MAX:
            return len(some.keys)
        count = min(len(some.keys), max(0, room - len(beside) - 1) * 8 // (8 * HASH_BYTES + size * bits))
        if not count:
            return 0 if self.parts else 1
        if count < len(some.keys):
            some = some.part(0, count)
            beside = _encoded_beside(some) or b""
        wide = np.unpackbits(tokens[: count * size].astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)
        scope, parent = scope_of_key(some.keys[0]), some.parent or _NO_HASH
        self.parts.append(
            _HEAD.pack(scope, parent, count, size, bits, len(beside))
            + beside
            + b"".join(key[-HASH_BYTES:] for key in some.keys)
            + np.packbits(wide[:, 32 - bits :]).tobytes()
        )
        return count


class _Beside(msgspec.Struct, omit_defaults=True):
    """The JSON. `extra`: by place, where they are not those of most blocks."""

    salt: str | None = None
    lora: tuple[int, str] | None = None
    extra: dict[str, tuple[str | int | tuple[str | int, ...], ...] | None] = {}
    extra_key: str | None = None


def _encoded_beside(passage: Passage) -> bytes | None:
    """None where it cannot be read again, or is too long."""
    usual = _usual(passage.adapter)
    extra = {str(place): keys for place, keys in enumerate(passage.extra_keys) if keys != usual}
    try:
        beside = {"salt": passage.salt, "lora": passage.adapter, "extra": extra, "extra_key": passage.extra_key}
        checked = msgspec.convert(beside, _Beside)
        raw = b"" if checked == _Beside() else msgspec.json.encode(checked)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: half of a surrogate pair
        return None
    return raw if len(raw) <= _U16_MAX else None


def _usual(adapter: tuple[int, str] | None) -> tuple[Any, ...] | None:
    """The extra keys of most blocks of a prompt."""
    return None if adapter is None else (adapter[1],)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPassage:
    """A passage as a page has it: its tokens are taken apart when they are asked for."""

    keys: list[BlockKey]
    parent: BlockKey | None
    _beside: bytes
    _tokens: bytes
    _size: int
    _bits: int

    def passage(self) -> Passage:
        """All of it. Raises CorruptError for bytes that were not made here."""
        try:
            beside = msgspec.json.decode(self._beside, type=_Beside) if self._beside else _Beside()
        except msgspec.DecodeError as error:
            raise CorruptError(f"what lies beside tokens: {error}") from None
        count = len(self.keys) * self._size
        narrow = np.unpackbits(np.frombuffer(self._tokens, np.uint8), count=count * self._bits)
        wide = np.zeros((count, 32), np.uint8)
        wide[:, 32 - self._bits :] = narrow.reshape(count, self._bits)
        usual = _usual(beside.lora)
        return Passage(
            self.keys,
            None if self.parent is None else self.parent[-HASH_BYTES:],
            np.packbits(wide, axis=1).view(">u4").ravel().tolist(),
            [beside.extra.get(str(place), usual) for place in range(len(self.keys))],
            beside.salt,
            beside.lora,
            beside.extra_key,
        )


def described(part: bytes) -> PackedPassage:
    """A part of a page. Raises CorruptError for bytes that were not made here."""
    if len(part) < _HEAD.size:
        raise CorruptError(f"a part of {len(part)} bytes")
    scope, parent, count, size, bits, length = _HEAD.unpack_from(part)
    hashes = _HEAD.size + length
    tokens = hashes + count * HASH_BYTES
    if len(part) != tokens + (count * size * bits + 7) // 8 or not (count and size and 0 < bits <= _BITS_MAX):
        raise CorruptError(f"a part of {len(part)} bytes that says that it has {count} blocks of {size} tokens")
    return PackedPassage(
        [BlockKey(scope + part[place : place + HASH_BYTES]) for place in range(hashes, tokens, HASH_BYTES)],
        None if parent == _NO_HASH else BlockKey(scope + parent),
        part[_HEAD.size : hashes],
        part[tokens:],
        size,
        bits,
    )
