"""Blocks asked for, served by tier and missed by reason: in total and per request.

Only blocks truly read and stored count, in blocks inside and in tokens to the outside. Bounded: requests by id,
reasons by block, classes by the configuration's names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.identity.keys import BlockKey
from kvtier.identity.recent_keys import RecentKeys
from kvtier.manager.divergence import RecentChains, tails_of
from kvtier.manager.lease import Lease
from kvtier.tiers.protocol import Miss

REQUESTS_MAX = 1024
LOSSES_MAX = 1 << 16
_REASONS = tuple(Miss)
_PLACES = {miss: place for place, miss in enumerate(_REASONS)}
OTHER = "other"
"""The class under which those are counted that the configuration does not name."""


@dataclass(slots=True)
class Account:
    """One request, in tokens: `asked` = Σ `read` by tier + Σ `missed` by reason; `written` by retention class.

    `diverged_at`: the first block in which its chain differs from that of the request it was compared with, or where
    the shorter of the two ends; None: not compared, or that request is not remembered.
    """

    asked: int = 0
    read: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    diverged_at: int | None = None


class Losses:
    """Why blocks are not here any more, or never were: of the latest LOSSES_MAX blocks or so. No lock of its own."""

    def __init__(self, blocks_max: int = LOSSES_MAX) -> None:
        self._why = RecentKeys(blocks_max)

    def record(self, key: BlockKey, why: Miss) -> None:
        """`key` was lost, for this reason."""
        self._why.put(key, _PLACES[why])

    def why(self, key: BlockKey) -> Miss:
        """The latest reason that is remembered; ABSENT for none."""
        place = self._why.get(key)
        return Miss.ABSENT if place is None else _REASONS[place]

    def __len__(self) -> int:
        return len(self._why)


class Accounts:
    """Totals since the start, and the latest requests by id. Under the manager's lock.

    In blocks: lookups = Σ hits by tier + Σ misses by reason.
    """

    def __init__(self, block_tokens: int, classes: Iterable[str]) -> None:
        self._block_tokens = block_tokens
        self.name_classes(classes)
        self.lookups = 0
        self.hits: Counter[str] = Counter()
        self.misses: Counter[Miss] = Counter()
        self.accepted = 0
        self.written: Counter[str] = Counter()
        self.losses = Losses()
        self.hints: Counter[str] = Counter()
        """Actions of requests' hints, by outcome."""
        self.sessions: Callable[[], Mapping[str, int]] = dict
        """How many sessions an engine's connector remembers, and their blocks. Thread-safe."""
        self._requests: OrderedDict[str, Account] = OrderedDict()
        self._chains = RecentChains(REQUESTS_MAX)

    def name_classes(self, classes: Iterable[str]) -> None:
        """Those that written tokens are counted by; the rest are OTHER."""
        self._classes = frozenset(classes)

    def record_read(
        self,
        lease: Lease,
        asked: int,
        request_id: str = "",
        compared_with: str = "",
        chain: Sequence[BlockKey] = (),
        found: Mapping[str, int] | None = None,
        tails: bytes | None = None,
    ) -> Account:
        """Count a request for `asked` blocks that was served by `lease`; under its id, if it has one. `chain`: all its
        blocks, for comparing it with `compared_with`, an earlier request, and later ones with it. `found`, the lease's
        blocks by tier, and `tails` of the chain are made before the lock is taken, where a chain may be long."""
        self.lookups += asked
        found = Counter(lease.tiers) if found is None else found
        self.hits.update(found)
        missed = asked - len(lease)
        why = lease.miss or Miss.ABSENT
        if missed > 0:
            self.misses[why] += missed
        account = self.of(request_id) if request_id else Account()
        account.asked += asked * self._block_tokens
        for tier, blocks in found.items():
            account.read[tier] = account.read.get(tier, 0) + blocks * self._block_tokens
        if missed > 0:
            account.missed[str(why)] = account.missed.get(str(why), 0) + missed * self._block_tokens
        if compared_with:
            account.diverged_at = self._chains.divergence(compared_with, chain)
        if request_id:
            self._chains.record_tails(request_id, tails_of(chain) if tails is None else tails)
        return account

    def record_written(self, kinds: Sequence[str], request_id: str = "") -> None:
        """Count blocks that were stored, by the name of their retention class."""
        for kind in set(kinds):
            blocks = kinds.count(kind)
            name = kind if kind in self._classes else OTHER
            self.accepted += blocks
            self.written[name] += blocks
            if request_id:
                account = self.of(request_id)
                account.written[name] = account.written.get(name, 0) + blocks * self._block_tokens

    def of(self, request_id: str) -> Account:
        """A request's account, begun if there is none; the longest untouched one is forgotten past REQUESTS_MAX."""
        account = self._requests.setdefault(request_id, Account())
        self._requests.move_to_end(request_id)
        if len(self._requests) > REQUESTS_MAX:
            self._requests.popitem(last=False)
        return account

    def known(self, request_id: str) -> Account | None:
        """A request's account, if it is remembered."""
        return self._requests.get(request_id)

    def stats(self) -> dict[str, int | Mapping[str, int]]:
        """Totals for `stats()["requests"]`."""
        tokens = self._block_tokens
        return {
            "lookups": self.lookups,
            "hits": self.hits.total(),
            "misses": {str(miss): blocks for miss, blocks in self.misses.items()},
            "accepted": self.accepted,
            "read_tokens": {tier: blocks * tokens for tier, blocks in self.hits.items()},
            "missed_tokens": {str(miss): blocks * tokens for miss, blocks in self.misses.items()},
            "hints": dict(self.hints),
            "sessions": self.sessions(),
            "written_tokens": {kind: blocks * tokens for kind, blocks in self.written.items()},
        }
