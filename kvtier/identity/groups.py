"""Groups of KV cache, and the boundaries of a prompt that they can serve. Pure.

The layers of a model fall into groups by what they keep. A prompt can go on at a *boundary* T, a number of leading
tokens, where every group has what tokens from T on read:

    full        the tokens 0 … T-1
    window(w)   the tokens max(0, T-w+1) … T-1: token q attends to q-w+1 … q, and the first that does is T
    state       the state after token T-1, which lies in the block of that token
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.identity.keys import SCOPE_BYTES, BlockKey


class Kind(StrEnum):
    """What a group keeps of a prompt."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same of a prompt, in blocks of `block_tokens`. `window`: tokens that a token attends to,
    itself included; 0 for the other kinds."""

    kind: Kind
    block_tokens: int
    window: int = 0

    def needed(self, boundary: int) -> range:
        """Depths of the blocks that a prompt needs of this group to go on after `boundary` tokens."""
        stop = -(-boundary // self.block_tokens)
        if self.kind is Kind.FULL:
            return range(stop)
        if self.kind is Kind.STATE:
            return range(max(0, stop - 1), stop)
        return range(min(stop, max(0, boundary - self.window + 1) // self.block_tokens), stop)


Lacking = Callable[[int], int | None]
"""Of a boundary, whether a group lacks some of it: None if not, else a lower bound of what to try next: no boundary
above it, and below the asked one, can be served by this group."""


def longest_boundary(limit: int, alignment: int, groups: Sequence[Lacking]) -> int:
    """The largest multiple of `alignment` up to `limit` that no group lacks anything of; 0 if there is none. 0 needs
    nothing. Monotone: more blocks never make it smaller."""
    boundary = limit // alignment * alignment
    while boundary > 0:
        for lacking in groups:
            lower = lacking(boundary)
            if lower is not None:
                boundary = min(lower, boundary - 1) // alignment * alignment
                break
        else:
            return boundary
    return 0


def lacking_blocks(group: Group, has: Callable[[int], bool]) -> Lacking:
    """`Lacking` of a group, given whether it has the block at a depth. A boundary beyond a block that is lacking needs
    that block, until it has moved out of the window: so the first block that is lacking of the last ones bounds all."""

    def lacking(boundary: int) -> int | None:
        for depth in reversed(group.needed(boundary)):
            if not has(depth):
                return depth * group.block_tokens
        return None

    return lacking


def boundary_keys(head: BlockKey, counts: Sequence[int]) -> list[BlockKey]:
    """Names of the blocks that groups other than the full one need at a boundary, as one chain: they are stored and
    found together. `head` is the key of the full group's last block before the boundary, whose hash covers all tokens;
    `counts` are the blocks of each group, in an order that the namespace fixes.

        hash = SHA-256("kvtier-boundary-1" ‖ hash of `head` ‖ u32 group ‖ u32 place in the group)
    """
    return list(_boundary_keys(head, counts))


def first_boundary_key(head: BlockKey, counts: Sequence[int]) -> BlockKey | None:
    """The first of `boundary_keys`, at the cost of one; None where there are none."""
    return next(_boundary_keys(head, counts), None)


def _boundary_keys(head: BlockKey, counts: Sequence[int]) -> Iterator[BlockKey]:
    scope, stem = head[:SCOPE_BYTES], hashlib.sha256(b"kvtier-boundary-1" + head[SCOPE_BYTES:])
    for group, count in enumerate(counts):
        for place in range(count):
            digest = stem.copy()
            digest.update(group.to_bytes(4, "little") + place.to_bytes(4, "little"))
            yield BlockKey(scope + digest.digest())
