"""Data keys of tenants: one key encrypts all blocks of a tenant, below RAM and in the bucket.

A key store holds them wrapped by the keyring, outside the places where the blocks lie. To destroy a key there makes
every copy of the tenant's blocks unreadable: who has read it asks for it again after KEY_CACHE_S at the latest, and
after RECENT_S before anything more is encrypted with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from kvtier.clock import Clock
from kvtier.encryption import DataKey
from kvtier.errors import CorruptError, KeyUnavailable, TierError
from kvtier.identity.keys import Scope, tenant_of
from kvtier.keyring import DATA_KEY_BYTES, Keyring, UnknownKey
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono

T = TypeVar("T")

_asking: dict[Any, Future[Any]] = {}  # by (verb, scope)
_queued: deque[Any] = deque()  # of those, the ones that no thread has begun
_asking_lock = threading.Lock()

log = logging.getLogger(__name__)

KEY_CACHE_S = 60.0
"""A key is used for so long after it was read, and then asked for again."""
RECENT_S = 5.0
"""The same for what is encrypted with it: nobody can read that once the key is destroyed."""
ABSENT_S = 5.0
"""For so long nobody asks again for a key that there is not, or that cannot be read."""
KEYS_MAX = 65536
ASKING_MAX = 16
"""Calls that wait for a store at once."""

WRITE_S = 5.0
"""The longest wait for a tenant's key to encrypt with."""
READ_S = 0.5
"""The same to decrypt with, less than a patient read (`kvtier.tiers.guard`): that a store of keys does not answer must
not count against the tier. Its answer is there for the next read."""

QUEUED_MAX = 1024
"""Calls that wait until one of those ends; of more, the answer is that there was none in time."""


class WrappedKey(NamedTuple):
    """A data key as a store has it. `created`: seconds since the epoch, part of what is authenticated."""

    created: float
    wrapped: bytes


class KeyStore(Protocol):
    """Wrapped keys by name. Verbs block, raise TierError, and may be called on any thread."""

    def read(self, name: str) -> WrappedKey | None:
        """The key of that name; None if there is none. Raises CorruptError for what is no key."""

    def create(self, name: str, key: WrappedKey) -> WrappedKey:
        """Store the key unless there is one. Returns the one that is there now, durably."""

    def replace(self, name: str, change: Callable[[WrappedKey], WrappedKey]) -> bool:
        """Change a key that is there; whether it was."""

    def destroy(self, name: str) -> bool:
        """Remove the key with every copy in this store, durably; whether there was one."""

    def names(self) -> Iterator[str]:
        """Of all keys."""


class DataKeys(Protocol):
    """The keys that a tier encrypts with. Thread-safe."""

    def peek(self, scope: Scope) -> DataKey | Miss:
        """As `find`; LATE where that would have to ask a store. Never waits."""

    def recent(self, scope: Scope) -> DataKey | None:
        """The key of the scope's tenant, where it was read RECENT_S ago at most. Never waits."""

    def find(self, scope: Scope) -> DataKey | Miss:
        """The key of the scope's tenant; NO_KEY if there is none, or none that can be read. May wait for a store."""

    def obtain(self, scope: Scope) -> DataKey:
        """`recent`, or as the store has it now, made if there is none. May wait for a store. Raises TierError."""


class StoredKeys:
    """`DataKeys` out of a key store, unwrapped by a keyring and remembered for KEY_CACHE_S."""

    def __init__(self, store: KeyStore, keyring: Keyring, clock: Clock) -> None:
        self._store = store
        self._keyring = keyring
        self._clock = clock
        self._known: dict[Scope, tuple[Mono, DataKey | Miss]] = {}  # by tenant; until when; the oldest first
        self._lock = threading.Lock()  # not held while the store is asked: one key that hangs is one tenant's

    def peek(self, scope: Scope) -> DataKey | Miss:
        until, known = self._known.get(tenant_of(scope), (Mono("-inf"), Miss.LATE))
        return known if self._clock.monotonic() < until else Miss.LATE

    def recent(self, scope: Scope) -> DataKey | None:
        until, known = self._known.get(tenant_of(scope), (Mono("-inf"), Miss.LATE))
        fresh = self._clock.monotonic() < until - KEY_CACHE_S + RECENT_S
        return known if fresh and isinstance(known, DataKey) else None

    def find(self, scope: Scope) -> DataKey | Miss:
        known = self.peek(scope)
        if known is not Miss.LATE:
            return known
        asked = self._clock.monotonic()
        try:
            found = self._store.read(self.name_of(scope))
            key = Miss.NO_KEY if found is None else self._unwrap(scope, found)
        except (TierError, CorruptError, UnknownKey) as error:
            log.warning("a tenant's data key cannot be read, so its encrypted blocks are misses: %s", error)
            key = Miss.NO_KEY
        return self._remember(scope, key, asked)

    def obtain(self, scope: Scope) -> DataKey:
        known = self.recent(scope)
        if known is not None:
            return known
        asked, name = self._clock.monotonic(), self.name_of(scope)
        try:
            found = self._store.read(name)
            if found is None:
                created = float(self._clock.wall())
                wrapped = self._keyring.wrap(secrets.token_bytes(DATA_KEY_BYTES), _context(name, created))
                found = self._store.create(name, WrappedKey(created, wrapped))
            key = self._unwrap(scope, found)
        except (CorruptError, UnknownKey) as error:
            raise KeyUnavailable("keys", "obtain", f"a tenant's data key cannot be read: {error}") from error
        self._remember(scope, key, asked)
        return key

    def name_of(self, scope: Scope) -> str:
        """The name of a tenant's key: nobody without the keyring can test a guess of the tenant by it. Pure."""
        return self._keyring.name("data-key", tenant_of(scope))

    @property
    def store(self) -> KeyStore:
        """Where the wrapped keys lie."""
        return self._store

    def rewrap(self, name: str) -> bool:
        """Wrap the key by the keyring's active key; whether that was another one before. Raises TierError,
        CorruptError or UnknownKey."""
        changed = False

        def change(old: WrappedKey) -> WrappedKey:
            nonlocal changed
            if wrapping_key_of(old) == self._keyring.active.id:
                return old
            changed = True
            context = _context(name, old.created)
            return WrappedKey(old.created, self._keyring.wrap(self._keyring.unwrap(old.wrapped, context), context))

        return self._store.replace(name, change) and changed

    def unwraps(self, name: str, found: WrappedKey) -> bool:
        """Whether the keyring can unwrap a key of the store. Pure."""
        try:
            self._keyring.unwrap(found.wrapped, _context(name, found.created))
        except (CorruptError, UnknownKey):
            return False
        return True

    def _unwrap(self, scope: Scope, found: WrappedKey) -> DataKey:
        context = _context(self.name_of(scope), found.created)
        return DataKey(self._keyring.unwrap(found.wrapped, context), found.created)

    def _remember(self, scope: Scope, key: DataKey | Miss, asked: Mono) -> DataKey | Miss:
        """Returns what is known now. `asked`: when the store was asked, at the latest."""
        with self._lock:
            known = self.peek(scope)
            if isinstance(known, DataKey) and not isinstance(key, DataKey):
                return known  # made by another call, since this one found none
            self._known.pop(tenant_of(scope), None)
            while self._known and (len(self._known) >= KEYS_MAX or self._known[next(iter(self._known))][0] < asked):
                del self._known[next(iter(self._known))]
            lasts_s = KEY_CACHE_S if isinstance(key, DataKey) else ABSENT_S
            self._known[tenant_of(scope)] = Mono(asked + lasts_s), key
            return key


