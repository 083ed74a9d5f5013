"""kvtier as a byte-level cache over G2 … G4: `open` (sync) and `aopen` (async), two thin faces of one manager.

    keys = kvtier.chain_hashes(tokens, namespace)
    with kvtier.open(config, namespace) as cache:
        cache.put(keys, buffers)
        with cache.get(keys) as hit:
            hit.blocks, hit.tiers

A list of keys is a chain from the first block of a prompt on. The async face runs the manager on the caller's event
loop; the sync face runs it on a thread of its own and only goes there when G2 cannot answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Collection, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier import hashing
from kvtier.accounts import Account
from kvtier.arena import Arena
from kvtier.block import BlockKey, Scope, check_keys, scope_of
from kvtier.clock import Clock, SystemClock
from kvtier.config import Config
from kvtier.errors import ClosedError, ConfigError, InvalidRequest
from kvtier.expiry import TrustedClock
from kvtier.lease import Lease
from kvtier.manager import Flushed, Manager, Settings
from kvtier.namespace import Namespace
from kvtier.pinning import AsyncNamedPins, NamedPins
from kvtier.policy import make_policy
from kvtier.ranges import ChainTerms, RequestTerms, Wanted, request_terms
from kvtier.terms import Lifetime
from kvtier.tier import Miss, Tier
from kvtier.tiers.host import HostTier, Slot

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_PUT_STEP_BYTES = 64 * 1024 * 1024
_TIER_NAMES = ("g2", "g3", "g4")


class Hit:
    """The prefix that `get` found. A context manager: its blocks are valid inside the `with` and not after it.

    `blocks[i]` is a read-only view of block i's bytes, which lie in `slots[i]`; `tiers[i]` names the tier it was in,
    `lives[i]` its terms; `miss` says why the prefix is not longer (None: all keys were served). `account` is the
    request's, in tokens.
    """

    def __init__(self, lease: Lease, account: Account) -> None:
        self._lease = lease
        self.account = account
        self.tiers: list[str] = lease.tiers
        self.slots: list[Slot] = lease.slots
        self.lives: list[Lifetime] = [slot.life for slot in lease.slots]
        self.miss: Miss | None = lease.miss
        self.blocks: list[memoryview] = [_view(slot) for slot in lease.slots]

    def __len__(self) -> int:
        return len(self.tiers)

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """End the validity of `blocks`. Idempotent."""
        for view in self.blocks:
            try:
                view.release()
            except BufferError:
                pass  # the caller still exports it, to numpy say: those bytes may change from now on
        self.blocks = []
        self._lease.release()


def _view(slot: Slot) -> memoryview:
    if len(slot.pieces) == 1:
        return slot.pieces[0].toreadonly()
    return memoryview(b"".join(slot.pieces))  # several ranks: gathered into a copy


class _Store:
    """One `put`, step by step. Each `next()` of `steps` copies what there is room for; a yield means: wait for
    room that appears after the yielded count."""

    def __init__(
        self, manager: Manager, chain: Sequence[BlockKey], start: int, buffers: Sequence[Buffer], request_id: str
    ) -> None:
        self._manager = manager
        self._request_id = request_id
        self._chain = chain
        self._start = start
        self._buffers = self._checked(buffers)
        self._step = max(1, _PUT_STEP_BYTES // manager.host.block_bytes)

    def _checked(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        expected, wanted = len(self._chain) - self._start, self._manager.host.block_bytes
        if len(buffers) != expected:
            raise InvalidRequest(f"{len(buffers)} buffers for {expected} keys (from key {self._start} on)")
        views = []
        for index, buffer in enumerate(buffers):
            try:
                view = memoryview(buffer).cast("B")
            except TypeError as error:
                raise InvalidRequest(f"buffers[{index}] is not contiguous bytes-like: {error}") from None
            if view.nbytes != wanted:
                raise InvalidRequest(f"buffers[{index}] has {view.nbytes} bytes, a block has {wanted}")
            views.append(view)
        return views

    def steps(self, terms: ChainTerms, wait: bool) -> Generator[int, None, int]:
        """Returns how many blocks, from `start` on, are in the cache now."""
        manager, chain, reached = self._manager, self._chain, self._start
        alone: set[int] = set()  # depths in no lower tier's hands: not to be evicted by our own tail
        waiting: set[int] = set()  # those of them that found no room in a queue
        tried: set[int] = set()
        depth_of = {key: index for index, key in enumerate(chain)}

        def keep(key: BlockKey) -> bool:
            return depth_of.get(key, -1) in alone

        if terms.guarantees:
            manager.promise(chain, reached, terms)  # refused: before anything is stored
        manager.settle(chain)  # before room is made for it: else the policy gives each block a rank of its own
        seen = manager.room_told
        while True:
            wait = wait and manager.demoter.well()
            stop = min(len(chain), reached + self._step)
            if wait:
                stop = min(stop, reached + manager.demoter.room())
            if reached < stop:
                slots, reached = manager.reserve(chain, reached, stop, terms, keep, insist=wait)
                self._fill(slots)
                generations = [slot.generation for slot in slots]
                refused = manager.commit(chain, slots, generations, again=True, request_id=self._request_id)
                alone.update(refused)
                waiting.update(index for index in refused if index < manager.demoter.sinkable(len(chain)))
                tried.update({slot.index for slot in slots}.difference(refused))
                if reached == stop < len(chain):
                    continue
            if not wait or (reached == len(chain) and not waiting):
                break
            yield seen
            waiting = manager.demoter.demote_rest(chain, reached, tried)
            # In this order: what comes down after `alone` was asked for wakes the wait. What `demote_rest` itself
            # gave back does not.
            seen = manager.room_told
            alone.clear()
            alone.update(manager.demoter.alone(chain, reached))
        manager.settle(chain, dropped=len(waiting) if manager.lower else 0)
        if terms.guarantees:
            manager.forgive(chain[reached:])
        return reached - self._start

    def _fill(self, slots: Sequence[Slot]) -> None:
        generations = [slot.generation for slot in slots]
        try:
            for slot in slots:
                fill(slot, self._buffers[slot.index - self._start])
        except BaseException:
            self._manager.abort(slots, generations)
            raise


def fill(slot: Slot, source: memoryview) -> None:
    """Copy a block's bytes into a FILLING slot, rank after rank. Other threads run meanwhile: NumPy's copy lets go of
    the interpreter lock, a memoryview's does not."""
    import numpy as np

    whole, start = np.frombuffer(source, np.uint8), 0
    for piece in slot.pieces:
        np.copyto(np.frombuffer(piece, np.uint8), whole[start : start + len(piece)])
        start += len(piece)


