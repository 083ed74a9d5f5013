"""kvtier's blocks in SGLang's own KV events: which prompts lie in which tier, for routers that send requests there.

    G2: medium CPU_PINNED        G3: medium DISK        G4, where it is asked for: medium EXTERNAL

A BlockStored is the one that SGLang's tree makes of the same pages, but for its medium. A page's name is the first 8
bytes of its hash, as a signed number; of requests with a salt, an adapter or an extra key, see `page_names`. Those are
told of while their names are remembered: the removal of one whose name is forgotten is announced before. Not announced
are blocks of an isolated class, and those that share their names with others' in the tree: of extra keys in SGLang's
default format, and of adapters without a public name.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
    is_kv_publisher_rank,
    uses_dynamo_format,
)
from sglang.srt.mem_cache.utils import storage_namespace_seed

from kvtier.connectors.block_events import KNOWN_MAX, TIERS, BlockEvents, KnownRun
from kvtier.connectors.contents import Passage
from kvtier.connectors.sglang import adapters
from kvtier.connectors.sglang.page_names import Labels, PageNames, leading_text, names_of_hashes, page_hashes
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import SCOPE_BYTES, SHARED, BlockKey, scope_of_key

MEDIA = {"g2": StorageMedium.CPU, "g3": StorageMedium.DISK, "g4": StorageMedium.EXTERNAL}
_TOKEN_TYPE = "q"  # SGLang's own


def publishes(server_args: Any) -> bool:
    """Whether this rank publishes KV events."""
    return bool(is_kv_publisher_rank(getattr(server_args, "kv_events_config", None)))


def is_dynamo(server_args: Any) -> bool:
    """Whether events have the format "dynamo"."""
    return bool(uses_dynamo_format(getattr(server_args, "kv_events_config", None)))


def _tokens_of(req: Any, first: int, pages: int, page: int) -> array[int]:
    """The tokens of some of a request's pages: of its prompt, then of its output. As the request has them, which no
    list of 32,768 could be in a millisecond."""
    begin, stop, ids = first * page, (first + pages) * page, req.origin_input_ids
    tokens = array(_TOKEN_TYPE, ids[begin:stop])
    if stop > len(ids):
        tokens += array(_TOKEN_TYPE, req.output_ids[max(0, begin - len(ids)) : stop - len(ids)])
    return tokens


_scope = itemgetter(slice(SCOPE_BYTES))


def _scopes(keys: Sequence[BlockKey]) -> set[bytes]:
    return set(map(_scope, keys))


def _listed(tokens: Sequence[int]) -> list[int]:
    return tokens.tolist() if isinstance(tokens, array) else list(tokens)  # twice as fast


def labels_of(req: Any) -> Labels | None:
    """A request's labels. None: of an adapter whose public name is not known, without which routers take its pages for
    the model's own."""
    number = getattr(req, "lora_id", None)
    name = None if number is None else adapters.public_name(number)
    return None if number is not None and name is None else Labels(req.cache_salt, req.extra_key, name)


