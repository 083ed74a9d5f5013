"""Data keys as a G3 worker process has them: those that came with calls, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.encryption import DataKey
from kvtier.errors import TierError
from kvtier.identity.keys import Scope
from kvtier.tiers.data_keys import KEYS_MAX
from kvtier.tiers.disk.worker.protocol import GivenKey
from kvtier.tiers.protocol import Miss


class GivenKeys:
    """A `kvtier.tiers.data_keys.DataKeys`. A key is good for the call that it comes with: the next one brings what is
    true then. Keys of tenants without calls stay until KEYS_MAX others came, and nobody can ask for them."""

    def __init__(self) -> None:
        self._given: dict[Scope, tuple[GivenKey, DataKey | Miss]] = {}

    def give(self, given: Sequence[GivenKey]) -> None:
        """Take the keys of a call."""
        for one in given:
            if self._given.get(one.scope, (None, Miss.NO_KEY))[0] != one:
                self._given.pop(one.scope, None)
                while len(self._given) >= KEYS_MAX:
                    del self._given[next(iter(self._given))]
                self._given[one.scope] = one, DataKey(one.secret, one.created) if one.secret else one.miss

    def peek(self, scope: Scope) -> DataKey | Miss:
        return self._given.get(scope, (None, Miss.NO_KEY))[1]

    find = peek

    def recent(self, scope: Scope) -> DataKey | None:
        key = self.peek(scope)
        return key if isinstance(key, DataKey) else None

    def obtain(self, scope: Scope) -> DataKey:
        key = self.peek(scope)
        if isinstance(key, Miss):
            raise TierError("keys", "obtain", "the call came without its tenant's key")
        return key