class _Face:
    """What both faces share: configuration, checks of arguments, and the pid that opened them."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        clock: Clock,
        lower: Sequence[Tier] | None = None,
        near: Sequence[Collection[int]] = (),
    ) -> None:
        self.config = config
        self.namespace = namespace
        self._clock = clock
        self._classes = config.terms()
        self._secret = config.scope_secret
        self._pid = os.getpid()
        self.manager = build(config, namespace, clock, lower, near)
        self._pins = AsyncNamedPins(
            self.manager.keeper, lambda keys: self._chain(keys, distinct=True), namespace.block_tokens
        )

    def _chain(self, keys: Sequence[bytes], *, distinct: bool) -> list[BlockKey]:
        if os.getpid() != self._pid:
            raise ClosedError("this cache was opened in another process; open one of your own after a fork")
        if self.manager.closed:
            raise ClosedError("the cache is closed")
        check_keys(keys, distinct=distinct)
        return [BlockKey(key) for key in keys]

    def _wanted(self, keys: Sequence[bytes], start: int) -> list[BlockKey]:
        chain = self._chain(keys, distinct=False)
        if not 0 <= start <= len(chain):
            raise InvalidRequest(f"start must lie in 0 … {len(chain)}, got {start}")
        return chain

    def _store(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], retention: Wanted, start: int, request_id: str
    ) -> tuple[_Store, ChainTerms]:
        chain = self._chain(keys, distinct=True)
        if not 0 <= start <= len(chain):
            raise InvalidRequest(f"start must lie in 0 … {len(chain)}, got {start}")
        terms = ChainTerms(self._terms(retention), self.namespace.block_tokens)
        return _Store(self.manager, chain, start, buffers, request_id), terms

    def _terms(self, retention: Wanted) -> RequestTerms:
        return request_terms(retention, self._classes, self.config.retention.default)

    def _deadline(self, timeout: float | None, default: float) -> float:
        if timeout is not None and not timeout >= 0:
            raise InvalidRequest(f"timeout must be at least 0 seconds, got {timeout}")
        return self._clock.monotonic() + (default if timeout is None else timeout)

    def chain_hashes(self, tokens: Any, salt: str | bytes | None = None, retention: Wanted = None) -> list[bytes]:
        """Keys of `tokens` in this cache's namespace, under its scope secret; in a scope of its own if `retention`
        names an isolated class, so that other classes neither find its blocks nor carry them to disk. Pure."""
        scope = scope_of(salt, isolated=self._terms(retention).isolated, secret=self._secret)
        return _keys(tokens, self.namespace, scope)

    async def _purge(self, salt: str | bytes | None) -> int:
        # Keys may have been made without the secret (`kvtier.chain_hashes`), or for an isolated class.
        classes = ["", *(terms.name for terms in self._classes if terms.isolate)]
        scopes = {scope_of(salt, isolated=name, secret=secret) for name in classes for secret in (self._secret, b"")}
        return sum([await self.manager.purge(scope) for scope in scopes])

    def _tier_name(self, tier: str) -> str:
        if tier not in _TIER_NAMES:
            raise InvalidRequest(f"{tier!r} is not a tier; this cache has {', '.join(_TIER_NAMES)}")
        return tier

    def account(self, request_id: str) -> Account | None:
        """In tokens, what a request asked for, read by tier, missed by reason and wrote by retention class. None: it is
        not among the latest thousand."""
        return self.manager.account(request_id)

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of a prompt in this time: what takes longer to load is not loaded."""
        if not (tokens > 0 and 0 <= seconds < float("inf")):
            raise InvalidRequest(f"tokens and seconds must be positive, got {tokens} and {seconds}")
        self.manager.computed(tokens / self.namespace.block_tokens, seconds)

    def stats(self) -> dict[str, Any]:
        """Per tier: blocks, bytes, capacity, hits, misses by reason, evictions, latency; and `requests`."""
        return self.manager.stats()

    def check(self) -> None:
        """Assert the invariants of every tier. Reads whole indexes: for tests and after incidents."""
        self.manager.check()