class PageEvents(BlockEvents):
    """Turns tiers' changes into SGLang's events. Used on the scheduler's thread."""

    def __init__(
        self, page: int, known_max: int = KNOWN_MAX, tiers: Collection[str] = TIERS, *, dynamo: bool = False
    ) -> None:
        """`page`: tokens of a block. `known_max`, `tiers`: see `BlockEvents`. `dynamo`: events have that format."""
        super().__init__(page, known_max, tiers)
        self._page_names = PageNames(known_max, dynamo=dynamo)
        self._told_of: dict[str, set[BlockKey]] = {tier: set() for tier in self._tiers}  # of those with labels
        self._forgotten: list[Any] = []  # events

    def remember(
        self, req: Any, chain: Sequence[BlockKey], start: int, *, lasting: int = 0, isolated: bool = False
    ) -> None:
        """Remember what the request's blocks from `start` on hold, up to the first image: no router takes what stands
        for one in place of tokens. Only its `lasting` first may lie on a disk. One whose tokens do not make its pages'
        hashes is passed over. `isolated`: in a scope of an isolated class."""
        if not isolated:
            chain = chain[: leading_text(_tokens_of(req, 0, len(chain), self._block_tokens)) // self._block_tokens]
        if start >= len(chain) or isolated:
            return
        labels, page, is_shared = labels_of(req), self._block_tokens, scope_of_key(chain[start]) == SHARED
        if labels is None or is_shared != (labels == Labels()) or not self._page_names.are_distinct(labels):
            return
        seed = storage_namespace_seed(labels.extra_key, labels.salt)
        before = chain[start - 1][-HASH_BYTES:] if start else b"" if seed is None else bytes.fromhex(seed)
        if page_hashes(before, _tokens_of(req, start, 1, page), page) != [chain[start][-HASH_BYTES:]]:
            return
        if not is_shared:
            known = self._page_names.known(chain)
            rest = len(chain) - known
            parent = chain[known - 1] if known else None
            self._learn_names(chain[known:], parent, _tokens_of(req, known, rest, page), labels)

        def passage(keys: list[BlockKey], first: int) -> Passage:
            return Passage(
                keys,
                chain[first - 1][-HASH_BYTES:] if first else None,
                _tokens_of(req, first, len(keys), page),
                [None if labels.adapter is None else (labels.adapter,)] * len(keys),
                labels.salt,
                None if labels.adapter is None else (0, labels.adapter),
                labels.extra_key,
            )

        self._remember(chain, start, passage, getattr(req, "session_id", None), lasting)

    def clear(self) -> None:
        super().clear()
        self._page_names.clear()

    def _take_own(self) -> list[Any]:
        out, self._forgotten = self._forgotten, []
        return out

    def _hear(self, passage: Passage) -> None:
        scope, labels, names = scope_of_key(passage.keys[0]), _labels_of_passage(passage), self._page_names
        # The newest come first, and none of them is to be taken back for an older one.
        if scope != SHARED and names.are_distinct(labels) and names.fits(len(passage.keys)):
            parent = None if passage.parent is None else BlockKey(scope + passage.parent)
            self._learn_names(passage.keys, parent, passage.tokens, labels)

    def _learn_names(
        self, keys: Sequence[BlockKey], parent: BlockKey | None, tokens: Sequence[int], labels: Labels
    ) -> None:
        forgotten = self._page_names.learn(keys, parent, tokens, labels) if keys else []
        for tier, told in self._told_of.items():
            if names := [name for key, name in forgotten if key in told]:
                told.difference_update(key for key, _ in forgotten)
                self._forgotten.append(BlockRemoved(block_hashes=names, medium=MEDIA[tier]))

    def _announced(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        if not (labelled := _scopes(keys) - {SHARED}) or self._page_names.has_all(keys):  # mostly
            return keys
        return [key for key in keys if _scope(key) not in labelled or key in self._page_names]

    def _names(self, keys: Sequence[BlockKey]) -> list[int]:
        scopes = _scopes(keys)
        if SHARED not in scopes:
            return self._page_names.names_of(keys)
        if len(scopes) > 1:
            return [name for key in keys for name in self._names([key])]
        return names_of_hashes([key[SCOPE_BYTES:] for key in keys])

    def _made_of(self, run: KnownRun, first: int, stop: int, tier: str) -> Any:
        passage = run.passage
        scope, parent = scope_of_key(passage.keys[0]), passage.keys[first - 1] if first else None
        if parent is None and passage.parent is not None:
            parent = BlockKey(scope + passage.parent)
        if scope == SHARED:
            names = self._names_of(run, first, stop)
        elif parent is None or parent in self._page_names:
            names = self._names(passage.keys[first:stop])
            self._told_of[tier].update(passage.keys[first:stop])
        else:
            return None
        return BlockStored(
            block_hashes=names,
            parent_block_hash=None if parent is None else self._names([parent])[0],
            token_ids=_listed(passage.tokens_of(first, stop)),
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIA[tier],
            cache_salt=passage.salt,
            session_id=run.session,
            lora_name=None if passage.adapter is None else passage.adapter[1],
        )

    def _removed(self, keys: Sequence[BlockKey], tier: str) -> Any:
        self._told_of[tier].difference_update(keys)
        return BlockRemoved(block_hashes=self._names(keys), medium=MEDIA[tier])

    def _all_cleared(self) -> Any:
        for told in self._told_of.values():
            told.clear()
        self._forgotten.clear()
        return AllBlocksCleared()


def _labels_of_passage(passage: Passage) -> Labels:
    return Labels(passage.salt, passage.extra_key, None if passage.adapter is None else passage.adapter[1])
