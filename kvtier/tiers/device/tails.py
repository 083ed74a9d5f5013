"""Blocks whose first tokens a prompt shares: found by the block before them and by their tokens. Pure.

A chain names whole blocks, so two prompts that part inside of one share nothing of it by name. The KV of its first
tokens is the same all the same, in full attention: k tokens of a block that is in G1 can be copied into a new owner's.

    by parent (the key of the block before; its hash covers all tokens before, its scope the tenant) → (tokens, key)

Tokens are compared, never hashed alone. The index holds names and tokens, no bytes: whoever asks says which of the
blocks are in the pool, and may be served, now. So terms, purges and evictions hold for tails as for any block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.errors import ConfigError
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope

_PER_PARENT = 8
"""Blocks that are remembered behind one: the latest."""


def tail_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """The name of a block that is not full. No chain has it.

    hash = SHA-256("kvtier-tail-1" ‖ hash of `parent` ‖ tokens as little-endian u32)
    """
    digest = hashlib.sha256(b"kvtier-tail-1" + parent[SCOPE_BYTES:])
    for token in tokens:
        digest.update(int(token).to_bytes(4, "little"))
    return BlockKey(parent[:SCOPE_BYTES] + digest.digest())


class Tails:
    """At most `limit` parents, the latest used; behind each at most 8 blocks. One owner thread, the pool's."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"tails: at least 1 must be remembered, got {limit}")
        self._limit = limit
        self._behind: OrderedDict[BlockKey, dict[BlockKey, tuple[int, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._behind)

    def add(self, parent: BlockKey, tokens: Sequence[int], key: BlockKey) -> None:
        """The block `key` stands behind `parent` and begins with these tokens."""
        behind = self._behind.setdefault(parent, {})
        self._behind.move_to_end(parent)
        behind.pop(key, None)
        behind[key] = tuple(int(token) for token in tokens)
        if len(behind) > _PER_PARENT:
            del behind[next(iter(behind))]
        if len(self._behind) > self._limit:
            self._behind.popitem(last=False)

    def longest(
        self, parent: BlockKey, tokens: Sequence[int], here: Callable[[BlockKey], bool]
    ) -> tuple[BlockKey, int] | None:
        """The block behind `parent` that shares the most leading `tokens`, and how many; None if none shares one.
        Forgets those that are not `here`."""
        behind = self._behind.get(parent)
        if behind is None:
            return None
        best: tuple[BlockKey, int] | None = None
        wanted = [int(token) for token in tokens]
        for key, known in list(behind.items()):
            if not here(key):
                del behind[key]
                continue
            pairs = zip(known, wanted, strict=False)
            shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(known), len(wanted)))
            if shared and (best is None or shared > best[1]):
                best = key, shared
        if behind:
            self._behind.move_to_end(parent)
        else:
            del self._behind[parent]
        return best

    def purge(self, scope: Scope) -> None:
        """Forget the tokens of this scope, which may be the beginning of several."""
        for parent in [parent for parent in self._behind if parent.startswith(scope)]:
            del self._behind[parent]

    def check(self) -> None:
        """Assert the bounds."""
        assert len(self._behind) <= self._limit and all(0 < len(one) <= _PER_PARENT for one in self._behind.values())
