"""kvtier's blocks in vLLM's own KV events: which prompts lie in which tier, for routers that send requests there.

    G2: medium CPU, LOCAL        G3: medium STORAGE, LOCAL        G4: medium STORAGE, REMOTE        ownership "kvtier"

A BlockStored names consecutive blocks, their tokens and the block before them, as vLLM's own do, where this engine saw
their request lately; else only a hash, with `block_size` 0, as vLLM's offloading does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.events import Change, Events
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey

OWNERSHIP = "kvtier"
MEDIA = {"g2": ("CPU", "LOCAL"), "g3": ("STORAGE", "LOCAL"), "g4": ("STORAGE", "REMOTE")}
_KNOWN_MAX = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Consecutive blocks of one request: their keys, the hash before them, and their tokens."""

    keys: list[BlockKey]
    parent: bytes | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None


class KVEvents:
    """Turns tiers' changes into vLLM's events. Used on the engine's thread; `events` may be written to on any."""

    def __init__(self, block_tokens: int, kind: str | None = None, known_max: int = _KNOWN_MAX) -> None:
        """`kind`: vLLM's name of the KV cache group's kind. The last `known_max` blocks' content is remembered."""
        self.events = Events()
        self._block_tokens = block_tokens
        self._kind = kind
        self._known_max = known_max
        self._known: dict[BlockKey, tuple[_Run, int]] = {}  # and the place in it
        self._runs: deque[_Run] = deque()
        self._held = 0  # blocks in them
        self._cleared = False

    def remember(self, request: Any, chain: Sequence[BlockKey], start: int) -> None:
        """Remember what the request's blocks from `start` on hold."""
        size, lora = self._block_tokens, getattr(request, "lora_request", None)
        keys = list(chain[start:])
        run = _Run(
            keys,
            chain[start - 1][-HASH_BYTES:] if start else None,
            list(request.all_token_ids[start * size : len(chain) * size]),
            None if lora is None else lora.lora_int_id,
            None if lora is None else lora.lora_name,
        )
        self._runs.append(run)
        self._known.update(zip(keys, zip(repeat(run, len(keys)), range(len(keys)), strict=True), strict=True))
        self._held += len(keys)
        while self._held > self._known_max:
            oldest = self._runs.popleft()
            self._held -= len(oldest.keys)
            for key in oldest.keys:
                if self._known[key][0] is oldest:
                    del self._known[key]

    def clear(self) -> None:
        """The engine has new weights: no block reported until now can be found any more."""
        self.events.take()
        self._known.clear()
        self._runs.clear()
        self._held = 0
        self._cleared = True

    def take(self) -> Iterable[Any]:
        """vLLM's events since the last call."""
        if self._cleared:
            self._cleared = False
            yield AllBlocksCleared()
        for change in self.events.take():
            if change.tier not in MEDIA:
                continue
            medium, locality = MEDIA[change.tier]
            if change.stored:
                yield from self._stored(change, medium, locality)
            else:
                names = _names(change.keys)
                where = {"medium": medium, "group_idx": 0, "locality": locality, "ownership": OWNERSHIP}
                yield _made(BlockRemoved, block_hashes=names, **where)

    def _stored(self, change: Change, medium: str, locality: str) -> Iterable[Any]:
        """One event per stretch of consecutive blocks of one request."""
        where = {"medium": medium, "group_idx": 0, "locality": locality, "ownership": OWNERSHIP}
        keys, begin = change.keys, 0
        while begin < len(keys):
            found = self._known.get(keys[begin])
            if found is None:
                names = _names(keys[begin : begin + 1])
                unknown = {"block_hashes": names, "parent_block_hash": None, "token_ids": [], "block_size": 0}
                yield _made(BlockStored, **unknown, lora_id=None, lora_name=None, kv_cache_spec_kind=None, **where)
                begin += 1
                continue
            run, first = found
            stop = first
            while begin < len(keys) and stop < len(run.keys) and keys[begin] == run.keys[stop]:
                begin, stop = begin + 1, stop + 1
            parent = run.keys[first - 1][-HASH_BYTES:] if first else run.parent
            yield _made(
                BlockStored,
                block_hashes=_names(run.keys[first:stop]),
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=run.tokens[first * self._block_tokens : stop * self._block_tokens],
                block_size=self._block_tokens,
                lora_id=run.lora_id,
                lora_name=run.lora_name,
                kv_cache_spec_kind=self._kind,
                **where,
            )


def _names(keys: Sequence[BlockKey]) -> list[Any]:
    """vLLM's names in events: the hashes, unless its environment asks for numbers, which is looked up once."""
    hashes = [key[-HASH_BYTES:] for key in keys]
    if not hashes or maybe_convert_block_hash(hashes[0]) is hashes[0]:
        return list(hashes)
    return [maybe_convert_block_hash(digest) for digest in hashes]


def _made(kind: Any, **fields: Any) -> Any:
    """An event with those of the fields that this release has."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
