"""kvtier's blocks in vLLM's own KV events: which prompts lie in which tier, for routers that send requests there.

    G2: medium CPU, LOCAL        G3: medium STORAGE, LOCAL        G4: medium STORAGE, REMOTE        ownership "kvtier"

A BlockStored names the tokens of its block and the block before it, as vLLM's own do, where this engine saw the block's
request lately; else only its hash, with `block_size` 0, as vLLM's offloading does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.events import Change, Events
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import BlockKey

OWNERSHIP = "kvtier"
MEDIA = {"g2": ("CPU", "LOCAL"), "g3": ("STORAGE", "LOCAL"), "g4": ("STORAGE", "REMOTE")}
_KNOWN_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class _Content:
    parent: bytes | None
    tokens: tuple[int, ...]
    lora_id: int | None
    lora_name: str | None


class KVEvents:
    """Turns tiers' changes into vLLM's events. Used on the engine's thread; `events` may be written to on any."""

    def __init__(self, block_tokens: int, kind: str | None = None, known_max: int = _KNOWN_MAX) -> None:
        """`kind`: vLLM's name of the KV cache group's kind. The content of `known_max` blocks is remembered."""
        self.events = Events()
        self._block_tokens = block_tokens
        self._kind = kind
        self._known_max = known_max
        self._known: OrderedDict[BlockKey, _Content] = OrderedDict()
        self._cleared = False

    def remember(self, request: Any, chain: Sequence[BlockKey], start: int) -> None:
        """Remember what the request's blocks from `start` on hold."""
        size, lora = self._block_tokens, getattr(request, "lora_request", None)
        tokens = request.all_token_ids
        for depth in range(start, len(chain)):
            self._known[chain[depth]] = _Content(
                chain[depth - 1][-HASH_BYTES:] if depth else None,
                tuple(tokens[depth * size : (depth + 1) * size]),
                None if lora is None else lora.lora_int_id,
                None if lora is None else lora.lora_name,
            )
            self._known.move_to_end(chain[depth])
        while len(self._known) > self._known_max:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """The engine has new weights: no block reported until now can be found any more."""
        self.events.take()
        self._known.clear()
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
                names = [_name(key) for key in change.keys]
                where = {"medium": medium, "group_idx": 0, "locality": locality, "ownership": OWNERSHIP}
                yield _made(BlockRemoved, block_hashes=names, **where)

    def _stored(self, change: Change, medium: str, locality: str) -> Iterable[Any]:
        for key in change.keys:
            content = self._known.get(key) or _Content(None, (), None, None)
            yield _made(
                BlockStored,
                block_hashes=[_name(key)],
                parent_block_hash=None if content.parent is None else maybe_convert_block_hash(content.parent),
                token_ids=list(content.tokens),
                block_size=len(content.tokens),
                lora_id=content.lora_id,
                medium=medium,
                lora_name=content.lora_name,
                group_idx=0,
                kv_cache_spec_kind=self._kind if content.tokens else None,
                locality=locality,
                ownership=OWNERSHIP,
            )


def _name(key: BlockKey) -> Any:
    return maybe_convert_block_hash(key[-HASH_BYTES:])


def _made(kind: Any, **fields: Any) -> Any:
    """An event with those of the fields that this release has."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
