"""Names of pages in SGLang's KV events, where requests have a salt, an adapter or an extra key.

A page's name is of its hash in the tree where they have none. Else the tree keeps a second chain of hashes for events,
which the salt alone seeds, and mixes into each of them, before it is a name,

    by the default format    the extra key, where it names an adapter that has a public name
    by the format "dynamo"   the extra key and the salt

So a name does not follow from a block's key: it is remembered while it may be needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from sglang.srt.disaggregation.kv_events import kv_event_namespace_seed, namespaced_block_hash

from kvtier.identity.keys import BlockKey

_SALT_TAG = b"sglang-cache-salt-v1\0"
_TOKEN = np.dtype("<u4")


class Labels(NamedTuple):
    """All that a request's pages are told apart by beside their tokens. `adapter`: its public name."""

    salt: str | None = None
    extra_key: str | None = None
    adapter: str | None = None


def name_of_hash(page_hash: bytes) -> int:
    """The first eight bytes of a page's hash, as events have them. Pure."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def page_hashes(before: bytes, tokens: Sequence[int], page: int) -> list[bytes]:
    """The hashes of consecutive pages after the one with the hash `before`, as SGLang's chain has them. Pure."""
    raw, size = np.array(tokens, _TOKEN).tobytes(), page * _TOKEN.itemsize
    out = list[bytes]()
    for start in range(0, len(raw) // size * size, size):
        before = hashlib.sha256(before + raw[start : start + size]).digest()
        out.append(before)
    return out


class _Page(NamedTuple):
    event_hash: bytes
    name: int


class PageNames:
    """Of the latest pages with labels, `pages_max` at most and half as many at least. Not thread-safe."""

    def __init__(self, pages_max: int, *, dynamo: bool) -> None:
        self._pages_max = pages_max
        self._dynamo = dynamo
        self._recent: dict[BlockKey, _Page] = {}
        self._older: dict[BlockKey, _Page] = {}  # forgotten as a whole: one by one would take longer

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._older

    def __getitem__(self, key: BlockKey) -> int:
        found = self._recent.get(key)
        return (found or self._older[key]).name

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
            before = (self._recent.get(parent) or self._older[parent]).event_hash
        else:
            before = b"" if labels.salt is None else hashlib.sha256(_SALT_TAG + labels.salt.encode()).digest()
        forgotten = dict[BlockKey, _Page]()
        if self._recent and 2 * (len(self._recent) + len(keys)) > self._pages_max:
            forgotten, self._older, self._recent = self._older, self._recent, {}
        seed = self._seed(labels)
        for key, page_hash in zip(keys, page_hashes(before, tokens, len(tokens) // len(keys)), strict=True):
            self._recent[key] = _Page(page_hash, namespaced_block_hash(name_of_hash(page_hash), namespace_seed=seed))
        return [(key, page.name) for key, page in forgotten.items() if key not in self]

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