async def load(keys: DataKeys, scopes: Collection[Scope], timeout_s: float = math.inf) -> dict[Scope, DataKey | Miss]:
    """The keys of these scopes' tenants to decrypt with. NO_KEY where a store has to be asked and does not answer in
    READ_S, or in half of the time that is left, so that the caller has an answer in time."""
    known = {scope: keys.peek(scope) for scope in scopes}
    asked = {scope: _ask(keys.find, scope) for scope, key in known.items() if key is Miss.LATE}
    known |= await _answers(asked, min(READ_S, timeout_s / 2))
    return {scope: Miss.NO_KEY if key is Miss.LATE else key for scope, key in known.items()}


async def obtain(keys: DataKeys, scopes: Collection[Scope], timeout_s: float = math.inf) -> dict[Scope, DataKey]:
    """The same to encrypt with, made where there is none, in WRITE_S at most. Raises KeyUnavailable."""
    known = {scope: key for scope in scopes if (key := keys.recent(scope)) is not None}
    asked = {scope: _ask(keys.obtain, scope) for scope in scopes if scope not in known}
    try:
        known |= await _answers(asked, min(WRITE_S, timeout_s))
    except KeyUnavailable:
        raise
    except TierError as error:
        raise KeyUnavailable("keys", "obtain", str(error)) from error
    if len(known) < len(scopes):
        raise KeyUnavailable("keys", "obtain", "the store of data keys does not answer")
    return known


async def _answers(asked: Mapping[Scope, Future[T] | None], timeout_s: float) -> dict[Scope, T]:
    """Those that come in time. Raises what the others raised."""
    waiting = {scope: asyncio.wrap_future(one) for scope, one in asked.items() if one is not None}
    if waiting:
        done, _ = await asyncio.wait(map(asyncio.shield, waiting.values()), timeout=timeout_s)
        for one in done:
            one.exception()  # marks it as retrieved: the one that is raised below may be another
    return {scope: one.result() for scope, one in waiting.items() if one.done()}


def _ask(verb: Callable[[Scope], T], scope: Scope) -> Future[T] | None:
    """A call that may wait for a store, on a thread that nobody has to wait for. The same call is made once at a time,
    and behind ASKING_MAX others when one of them ends. None if QUEUED_MAX wait for that already."""
    question = verb, scope
    with _asking_lock:
        if question in _asking:
            return _asking[question]
        if len(_asking) >= ASKING_MAX + QUEUED_MAX:
            return None
        answer: Future[T] = Future()
        _asking[question] = answer
        if len(_asking) - len(_queued) > ASKING_MAX:
            _queued.append(question)
            return answer
    try:
        threading.Thread(target=_answer, args=(question,), name="kvtier-keys", daemon=True).start()
    except RuntimeError:  # no thread can be started
        with _asking_lock:
            del _asking[question]
        return None
    return answer


def _answer(question: Any) -> None:
    """Make this call, and then those that are queued."""
    while question is not None:
        verb, scope = question
        result, failure = None, None
        try:
            result = verb(scope)
        except Exception as error:
            failure = error
        with _asking_lock:
            answer = _asking.pop(question)
            question = _queued.popleft() if _queued else None
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(result)


def wrapping_key_of(key: WrappedKey) -> bytes:
    """The id of the keyring's key that wraps it. Pure."""
    return key.wrapped[:8]


def _context(name: str, created: float) -> bytes:
    return f"{name} {created!r}".encode("ascii")
