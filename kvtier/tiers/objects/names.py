"""Names of the objects in a bucket.

{prefix}/units/{tenant}/{ns}/{variant}/{hh}/{unit}      a unit, named by its last block; hh = its first two digits
{prefix}/ctl/{ns}/catalogue/…                           deltas merged by time (kvtier.tiers.objects.catalogue)
{prefix}/ctl/{ns}/delta/{µs hex}-{replica hex}          a list of objects written (kvtier.tiers.objects.deltas)
{prefix}/ctl/{ns}/log/{number, 16 digits}               an entry of the purge log (kvtier.tiers.objects.purge_log)
{prefix}/ctl/{ns}/pins/{hash of the name}               a pin (kvtier.tiers.objects.pins)

Tenant, namespace, variant and unit are keyed by the keyring's name key (`Keyring.name`): whoever lists the bucket sees
counts, sizes and times, and can test no guess of a prompt or a salt. Without a keyring the key is one that everybody
knows. A tenant is the first half of a scope, so all that a tenant stored in a namespace has one prefix, whatever
adapters it used. Releases that wrote `{prefix}/{namespace}/…` neither see these objects nor are theirs seen.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kvtier.identity.keys import BlockKey, Scope, scope_of_key, tenant_of
from kvtier.keyring import Keyring

_UNIT = re.compile(r"[0-9a-f]{32}/([0-9a-f]{32})/[0-9a-f]{32}/([0-9a-f]{2})/(?=\2)[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9a-f]{16}")


class ObjectNames:
    """The names of one namespace below `prefix` ("" or without slashes at its ends). Immutable."""

    def __init__(self, prefix: str, namespace: bytes, keyring: Keyring) -> None:
        self.namespace = namespace
        self._keyring = keyring
        self.root = f"{prefix}/" if prefix else ""
        self.units = f"{self.root}units/"
        self._namespace = keyring.name("namespace", namespace)
        control = f"{self.root}ctl/{self._namespace}/"
        self.control = control
        self.merged = f"{control}catalogue/"
        self.deltas = f"{control}delta/"
        self.log = f"{control}log/"
        self.pins = f"{control}pins/"
        self.scope = lru_cache(maxsize=4096)(self._scope)

    def tenant(self, scope: Scope) -> str:
        """Common start of the names of all units of the scope's tenant in this namespace, slash included."""
        return f"{self.units}{self._keyring.name('tenant', tenant_of(scope))}/{self._namespace}/"

    def _scope(self, scope: Scope) -> str:
        """Common start of the names of the scope's units, slash included."""
        return f"{self.tenant(scope)}{self._keyring.name('variant', scope)}/"

    def unit(self, last: BlockKey) -> str:
        """The object whose last block is `last`."""
        digits = self._keyring.name("unit", self.namespace + last, 32)
        return f"{self.scope(scope_of_key(last))}{digits[:2]}/{digits}"

    def fingerprint(self, last: BlockKey) -> int:
        """Eight bytes of the unit's name; `fingerprint_of` finds them in the name."""
        return int(self._keyring.name("unit", self.namespace + last, 32)[:16], 16)

    def is_unit(self, name: str) -> bool:
        """Whether `unit` can have made the name, for some block of this namespace."""
        match = _UNIT.fullmatch(name.removeprefix(self.units)) if name.startswith(self.units) else None
        return match is not None and match[1] == self._namespace

    def behind(self, name: str) -> str:
        """Where a walk over this namespace's units goes on after `name`: units of other namespaces are passed over."""
        tenant, _, rest = name.removeprefix(self.units).partition("/")
        namespace = rest.partition("/")[0]
        if namespace < self._namespace:
            return f"{self.units}{tenant}/{self._namespace}/"
        return name if namespace == self._namespace else f"{self.units}{tenant}0"  # "0" is the character behind "/"

    def pin(self, name: str) -> str:
        """The pin of that name."""
        return f"{self.pins}{self._keyring.name('pin', self.namespace + name.encode())}"

    def entry(self, number: int) -> str:
        """An entry of the purge log."""
        return f"{self.log}{number:016x}"

    def parse_entry(self, name: str) -> int | None:
        """The inverse; None if `entry` cannot have made the name."""
        digits = name.removeprefix(self.log)
        return int(digits, 16) if name.startswith(self.log) and _NUMBER.fullmatch(digits) else None


def fingerprint_of(name: str) -> int:
    """`ObjectNames.fingerprint` by the name of a unit. Pure."""
    return int(name.rpartition("/")[2][:16], 16)
