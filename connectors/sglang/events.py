"""kvtier's blocks in SGLang's own KV events: which prompts lie in which tier, for routers that send requests there.

    G2: medium CPU_PINNED        G3: medium DISK        G4, where it is asked for: medium EXTERNAL

A BlockStored is the one that SGLang's tree makes of the same pages, but for its medium. A page's name is the first 8
bytes of its hash, as a signed number. Blocks of requests with a salt, an adapter or an extra key, and those of an
isolated class, are not announced: the tree names the pages of the former by another chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
    is_kv_publisher_rank,
)

from kvtier.connectors.block_events import KNOWN_MAX, TIERS, BlockEvents, KnownRun
from kvtier.connectors.contents import Passage
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import KEY_BYTES, SCOPE_BYTES, SHARED, BlockKey, scope_of_key

MEDIA = {"g2": StorageMedium.CPU, "g3": StorageMedium.DISK, "g4": StorageMedium.EXTERNAL}
_NAME = np.dtype(">i8")


def publishes(server_args: Any) -> bool:
    """Whether this rank publishes KV events."""
    return bool(is_kv_publisher_rank(getattr(server_args, "kv_events_config", None)))


def page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a page after the one with the hash `before`, as SGLang's chain has it. Pure."""
    return hashlib.sha256(before + np.array(tokens, "<u4").tobytes()).digest()


def _tokens_of(req: Any, first: int, pages: int, page: int) -> list[int]:
    """The tokens of some of a request's pages: of its prompt, then of its output."""
    begin, stop, ids = first * page, (first + pages) * page, req.origin_input_ids
    tokens = [int(token) for token in ids[begin:stop]]
    if stop > len(ids):
        tokens += req.output_ids[max(0, begin - len(ids)) : stop - len(ids)]
    return tokens


class PageEvents(BlockEvents):
    """Turns tiers' changes into SGLang's events. Used on the scheduler's thread."""

    def __init__(self, page: int, known_max: int = KNOWN_MAX, tiers: Collection[str] = TIERS) -> None:
        """`page`: tokens of a block. `known_max`, `tiers`: see `BlockEvents`."""
        super().__init__(page, known_max, tiers)

    def remember(self, req: Any, chain: Sequence[BlockKey], start: int, *, lasting: int = 0) -> None:
        """Remember what the request's blocks from `start` on hold. Only its `lasting` first may lie on a disk. One
        whose tokens do not make its pages' hashes, as where images stand for tokens, is passed over."""
        if start >= len(chain) or scope_of_key(chain[start]) != SHARED:
            return
        before = chain[start - 1][-HASH_BYTES:] if start else b""
        if page_hash(before, _tokens_of(req, start, 1, self._block_tokens)) != chain[start][-HASH_BYTES:]:
            return

        def passage(keys: list[BlockKey], first: int) -> Passage:
            parent = chain[first - 1][-HASH_BYTES:] if first else None
            return Passage(keys, parent, _tokens_of(req, first, len(keys), self._block_tokens), [None] * len(keys))

        self._remember(chain, start, passage, getattr(req, "session_id", None), lasting)

    def _announced(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return [key for key in keys if key.startswith(SHARED)]

    def _names(self, keys: Sequence[BlockKey]) -> list[int]:
        place, step = SCOPE_BYTES // _NAME.itemsize, KEY_BYTES // _NAME.itemsize
        names: list[int] = np.frombuffer(b"".join(keys), _NAME)[place::step].tolist()
        return names

    def _made_of(self, run: KnownRun, first: int, stop: int, tier: str) -> Any:
        parent = run.passage.parent
        before = run.names[first - 1] if first else None if parent is None else int(np.frombuffer(parent, _NAME)[0])
        return BlockStored(
            block_hashes=run.names[first:stop],
            parent_block_hash=before,
            token_ids=list(run.passage.tokens_of(first, stop)),
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIA[tier],
            session_id=run.session,
        )

    def _removed(self, names: list[Any], tier: str) -> Any:
        return BlockRemoved(block_hashes=names, medium=MEDIA[tier])

    def _all_cleared(self) -> Any:
        return AllBlocksCleared()
