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
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.clock import Clock, SystemClock
from kvtier.config import Config
from kvtier.errors import ClosedError, InvalidRequest, KVTierError
from kvtier.face import Face, config_of, file_of, keys_of_tokens
from kvtier.hit import Getting, Hit
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.identity.namespace import Namespace
from kvtier.manager.closing import CANCELLED_S, Flushed
from kvtier.manager.slices import aside
from kvtier.manager.work import Work
from kvtier.named_pins import AsyncNamedPins, NamedPins
from kvtier.retention.ranges import Wanted
from kvtier.spans import in_trace
from kvtier.supervisor import LoopOnThread
from kvtier.tiers.protocol import Tier
from kvtier.times import Mono

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_S = 600.0
"""More than the manager takes for any call without a deadline of the caller's."""

_GRACE_S = 1.0
"""How late a busy loop may answer."""


class AsyncCache(Face):
    """The async face: every call runs on the event loop that `aopen` was entered on, and raises ClosedError on another
    one. See `Cache` for the verbs."""

    @property
    def pins(self) -> AsyncNamedPins:
        """Prefixes that stay until a time, by name."""
        return self._pins

    async def __aenter__(self) -> AsyncCache:
        await self._start()
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
        self.manager.hierarchy.require_loop()
        deadline, work = self._deadline(timeout, self.config.deadlines.put), self.manager.hierarchy.begin()
        asked = partial(self._put, start=start, wait=wait, request_id=request_id, work=work)
        put = await aside(len(keys), lambda: asked(keys, buffers, retention))
        try:
            while (version := await asyncio.to_thread(put.step)) is not None:
                if not await self.manager.space.wait(deadline, version):
                    return await asyncio.to_thread(put.finish)
        except BaseException:
            put.cancel()
            raise
        return put.accepted

    async def match(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        self.manager.hierarchy.require_loop()
        deadline = self._deadline(timeout, self.config.deadlines.lookup)
        chain = await aside(len(keys), lambda: self._chain(keys, distinct=False))
        return await self.manager.match(chain, deadline)

    def get(
        self,
        keys: Sequence[bytes],
        timeout: float | None = None,
        *,
        start: int = 0,
        request_id: str = "",
        compared_with: str = "",
    ) -> Getting:
        deadline = self._deadline(timeout, self.config.deadlines.get)
        return Getting(self._get_checked(keys, deadline, start, request_id, compared_with))

    async def _get_checked(
        self, keys: Sequence[bytes], deadline: Mono, start: int, request_id: str, compared_with: str
    ) -> Hit:
        self.manager.hierarchy.require_loop()
        chain = await aside(len(keys), lambda: self._wanted(keys, start, request_id, compared_with))
        return await self._get(chain, deadline, start, request_id, compared_with)

    async def _get(
        self, chain: list[BlockKey], deadline: Mono, start: int, request_id: str = "", compared_with: str = ""
    ) -> Hit:
        lease = await self.manager.promote(chain, deadline, start)
        try:
            return await aside(len(chain), lambda: self._hit(lease, chain, start, request_id, compared_with))
        except BaseException:
            lease.release()
            raise

    async def prewarm(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        self.manager.hierarchy.require_loop()
        deadline = self._deadline(timeout, self.config.deadlines.get)
        chain = await aside(len(keys), lambda: self._chain(keys, distinct=False))
        return await self.manager.prewarm(chain, deadline)

    async def flush(self, timeout: float | None = None) -> Flushed:
        self.manager.hierarchy.require_loop()
        self._chain((), distinct=False)
        return await self.manager.flush(self._deadline(timeout, self.config.deadlines.flush))

    async def evict(self, tier: str) -> int:
        self.manager.hierarchy.require_loop()
        self._chain((), distinct=False)
        return await self.manager.evict(self._tier_name(tier))

    async def purge(self, salt: str | bytes | None = None) -> int:
        self.manager.hierarchy.require_loop()
        self._chain((), distinct=False)
        return await self._purge(salt)

    async def close(self) -> Flushed:
        """See `Cache.close`. Cancelled, it skips the flush, closes everything within a second, and then raises.
        On another loop than the cache's it raises ClosedError, and the cache stays open; unless that loop has ended:
        then it flushes nothing, and gives memory and tiers back."""
        if not self.manager.hierarchy.stranded:
            self.manager.hierarchy.require_loop()
        return await self.manager.close()


class Cache(Face):
    """The sync face. Thread-safe. Errors are the caller's mistakes only; a sick tier is a miss."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        clock: Clock,
        lower: Sequence[Tier] | None = None,
        near: Sequence[Collection[int]] = (),
        computes: bool = False,
    ) -> None:
        super().__init__(config, namespace, clock, lower, near, computes)
        self._loop = LoopOnThread("kvtier")
        self._closing = threading.Lock()
        self._closed = threading.Event()
        try:
            self._loop.run(self._start())
        except BaseException:
            self._loop.end(_GRACE_S)
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
        work: Work | None = None,
    ) -> int:
        """Store blocks; returns how many of them, from `start` on, are in the cache now.

        `keys` name a chain from its first block; `buffers` are those of keys[start:], bytes-like of block_bytes each,
        copied before this returns. `retention` is a class of the configuration, or `(start, stop, class)` per range of
        the request's tokens. With `wait`, waits for space in the queues to the lower tiers until `timeout` seconds
        (deadlines.put); without, blocks that find no space stay in G2 only, or are refused, newest and deepest first.
        The account of `request_id` counts stored blocks. `work` began when the bytes were ready (None: now): a purge
        since then ends the put. Raises InvalidRequest, and then nothing was stored.
        """
        self._require_process()
        work = work or self.manager.hierarchy.begin()
        put = self._put(keys, buffers, retention, start=start, wait=wait, request_id=request_id, work=work)
        deadline = self._deadline(timeout, self.config.deadlines.put)
        try:
            while (version := put.step()) is not None:
                if not self._run(self.manager.space.wait(deadline, version), deadline, lambda: False):
                    return put.finish()
        except BaseException:
            put.cancel()
            raise
        return put.accepted

    def match(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        """Longest prefix of `keys` resident in any mix of tiers. Moves nothing and pins nothing. Waits for lower
        tiers at most `timeout` seconds (deadlines.lookup)."""
        chain = self._chain(keys, distinct=False)
        resident = self.manager.prefix(chain)
        if resident == len(chain) or not self.manager.lower:
            return resident
        deadline = self._deadline(timeout, self.config.deadlines.lookup)
        return self._run(self.manager.match(chain, deadline), deadline, lambda: resident)

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

        With `start`, the caller has the blocks before it already: the hit begins with block `start`. The account of
        `request_id` counts blocks read, and tells where its chain left that of `compared_with`, an earlier request.
        """
        chain = self._wanted(keys, start, request_id, compared_with)
        deadline = self._deadline(timeout, self.config.deadlines.get)
        lease = self.manager.pin(chain, start)
        if len(lease) < len(chain) - start and self.manager.lower:
            lease.release()
            promoting = self.manager.promote(chain, deadline, start, referenced=True)
            lease = self._run(promoting, deadline, lambda: self.manager.pin(chain, start))
        return self._hit(lease, chain, start, request_id, compared_with)

    def prewarm(self, keys: Sequence[bytes], timeout: float | None = None) -> int:
        """Bring the blocks of `keys` that any tier has into RAM by `timeout` seconds (deadlines.get), for a request to
        come. Returns how many leading blocks are there now."""
        chain = self._chain(keys, distinct=False)
        deadline = self._deadline(timeout, self.config.deadlines.get)
        return self._run(self.manager.prewarm(chain, deadline), deadline, lambda: self.manager.prefix(chain))

    def flush(self, timeout: float | None = None) -> Flushed:
        """Wait until all blocks put are durable as deep as their terms allow, at most `timeout` s (deadlines.flush)."""
        self._chain((), distinct=False)
        deadline = self._deadline(timeout, self.config.deadlines.flush)
        return self._run(self.manager.flush(deadline), deadline, self.manager.flushed)

    def evict(self, tier: str) -> int:
        """Drop this namespace's copies from one tier ("g2", "g3", "g4"); returns how many blocks went."""
        self._chain((), distinct=False)
        return self._run(self.manager.evict(self._tier_name(tier)))

    def purge(self, salt: str | bytes | None = None) -> int:
        """Drop all blocks of a salt (None: of requests without one), whatever adapters and classes they were made with,
        from every tier and replica, for good."""
        self._chain((), distinct=False)
        return self._run(self._purge(salt))

    def close(self) -> Flushed:
        """Flush, then close every tier, within deadlines.close. Calls of other threads return, or raise ClosedError.
        Idempotent; returns when the cache is closed, whoever closes it. Interrupted, as by Ctrl-C, it skips the flush,
        closes everything within a second, and then raises. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return Flushed({}, 0, 0)
        limit_s = self.config.deadlines.close
        if not self._closing.acquire(blocking=False):
            self._closed.wait(limit_s + 4 * _GRACE_S)
            return Flushed({}, 0, 0)
        try:
            return self._run(self.manager.close(), self._clock.monotonic() + limit_s, self.manager.flushed)
        except BaseException:
            with contextlib.suppress(ClosedError, TimeoutError):
                self._loop.run(self.manager.close(), CANCELLED_S + _GRACE_S)  # waits for the one that was cut short
            raise
        finally:
            self._loop.end(_GRACE_S)
            self._closed.set()

    def submit(
        self, work: Coroutine[Any, Any, T], trace: Mapping[str, str] | None = None
    ) -> concurrent.futures.Future[T]:
        """Run a coroutine of `manager` on the cache's event loop, without waiting for it: for connectors, whose engine
        thread must not wait. The future is the caller's; cancelling it cancels the work. `trace`: the request's headers
        of the W3C trace context, in whose trace its spans are. Raises ClosedError."""
        self._require_process(work)
        return in_trace(trace, self._loop.submit, work)

    def _require_process(self, work: Coroutine[Any, Any, object] | None = None) -> None:
        """`Face._require_process`; `work` is not begun there."""
        try:
            super()._require_process()
        except ClosedError:
            if work is not None:
                work.close()
            raise

    def _run(
        self, work: Coroutine[Any, Any, T], deadline: Mono | None = None, late: Callable[[], T] | None = None
    ) -> T:
        """Await `work` on the loop. Where the loop itself does not answer by the deadline, `late()` is the answer."""
        self._require_process(work)
        left_s = _LONGEST_S if deadline is None else max(0.0, deadline - self._clock.monotonic())
        try:
            return self._loop.run(work, left_s + _GRACE_S)
        except TimeoutError:
            if late is None:
                raise
            return late()


def chain_hashes(
    tokens: Any, namespace: Namespace, salt: str | bytes | None = None, *, secret: bytes = b""
) -> list[bytes]:
    """One opaque key (scope ‖ hash) per full block of `tokens`, head first; a partial last block has none.

    `tokens`: integers, as a sequence, array('I') or NumPy array. Keys of different salts share nothing. Where the
    configuration sets a scope secret, use `Cache.chain_hashes`, which applies it. Pure.
    """
    return keys_of_tokens(tokens, namespace, scope_of(salt, secret=secret))


def open(
    config: Config | str | Path,
    namespace: Namespace,
    *,
    clock: Clock | None = None,
    tiers: Sequence[Tier] | None = None,
    near: Sequence[Collection[int]] = (),
    computes: bool = False,
) -> Cache:
    """A cache of `namespace`'s blocks over the tiers of `config`, which may be the path of a YAML file; close it, or
    use it in a `with`.

    Attaches to the G3 and G4 that earlier processes left. `tiers` replaces the configured lower tiers (tests, third
    parties); the cache opens and closes them. `near`: per rank, the CPUs beside its GPU, whose NUMA node gets its part
    of G2. `computes`: a model computes in this process; G3 then works in one of its own. Raises ConfigError, or
    FormatError for a directory that is not ours.
    """
    cache = Cache(config_of(config), namespace, clock or SystemClock(), tiers, near, computes)
    cache.source = file_of(config)
    return cache


def aopen(
    config: Config | str | Path,
    namespace: Namespace,
    *,
    clock: Clock | None = None,
    tiers: Sequence[Tier] | None = None,
) -> AsyncCache:
    """Like `open`, for `async with`."""
    cache = AsyncCache(config_of(config), namespace, clock or SystemClock(), tiers)
    cache.source = file_of(config)
    return cache


def reload_on_sighup(cache: Cache, path: str | Path) -> None:
    """Have SIGHUP call `cache.reload(path)`, on a thread of its own: the cache's lock may be held when the signal
    comes. A mistake in the file is logged, and changes nothing. Replaces the signal's handler. Raises InvalidRequest on
    another thread than the main one, which alone may set handlers."""

    file = Path(path).absolute()

    def reload() -> None:
        try:
            cache.reload(file)
        except KVTierError as wrong:
            log.error("configuration not reloaded: %s", wrong)
        except Exception:
            log.exception("configuration not reloaded")

    def start(_number: int, _frame: object) -> None:
        try:
            threading.Thread(target=reload, name="kvtier-reload", daemon=True).start()
        except RuntimeError as wrong:  # no thread to be had: what the main thread does goes on
            log.error("configuration not reloaded: %s", wrong)

    if threading.current_thread() is not threading.main_thread():
        raise InvalidRequest("reload_on_sighup: call it on the main thread; signal handlers can be set nowhere else")
    signal.signal(signal.SIGHUP, start)
