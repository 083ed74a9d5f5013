"""Which blocks the sessions of an engine's requests have: conversations and agents that pause and go on.

A session is a name that its sender gives, of one scope: nobody names another tenant's. Its requests form branches: one
that goes on where an earlier one ended takes its place. Bounded: sessions, branches of each, blocks in all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.identity.keys import BlockKey, Scope, tenant_of

SESSIONS_MAX = 4096
BRANCHES_MAX = 8
BLOCKS_MAX = 1 << 20
TENANT_SHARE = 0.125
"""A tenant that has more than this of the sessions or blocks loses its own first: nobody's flood forgets another's."""


Branches = Sequence[Sequence[BlockKey]]
"""Chains of one scope, the one that was used last first."""


def united(branches: Branches) -> list[BlockKey]:
    """Every block of the branches once, parents first. Pure; costs copies and O(branches² · log blocks)."""
    blocks = list[BlockKey]()
    for place, branch in enumerate(branches):
        # A key commits to all before it: what a branch has in common with others is a head of it.
        blocks += branch[max((_agreed(branch, other) for other in branches[:place]), default=0) :]
    return blocks


_Name = tuple[Scope, str]


@dataclass(slots=True)
class _Tenant:
    """The sessions of one tenant, that which rested longest first, and their blocks."""

    names: OrderedDict[_Name, None] = field(default_factory=OrderedDict)
    blocks: int = 0


class Sessions:
    """The chains of the latest sessions. Not thread-safe; never blocks."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, blocks_max: int = BLOCKS_MAX) -> None:
        self._sessions_max = sessions_max
        self._blocks_max = blocks_max
        self._blocks = 0
        self._of: OrderedDict[_Name, list[tuple[BlockKey, ...]]] = OrderedDict()
        self._tenants: dict[Scope, _Tenant] = {}

    def record(self, scope: Scope, name: str, chain: Sequence[BlockKey]) -> list[BlockKey]:
        """A request of the session had these blocks. Returns those that only a branch had which ended: the one that
        rested longest, where there are more than BRANCHES_MAX."""
        if not name or not chain:
            return []
        branches = self._of.setdefault((scope, name), [])
        self._of.move_to_end((scope, name))
        tenant = self._tenants.setdefault(tenant_of(scope), _Tenant())
        tenant.names[scope, name] = None
        tenant.names.move_to_end((scope, name))
        chain = tuple(chain)
        before = sum(map(len, branches))
        branches[:] = [branch for branch in branches if branch[-1] not in chain[len(branch) - 1 : len(branch)]]
        if not any(len(branch) > len(chain) and branch[len(chain) - 1] == chain[-1] for branch in branches):
            branches.append(chain)
        ended = branches.pop(0) if len(branches) > BRANCHES_MAX else ()
        more = sum(map(len, branches)) - before
        self._blocks += more
        tenant.blocks += more
        while len(self._of) > self._sessions_max or (self._blocks > self._blocks_max and len(self._of) > 1):
            self.forget(*next(iter(tenant.names if self._is_large(tenant) else self._of)))
        return list(ended[max((_agreed(ended, branch) for branch in branches), default=0) :])

    def latest(self, scope: Scope, name: str) -> tuple[BlockKey, ...]:
        """The chain of the branch that was used last; empty for an unknown session."""
        branches = self._of.get((scope, name))
        return branches[-1] if branches else ()

    def branches(self, scope: Scope, name: str) -> Branches:
        """The branches of the session; none for an unknown one. O(branches)."""
        return tuple(reversed(self._of.get((scope, name), ())))

    def blocks(self, scope: Scope, name: str) -> list[BlockKey]:
        """Every block of the session, parents first, each once, those of the branch that was used last first."""
        return united(self.branches(scope, name))

    def forget(self, scope: Scope, name: str) -> None:
        """The session is over. Idempotent."""
        tenant, blocks = self._tenants.get(tenant_of(scope)), sum(map(len, self._of.pop((scope, name), ())))
        self._blocks -= blocks
        if tenant is not None:
            tenant.blocks -= blocks
            tenant.names.pop((scope, name), None)
            if not tenant.names:
                del self._tenants[tenant_of(scope)]

    def _is_large(self, tenant: _Tenant) -> bool:
        sessions, blocks = TENANT_SHARE * self._sessions_max, TENANT_SHARE * self._blocks_max
        return len(tenant.names) > sessions or tenant.blocks > blocks

    def counts(self) -> dict[str, int]:
        """How many there are, and their blocks; blocks of two branches count twice. Thread-safe."""
        return {"sessions": len(self._of), "blocks": self._blocks}

    def __len__(self) -> int:
        return len(self._of)


def _agreed(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """How many leading blocks two chains have in common: a key commits to all before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if one[middle] == other[middle] else (low, middle)
    return low
