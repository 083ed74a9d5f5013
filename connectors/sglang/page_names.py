"""Names of pages in SGLang's KV events, where requests have a salt, an adapter or an extra key.

A page's name is of its hash in the tree where they have none. Else the tree keeps a second chain of hashes for events,
which the salt alone seeds, and mixes into each of them, before it is a name,

    by the default format    the extra key, where it names an adapter that has a public name
    by the format "dynamo"   the extra key and the salt

So a name does not follow from a block's key: it is remembered while it may be needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from sglang.srt.disaggregation.kv_events import kv_event_namespace_seed

from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey

_SALT_TAG = b"sglang-cache-salt-v1\0"
_TOKEN, _NAME = np.dtype("<u4"), np.dtype(">i8")
_TOKEN_MAX = np.iinfo(_TOKEN).max


class Labels(NamedTuple):
    """All that a request's pages are told apart by beside their tokens. `adapter`: its public name."""

    salt: str | None = None
    extra_key: str | None = None
    adapter: str | None = None


def name_of_hash(page_hash: bytes) -> int:
    """The first eight bytes of a page's hash, as events have them. Pure."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def names_of_hashes(hashes: Sequence[bytes]) -> list[int]:
    """`name_of_hash` of each of these bytes; twice as fast if all have one length. Pure."""
    joined, size = b"".join(hashes), len(hashes[0]) if hashes else _NAME.itemsize
    if size % _NAME.itemsize or set(map(len, hashes)) != {size}:
        return list(map(name_of_hash, hashes))
    names: list[int] = np.frombuffer(joined, _NAME)[:: size // _NAME.itemsize].tolist()
    return names


def page_hashes(before: bytes, tokens: Sequence[int], page: int) -> list[bytes]:
    """The hashes of consecutive pages after the one with the hash `before`, as SGLang's chain has them. Pure. Raises
    OverflowError for a token that is not of 32 bits."""
    raw, size = _raw(tokens), page * _TOKEN.itemsize
    out, sha256 = list[bytes](), hashlib.sha256
    for start in range(0, len(raw) // size * size, size):
        before = sha256(before + raw[start : start + size]).digest()
        out.append(before)
    return out


def leading_text(tokens: Sequence[int]) -> int:
    """How many leading tokens are of 32 bits: what stands for an image has more. Pure."""
    all_of_them = np.asarray(tokens, np.int64)
    others = np.flatnonzero((all_of_them < 0) | (all_of_them > _TOKEN_MAX))
    return int(others[0]) if others.size else len(all_of_them)


def _raw(tokens: Sequence[int]) -> bytes:
    if not isinstance(tokens, array):
        return np.array(tokens, _TOKEN).tobytes()
    wide = np.asarray(tokens)  # a hundredth of the time
    if wide.size and not 0 <= wide.min() <= wide.max() <= _TOKEN_MAX:
        raise OverflowError("a token is not of 32 bits")
    return wide.astype(_TOKEN).tobytes()


class PageNames:
    """Of the latest pages with labels, `pages_max` at most and half as many at least. Not thread-safe."""

    def __init__(self, pages_max: int, *, dynamo: bool) -> None:
        self._pages_max = pages_max
        self._dynamo = dynamo
        # A page's own hash for events; before it, where its name is of something else, those eight bytes.
        self._recent: dict[BlockKey, bytes] = {}
        self._older: dict[BlockKey, bytes] = {}  # forgotten as a whole: one by one would take longer

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._older

    def has_all(self, keys: Iterable[BlockKey]) -> bool:
        """Whether all names are known. False, also where some are only among the older ones: ask one by one."""
        return all(map(self._recent.__contains__, keys))

    def names_of(self, keys: Sequence[BlockKey]) -> list[int]:
        """Of pages that are known."""
        recent, older = self._recent, self._older
        if self.has_all(keys):
            return names_of_hashes(list(map(recent.__getitem__, keys)))
        return names_of_hashes([recent.get(key) or older[key] for key in keys])

    def are_distinct(self, labels: Labels) -> bool:
        """Whether no page of other labels has the names of these."""
        return self._dynamo or labels.extra_key is None or labels.adapter is not None

    def known(self, chain: Sequence[BlockKey]) -> int:
        """How many leading pages of a chain need not be learned again."""
        return len(list(takewhile(self._recent.__contains__, chain)))

    def fits(self, pages: int) -> bool:
        """Whether so many more can be learned and none is forgotten for them."""
        return not (self._recent and self._older and 2 * (len(self._recent) + pages) > self._pages_max)

    def learn(
        self, keys: Sequence[BlockKey], parent: BlockKey | None, tokens: Sequence[int], labels: Labels
    ) -> list[tuple[BlockKey, int]]:
        """Know the names of consecutive pages, which have these tokens and come after `parent`; None: they are a
        prompt's first. Nothing, where the parent is not known. Returns the pages whose names, which come with them,
        are forgotten for it."""
        if parent is not None and parent not in self:
            return []
        if parent is not None:
            before = (self._recent.get(parent) or self._older[parent])[-HASH_BYTES:]
        else:
            before = b"" if labels.salt is None else hashlib.sha256(_SALT_TAG + labels.salt.encode()).digest()
        forgotten = dict[BlockKey, bytes]()
        if self._recent and 2 * (len(self._recent) + len(keys)) > self._pages_max:
            forgotten, self._older, self._recent = self._older, self._recent, {}
        hashes = page_hashes(before, tokens, len(tokens) // len(keys))
        if (seed := self._seed(labels)) is not None:
            sha256 = hashlib.sha256  # as SGLang's namespaced_block_hash
            hashes = [sha256(seed + page[: _NAME.itemsize]).digest()[: _NAME.itemsize] + page for page in hashes]
        self._recent.update(zip(keys, hashes, strict=True))
        return [(key, name_of_hash(page)) for key, page in forgotten.items() if key not in self]

    def clear(self) -> None:
        self._recent, self._older = {}, {}

    def _seed(self, labels: Labels) -> bytes | None:
        if self._dynamo:
            seed = kv_event_namespace_seed(extra_key=labels.extra_key, cache_salt=labels.salt)
        else:
            seed = kv_event_namespace_seed(
                extra_key=None if labels.adapter is None else labels.extra_key, cache_salt=None
            )
        return None if seed is None else bytes(seed)
