"""kvtier's blocks in vLLM's own KV events: which prompts lie in which tier, for routers that send requests there.

    G2: medium CPU, LOCAL        G3: medium STORAGE, LOCAL        G4, where it is asked for: medium STORAGE, REMOTE

A BlockStored is the one that vLLM makes when it fills the same blocks in G1, but for its medium, its locality, and the
salt, which the first of `extra_keys` has in every event. vLLM has it in the first block of a chain only; Dynamo then
knows whose the later ones are as long as it knows their parent, and loses that with the parent's removal from any tier.

A block of no request that this engine saw lately is not announced, since routers read no hash without its tokens,
unless G3 kept them from an earlier engine (`kvtier.connectors.announcer`); nor is one of an isolated class, which
vLLM's hash does not tell from the shared block of the same tokens. `ownership` stays at its default: Dynamo drops
events of owners that it does not know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.connectors.announcer import Announcer
from kvtier.connectors.contents import Passage
from kvtier.connectors.vllm.compat import extra_keys_of, salt_of
from kvtier.errors import InvalidRequest
from kvtier.events import Events, Lost
from kvtier.identity.hashing import HASH_BYTES
from kvtier.identity.keys import KEY_BYTES, BlockKey, Scope, scope_of_key
from kvtier.manager.hierarchy import Hierarchy
from kvtier.units import shorten

MEDIA = {"g2": ("CPU", "LOCAL"), "g3": ("STORAGE", "LOCAL"), "g4": ("STORAGE", "REMOTE")}
TIERS = ("g2", "g3")
"""Announced by default. G4 is every replica's, so it is no reason to prefer one of them, and some routers count any
medium that they do not know as the GPU's."""
_KNOWN_MAX = 1 << 17
_NAME = np.dtype(">u8")


def tiers_announced(value: Any) -> tuple[str, ...]:
    """The connector's argument `event_tiers`. Raises InvalidRequest."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name in MEDIA for name in value):
        raise InvalidRequest(f"must be a list of {', '.join(MEDIA)}, got {shorten(value)}")
    return tuple(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Consecutive blocks of one request, and their names from the first event on. `first` is the number of the first
    block among all that were remembered."""

    first: int
    passage: Passage
    session: str | None = None
    _names: list[Any] = field(default_factory=list)

    def names(self, first: int, stop: int) -> list[Any]:
        """Of these blocks, as events have them. Each tier has an event of its own for them."""
        if not self._names:
            self._names.extend(_names(self.passage.keys))
        return self._names[first:stop]


class _Known:
    """Runs by the numbers of their blocks."""

    def __init__(self) -> None:
        self.numbers: dict[BlockKey, int] = {}
        self.runs: list[_Run] = []
        self.blocks = 0  # of the runs, which may have some in common

    def add(self, run: _Run) -> None:
        """Numbers go on from the last run's."""
        keys = run.passage.keys
        self.runs.append(run)
        self.blocks += len(keys)
        self.numbers.update(zip(keys, range(run.first, run.first + len(keys)), strict=True))

    def find(self, key: BlockKey) -> tuple[_Run, int] | None:
        """The run of a block, and its place in it."""
        number = self.numbers.get(key)
        if number is None:
            return None
        run = self.runs[bisect_right(self.runs, number, key=_first) - 1]
        return run, number - run.first


_first = attrgetter("first")


def forget_predecessor(queue: list[Any]) -> None:
    """Begin the engine's `queue` of events with one that has routers forget every block of it. An engine that ended
    without a word, at the address that this one has now, left them believing in its blocks."""
    queue.insert(0, AllBlocksCleared())


