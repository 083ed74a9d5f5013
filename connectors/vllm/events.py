"""kvtier's blocks in vLLM's own KV events: which prompts lie in which tier, for routers that send requests there.

    G2: medium CPU, LOCAL        G3: medium STORAGE, LOCAL        G4, where it is asked for: medium STORAGE, REMOTE

A BlockStored is the one that vLLM makes when it fills the same blocks in G1, but for its medium, its locality, and the
salt, which the first of `extra_keys` has in every event. vLLM has it in the first block of a chain only; Dynamo then
knows whose the later ones are as long as it knows their parent, and loses that with the parent's removal from any tier.

A block of an isolated class is not announced, since vLLM's hash does not tell it from the shared block of the same
tokens. `ownership` stays at its default: Dynamo drops events of owners that it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.connectors.block_events import KNOWN_MAX, TIERS, BlockEvents, KnownRun
from kvtier.connectors.contents import Passage
from kvtier.connectors.vllm.compat import extra_keys_of, salt_of
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import KEY_BYTES, BlockKey, Scope, scope_of_key

MEDIA = {"g2": ("CPU", "LOCAL"), "g3": ("STORAGE", "LOCAL"), "g4": ("STORAGE", "REMOTE")}
_NAME = np.dtype(">u8")


def forget_predecessor(queue: list[Any]) -> None:
    """Begin the engine's `queue` of events with one that has routers forget every block of it. An engine that ended
    without a word, at the address that this one has now, left them believing in its blocks."""
    queue.insert(0, AllBlocksCleared())


class KVEvents(BlockEvents):
    """Turns tiers' changes into vLLM's events."""

    def __init__(
        self,
        block_tokens: int,
        kind: str | None = None,
        known_max: int = KNOWN_MAX,
        tiers: Collection[str] = TIERS,
    ) -> None:
        """`kind`: vLLM's name of the KV cache group's kind. `known_max`, `tiers`: see `BlockEvents`."""
        super().__init__(block_tokens, known_max, tiers)
        self._kind = kind
        self._isolated: set[Scope] = set()  # as many as classes, adapters and tenants of isolated classes make

    def remember(
        self, request: Any, chain: Sequence[BlockKey], start: int, *, lasting: int = 0, isolated: bool = False
    ) -> None:
        """Remember what the request's blocks from `start` on hold. Only its `lasting` first may lie on a disk.
        `isolated`: in a scope of an isolated class."""
        if isolated:
            self._isolated.add(scope_of_key(chain[start]))
            return
        size, lora = self._block_tokens, getattr(request, "lora_request", None)

        def passage(keys: list[BlockKey], start: int) -> Passage:
            stop = start + len(keys)
            return Passage(
                keys,
                chain[start - 1][-HASH_BYTES:] if start else None,
                request.all_token_ids[start * size : stop * size],
                extra_keys_of(request, start, stop, size),
                salt_of(request),
                None if lora is None else (lora.lora_int_id, lora.lora_name),
            )

        self._remember(chain, start, passage, getattr(request, "session_id", None), lasting)

    def _announced(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return [key for key in keys if scope_of_key(key) not in self._isolated] if self._isolated else keys

    def _made_of(self, run: KnownRun, first: int, stop: int, tier: str) -> Any:
        passage = run.passage
        parent = passage.keys[first - 1][-HASH_BYTES:] if first else passage.parent
        extra_keys = list(passage.extra_keys[first:stop])
        if passage.salt is not None and parent is not None:
            extra_keys[0] = (*(extra_keys[0] or ()), passage.salt)
        lora_id, lora_name = passage.adapter or (None, None)
        return _made(
            BlockStored,
            block_hashes=self._names_of(run, first, stop),
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=passage.tokens_of(first, stop),
            block_size=self._block_tokens,
            extra_keys=extra_keys,
            kv_cache_spec_kind=self._kind,
            lora_id=lora_id,
            lora_name=lora_name,
            session_id=run.session,
            **_where(tier),
        )

    def _removed(self, keys: Sequence[BlockKey], tier: str) -> Any:
        return _made(BlockRemoved, block_hashes=self._names(keys), **_where(tier))

    def _all_cleared(self) -> Any:
        return AllBlocksCleared()

    def _names(self, keys: Sequence[BlockKey]) -> list[Any]:
        """vLLM's names in events: the hashes or, where its environment asks for numbers, their last eight bytes. It
        looks at the environment for each."""
        if not keys:
            return []
        first = keys[0][-HASH_BYTES:]
        name = maybe_convert_block_hash(first)
        if name is first:
            return [key[-HASH_BYTES:] for key in keys]
        last = KEY_BYTES // _NAME.itemsize - 1
        numbers: list[int] = np.frombuffer(b"".join(keys), _NAME)[last :: last + 1].tolist()
        return numbers if numbers[0] == name else [maybe_convert_block_hash(key[-HASH_BYTES:]) for key in keys]


def _where(tier: str) -> dict[str, Any]:
    medium, locality = MEDIA[tier]
    return {"medium": medium, "group_idx": 0, "locality": locality}


def _made(kind: Any, **fields: Any) -> Any:
    """An event with those of the fields that this release has."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
