"""Data keys for a tier under test: in memory, of a keyring that everybody may know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from kvtier.clock import Clock
from kvtier.identity.keys import Scope
from kvtier.keyring import Key, Keyring
from kvtier.testing import VirtualClock
from kvtier.tiers.data_keys import StoredKeys, WrappedKey


class MemoryKeys:
    """A `kvtier.tiers.data_keys.KeyStore` in memory. `reads` counts; `error` is raised instead, if set."""

    def __init__(self) -> None:
        self.keys: dict[str, WrappedKey] = {}
        self.reads = 0
        self.error: Exception | None = None

    def read(self, name: str) -> WrappedKey | None:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.keys.get(name)

    def create(self, name: str, key: WrappedKey) -> WrappedKey:
        return self.keys.setdefault(name, key)

    def replace(self, name: str, change: Callable[[WrappedKey], WrappedKey]) -> bool:
        if name in self.keys:
            self.keys[name] = change(self.keys[name])
        return name in self.keys

    def destroy(self, name: str) -> bool:
        return self.keys.pop(name, None) is not None

    def names(self) -> Iterator[str]:
        yield from sorted(self.keys)


class SickKeys(MemoryKeys):
    """A store that has trouble with the key of one tenant: it is damaged, or `hangs` until `goes_on` is set."""

    def __init__(self, tenant: Scope, hangs: bool) -> None:
        super().__init__()
        self.bad = StoredKeys(self, sample_keyring(), VirtualClock()).name_of(tenant)
        self.hangs, self.goes_on = hangs, threading.Event()

    def read(self, name: str) -> WrappedKey | None:
        if name == self.bad:
            if self.hangs:
                self.goes_on.wait(20)
            return WrappedKey(1.0, bytes(100))
        return super().read(name)


def sample_keyring(number: int = 1) -> Keyring:
    """A keyring of one key; another number, another key."""
    return Keyring([Key(bytes([number] * 8), bytes([number] * 32))], bytes([number] * 32))


def sample_keys(clock: Clock | None = None, store: MemoryKeys | None = None, keyring: int = 1) -> StoredKeys:
    """Keys of a store in memory."""
    return StoredKeys(store or MemoryKeys(), sample_keyring(keyring), clock or VirtualClock())