class KVEvents:
    """Turns tiers' changes into vLLM's events. Used on the engine's thread; `events` may be written to on any."""

    def __init__(
        self,
        block_tokens: int,
        kind: str | None = None,
        known_max: int = _KNOWN_MAX,
        tiers: Collection[str] = TIERS,
    ) -> None:
        """`kind`: vLLM's name of the KV cache group's kind. `tiers` are announced. What blocks hold is remembered of at
        most `known_max` or the latest request's, and of the last half as many at least."""
        self.events = Events()
        self._tiers = frozenset(tiers)
        self._block_tokens = block_tokens
        self._kind = kind
        self._known_max = known_max
        self._count = 0  # blocks ever remembered
        self._recent, self._older = _Known(), _Known()  # forgotten as a whole: one by one would take longer
        self._told: deque[Passage] = deque()  # of blocks that are announced next; written to on any thread
        self._kept, self._kept_before = _Known(), _Known()  # those that were told of for the last two `take`s
        self._note: Callable[[Passage], None] = lambda passage: None
        self._isolated: set[Scope] = set()  # as many as classes, adapters and tenants of isolated classes make
        self._cleared = False

    def announcer(self, hierarchy: Hierarchy) -> Announcer:
        """One that writes down what requests hold from now on, and announces what an earlier engine's did."""
        announcer = Announcer(hierarchy, self._told.append, lambda: bool(self._told))
        self._note = announcer.note
        return announcer

    def remember(
        self, request: Any, chain: Sequence[BlockKey], start: int, *, lasting: int = 0, isolated: bool = False
    ) -> None:
        """Remember what the request's blocks from `start` on hold. Only its `lasting` first may lie on a disk.
        `isolated`: in a scope of an isolated class."""
        if isolated:
            self._isolated.add(scope_of_key(chain[start]))
            return
        known = self._recent.numbers
        start = next((depth for depth in range(start, len(chain)) if chain[depth] not in known), len(chain))
        if start == len(chain):
            return
        size, lora = self._block_tokens, getattr(request, "lora_request", None)
        keys = list(chain[start:])
        if 2 * (self._recent.blocks + len(keys)) > self._known_max and self._recent.runs:
            longest = 2 * self._recent.blocks > self._known_max
            self._recent, self._older = _Known(), _Known() if longest else self._recent
        passage = Passage(
            keys,
            chain[start - 1][-HASH_BYTES:] if start else None,
            request.all_token_ids[start * size : len(chain) * size],
            extra_keys_of(request, start, len(chain), size),
            salt_of(request),
            None if lora is None else (lora.lora_int_id, lora.lora_name),
        )
        self._recent.add(_Run(self._count, passage, getattr(request, "session_id", None)))
        self._count += len(keys)
        if lasting > start:
            self._note(passage if lasting >= len(chain) else passage.part(0, lasting - start))

    def clear(self) -> None:
        """The engine has new weights: no block reported until now can be found any more."""
        self.events.take()
        self._told.clear()
        self._recent, self._older = _Known(), _Known()
        self._cleared = True

    def take(self) -> Iterable[Any]:
        """vLLM's events since the last call. Where removals are missing, routers are to forget all blocks of this
        engine: they would send requests to it for ever for blocks that it does not have."""
        if self._cleared:
            self._cleared = False
            yield AllBlocksCleared()
        self._learn()
        for change in self.events.take():
            if change.tier not in self._tiers:
                continue
            if isinstance(change, Lost):
                yield AllBlocksCleared()
                continue
            keys = change.keys
            if self._isolated:
                keys = tuple(key for key in keys if scope_of_key(key) not in self._isolated)
            medium, locality = MEDIA[change.tier]
            where = {"medium": medium, "group_idx": 0, "locality": locality}
            if change.stored:
                yield from self._stored(keys, where)
            elif keys:
                yield _made(BlockRemoved, block_hashes=_names(keys), **where)

    def _learn(self) -> None:
        """Know what was told of. Each passage's blocks are reported before the next one is told of: so they are taken
        by now, or with the next call."""
        if not self._told:
            return
        self._kept, self._kept_before = _Known(), self._kept
        while self._told:
            passage = self._told.popleft()
            self._kept.add(_Run(self._count, passage))
            self._count += len(passage.keys)

    def _stored(self, keys: Sequence[BlockKey], where: Mapping[str, Any]) -> Iterable[Any]:
        """One event per stretch of consecutive blocks of one request."""
        begin = 0
        while begin < len(keys):
            known = (self._recent, self._older, self._kept, self._kept_before)
            found = next((found for some in known if (found := some.find(keys[begin])) is not None), None)
            if found is None:
                begin += 1
                continue
            run, first = found
            passage = run.passage
            count = _equal(keys, begin, passage.keys, first)
            begin, stop = begin + count, first + count
            parent = passage.keys[first - 1][-HASH_BYTES:] if first else passage.parent
            extra_keys = list(passage.extra_keys[first:stop])
            if passage.salt is not None and parent is not None:
                extra_keys[0] = (*(extra_keys[0] or ()), passage.salt)
            lora_id, lora_name = passage.adapter or (None, None)
            yield _made(
                BlockStored,
                block_hashes=run.names(first, stop),
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=passage.tokens_of(first, stop),
                block_size=self._block_tokens,
                extra_keys=extra_keys,
                kv_cache_spec_kind=self._kind,
                lora_id=lora_id,
                lora_name=lora_name,
                session_id=run.session,
                **where,
            )


def _equal(keys: Sequence[BlockKey], begin: int, others: list[BlockKey], first: int) -> int:
    """How many keys are equal one by one, from these places on."""
    count = min(len(keys) - begin, len(others) - first)
    if list(keys[begin : begin + count]) == others[first : first + count]:  # mostly
        return count
    return next(at for at in range(count) if keys[begin + at] != others[first + at])


def _names(keys: Sequence[BlockKey]) -> list[Any]:
    """vLLM's names in events: the hashes or, where its environment asks for numbers, their last eight bytes. It looks
    at the environment for each."""
    if not keys:
        return []
    first = keys[0][-HASH_BYTES:]
    name = maybe_convert_block_hash(first)
    if name is first:
        return [key[-HASH_BYTES:] for key in keys]
    last = KEY_BYTES // _NAME.itemsize - 1
    numbers: list[int] = np.frombuffer(b"".join(keys), _NAME)[last :: last + 1].tolist()
    return numbers if numbers[0] == name else [maybe_convert_block_hash(key[-HASH_BYTES:]) for key in keys]


def _made(kind: Any, **fields: Any) -> Any:
    """An event with those of the fields that this release has."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