class AsyncCache(_Face):
    """The async face: every call runs on the event loop that `aopen` was entered on. See `Cache` for the verbs."""

    @property
    def pins(self) -> AsyncNamedPins:
        """Prefixes that stay until a time, by name."""
        return self._pins

    async def __aenter__(self) -> AsyncCache:
        await self.manager.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        retention: Wanted = None,
        wait: bool = True,
        *,
        start: int = 0,
        timeout: float | None = None,
        request_id: str = "",
    ) -> int:
        store, terms = self._store(keys, buffers, retention, start, request_id)
        deadline = self._deadline(timeout, self.config.deadlines.put)
        steps = store.steps(terms, wait)
        while True:
            try:
                seen = await asyncio.to_thread(_step, steps)
            except _Finished as finished:
                return finished.accepted
            if not await self.manager.wait_room(deadline, seen):
                return await asyncio.to_thread(_finish, store, terms)

    async def match(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        chain = self._chain(keys, distinct=False)
        return await self.manager.match(chain, self._deadline(timeout, self.config.deadlines.lookup))

    def get(
        self,
        keys: Sequence[bytes],
        timeout: float | None = None,
        *,
        start: int = 0,
        request_id: str = "",
        compared_with: str = "",
    ) -> _Getting:
        chain = self._wanted(keys, start)
        deadline = self._deadline(timeout, self.config.deadlines.get)
        return _Getting(self._get(chain, deadline, start, request_id, compared_with))

    async def _get(
        self, chain: list[BlockKey], deadline: float, start: int, request_id: str = "", compared_with: str = ""
    ) -> Hit:
        lease = await self.manager.promote(chain, deadline, start)
        return Hit(lease, self.manager.count(lease, len(chain) - start, request_id, compared_with, chain))

    async def prewarm(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        chain = self._chain(keys, distinct=False)
        return await self.manager.prewarm(chain, self._deadline(timeout, self.config.deadlines.get))

    async def flush(self, timeout: float | None = None) -> Flushed:
        self._chain((), distinct=False)
        return await self.manager.flush(self._deadline(timeout, self.config.deadlines.flush))

    async def evict(self, tier: str) -> int:
        self._chain((), distinct=False)
        return await self.manager.evict(self._tier_name(tier))

    async def purge(self, salt: str | bytes | None = None) -> int:
        self._chain((), distinct=False)
        return await self._purge(salt)

    async def close(self) -> Flushed:
        return await self.manager.close()


class _Getting:
    """`await cache.get(…)` gives a Hit; `async with cache.get(…) as hit` releases it too."""

    def __init__(self, work: Coroutine[Any, Any, Hit]) -> None:
        self._work = work
        self._hit: Hit | None = None

    def __await__(self) -> Generator[Any, None, Hit]:
        return self._work.__await__()

    async def __aenter__(self) -> Hit:
        self._hit = await self._work
        return self._hit

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._hit is not None:
            self._hit.release()


class Cache(_Face):
    """The sync face. Thread-safe. Errors are the caller's mistakes only; a sick tier is a miss."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        clock: Clock,
        lower: Sequence[Tier] | None = None,
        near: Sequence[Collection[int]] = (),
    ) -> None:
        super().__init__(config, namespace, clock, lower, near)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier", daemon=True)
        self._thread.start()
        try:
            self._run(self.manager.start())
        except BaseException:
            self._stop()
            raise

    @property
    def pins(self) -> NamedPins:
        """Prefixes that stay until a time, by name."""
        return NamedPins(self._pins, self._run)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        retention: Wanted = None,
        wait: bool = True,
        *,
        start: int = 0,
        timeout: float | None = None,
        request_id: str = "",
    ) -> int:
        """Store blocks; returns how many of them, from `start` on, are in the cache now.

        `keys` name a chain from its first block; `buffers` are those of keys[start:], bytes-like of block_bytes each,
        copied before this returns. `retention` is a class of the configuration, or `(start, stop, class)` per range of
        the request's tokens. With `wait`, waits for room in the queues to the lower tiers until `timeout` seconds
        (deadlines.put); without, what finds no room stays in G2 only, or is
        refused, newest and deepest first. What is taken in is booked to the account of `request_id`. Raises
        InvalidRequest, and then nothing was stored.
        """
        store, terms = self._store(keys, buffers, retention, start, request_id)
        deadline = self._deadline(timeout, self.config.deadlines.put)
        steps = store.steps(terms, wait)
        while True:
            try:
                seen = _step(steps)
            except _Finished as finished:
                return finished.accepted
            if not self._run(self.manager.wait_room(deadline, seen)):
                return _finish(store, terms)

    def match(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        """Longest prefix of `keys` resident in any mix of tiers. Moves nothing, promises nothing. Waits for lower
        tiers at most `timeout` seconds (deadlines.lookup)."""
        chain = self._chain(keys, distinct=False)
        resident = self.manager.prefix(chain)
        if resident == len(chain) or not self.manager.lower:
            return resident
        return self._run(self.manager.match(chain, self._deadline(timeout, self.config.deadlines.lookup)))

    def get(
        self,
        keys: Sequence[bytes],
        timeout: float | None = None,
        *,
        start: int = 0,
        request_id: str = "",
        compared_with: str = "",
    ) -> Hit:
        """The longest prefix that is there by `timeout` seconds (deadlines.get), promoted into G2 and verified.

        With `start`, the caller has the blocks before it already: the hit begins with block `start`. What was read is
        booked to the account of `request_id`, which tells where its chain left that of `compared_with`, an earlier one.
        """
        chain = self._wanted(keys, start)
        deadline = self._deadline(timeout, self.config.deadlines.get)
        lease = self.manager.pin(chain, start)
        if len(lease) < len(chain) - start and self.manager.lower:
            lease.release()
            lease = self._run(self.manager.promote(chain, deadline, start, referenced=True))
        return Hit(lease, self.manager.count(lease, len(chain) - start, request_id, compared_with, chain))

    def prewarm(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        """Bring what is in any tier of `keys` into RAM by `timeout` seconds (deadlines.get), for a request to come.
        Returns how many leading blocks are there now."""
        chain = self._chain(keys, distinct=False)
        return self._run(self.manager.prewarm(chain, self._deadline(timeout, self.config.deadlines.get)))

    def flush(self, timeout: float | None = None) -> Flushed:
        """Wait until what was put is durable as deep as its terms allow, at most `timeout` s (deadlines.flush)."""
        self._chain((), distinct=False)
        return self._run(self.manager.flush(self._deadline(timeout, self.config.deadlines.flush)))

    def evict(self, tier: str) -> int:
        """Drop this namespace's copies from one tier ("g2", "g3", "g4"); returns how many blocks went."""
        self._chain((), distinct=False)
        return self._run(self.manager.evict(self._tier_name(tier)))

    def purge(self, salt: str | bytes | None = None) -> int:
        """Drop all blocks of a salt (None: of requests without one) from every tier and replica, for good."""
        self._chain((), distinct=False)
        return self._run(self._purge(salt))

    def close(self) -> Flushed:
        """Flush, then let go of everything. Idempotent. In a forked child it does nothing."""
        if os.getpid() != self._pid or self.manager.closed:
            return Flushed({}, 0, 0)
        try:
            return self._run(self.manager.close())
        finally:
            self._stop()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine of `manager` on the cache's event loop, without waiting for it: for connectors, whose engine
        thread must not wait. The future is the caller's; cancelling it cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Finished(Exception):
    """A `_Store` is done. (A StopIteration cannot cross a thread's future.)"""

    def __init__(self, accepted: int) -> None:
        super().__init__(accepted)
        self.accepted = accepted


def _step(steps: Generator[int, None, int]) -> int:
    try:
        return next(steps)
    except StopIteration as stop:
        raise _Finished(stop.value) from None


def _finish(store: _Store, terms: ChainTerms) -> int:
    """After the deadline: store what still finds room, without waiting."""
    try:
        _step(store.steps(terms, wait=False))
    except _Finished as finished:
        return finished.accepted
    raise AssertionError("a store that does not wait must end")


def chain_hashes(
    tokens: Any, namespace: Namespace, salt: str | bytes | None = None, *, secret: bytes = b""
) -> list[bytes]:
    """One opaque key (scope ‖ hash) per full block of `tokens`, head first; a partial last block has none.

    `tokens`: integers, as a sequence, array('I') or NumPy array. Keys of different salts share nothing. Where the
    configuration sets a scope secret, use `Cache.chain_hashes`, which applies it. Pure.
    """
    return _keys(tokens, namespace, scope_of(salt, secret=secret))


def _keys(tokens: Any, namespace: Namespace, scope: Scope) -> list[bytes]:
    root = hashing.chain_root(namespace.digest, scope)
    return [scope + digest for digest in hashing.chain_hashes(root, tokens, namespace.block_tokens)]


def open(
    config: Config,
    namespace: Namespace,
    *,
    clock: Clock | None = None,
    tiers: Sequence[Tier] | None = None,
    near: Sequence[Collection[int]] = (),
) -> Cache:
    """A cache of `namespace`'s blocks over the tiers of `config`; close it, or use it in a `with`.

    Attaches to what earlier processes left in G3 and G4. `tiers` replaces the configured lower tiers (tests, third
    parties); the cache opens and closes them. `near`: per rank, the CPUs beside its GPU, whose NUMA node gets its part
    of G2. Raises ConfigError, or FormatError for a directory that is not ours.
    """
    return Cache(_config(config), namespace, clock or SystemClock(), tiers, near)


def aopen(
    config: Config, namespace: Namespace, *, clock: Clock | None = None, tiers: Sequence[Tier] | None = None
) -> AsyncCache:
    """Like `open`, for `async with`."""
    return AsyncCache(_config(config), namespace, clock or SystemClock(), tiers)


def _config(config: object) -> Config:
    if not isinstance(config, Config):
        raise ConfigError(f"config must be a kvtier.Config, got {type(config).__name__}; use Config.load or .parse")
    return config


def build(
    config: Config,
    namespace: Namespace,
    clock: Clock,
    lower: Sequence[Tier] | None = None,
    near: Sequence[Collection[int]] = (),
) -> Manager:
    """A closed manager for this configuration. Opens nothing. Raises ConfigError."""
    tiers, clock = config.tiers, TrustedClock.around(clock)
    arena = Arena(namespace.block_bytes, namespace.ranks_served, tiers.g2.capacity, near)
    g3 = tiers.g3
    settings = Settings(
        lookup_s=config.deadlines.lookup,
        reserved=config.retention.reserved,
        store_threshold=config.offload.store_threshold,
        min_prefix_blocks=-(-config.offload.min_prefix // namespace.block_tokens),
        block_tokens=namespace.block_tokens,
        classes=tuple(terms.name for terms in config.terms()),
        close_s=config.deadlines.close,
        write_rate=float(g3.write_rate or 0) if g3 else 0.0,
        write_budget_per_day=float((g3.write_budget or 0) * g3.capacity) if g3 else 0.0,
    )
    if lower is None:
        lower = lower_tiers(config, namespace, clock)
    host = HostTier(arena, make_policy(config.policy, arena.slots), config.retention.quota or 0.0)
    return Manager(host, lower, clock, settings)


def lower_tiers(config: Config, namespace: Namespace, clock: Clock) -> list[Tier]:
    """G3 and G4 as configured, closed, nearest first. Imports only what is used."""
    out: list[Tier] = []
    g3, g4 = config.tiers.g3, config.tiers.g4
    if g3 is not None:
        from kvtier.tiers.disk import DiskTier

        out.append(DiskTier(g3.path, g3.capacity, namespace, clock=clock))
    if g4 is not None:
        from kvtier.tiers.bucket_url import Limits
        from kvtier.tiers.objects import ObjectTier

        out.append(
            ObjectTier(
                g4.url,
                namespace,
                clock=clock,
                options=g4.options,
                client=g4.client,
                stride=None if g4.stride == "auto" else g4.stride,
                limits=Limits(
                    concurrency=g4.concurrency,
                    read_rate=float(g4.read_rate or 0),
                    write_rate=float(g4.write_rate or 0),
                ),
            )
        )
    return out
