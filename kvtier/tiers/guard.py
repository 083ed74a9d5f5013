"""The guard that every lower tier gets, whatever it is made of: `Metered(Guarded(tier))`, see `kvtier.tiers.meter`.

`Guarded` is the one place where a tier's exceptions become misses, and where its breaker is fed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError, ConfigError, FormatError, InvalidRequest, KeyUnavailable, TierError, TierTimeout
from kvtier.events import Notify
from kvtier.identity.keys import BlockKey, Scope
from kvtier.supervisor import Service, abandon, soon
from kvtier.tiers.answers import ANSWERS, RESULTS, STORED, answers_to, at_once, tier_error
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target, Tier, Usage
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)
T = TypeVar("T")

ABANDONED_MAX = 64
"""Calls that were given up and have not ended. Past this a lookup is LATE at once: their number is bounded."""

_CHANGING = frozenset({"open", "pin", "unpin", "retain", "release_retained", "write_note"})
"""Verbs whose order counts: none of them begins while one that was given up may still take effect."""


class Wrapper:
    """Passes every verb on. Subclasses override what they change."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.depth = inner.depth
        self.block_bytes = inner.block_bytes
        self.stride = inner.stride

    async def open(self) -> None:
        await self.inner.open()

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return self.inner.peek(chain, wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        return await self.inner.lookup(chain, wanted, deadline)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        return await self.inner.read(chain, targets, deadline)

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        return await self.inner.write(blocks, deadline)

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        self.inner.touch(keys, wall_s)

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        return await self.inner.evict(keys)

    async def drop_made_after(self, time: Wall) -> int:
        """See `kvtier.tiers.protocol.Retaining`; a tier that cannot drops nothing."""
        work = getattr(self.inner, "drop_made_after", None)
        return int(await work(time)) if work is not None else 0

    async def purge(self, scope: Scope, before: Wall) -> int:
        return await self.inner.purge(scope, before)

    async def tombstones(self) -> Mapping[Scope, Wall]:
        return await self.inner.tombstones()

    async def flush(self, deadline: Mono) -> None:
        await self.inner.flush(deadline)

    def subscribe(self, notify: Notify | None) -> None:
        """Call `notify` for blocks that the tier drops by itself, as far as it can say."""
        subscribe = getattr(self.inner, "subscribe", None)
        if subscribe is not None:
            subscribe(notify)

    def usage(self) -> Usage:
        return self.inner.usage()

    def counters(self) -> Mapping[str, int]:
        """Counters of this kind of tier alone, by name; most have none."""
        counters: Callable[[], Mapping[str, int]] = getattr(self.inner, "counters", dict)
        return counters()

    def restarts(self) -> Mapping[str, int]:
        """How often background work of the tier's own failed and was restarted, by task; see
        `kvtier.tiers.protocol.Supervised`."""
        restarts: Callable[[], Mapping[str, int]] = getattr(self.inner, "restarts", dict)
        return restarts()

    def report_to(self, service: Service) -> None:
        """Tell `service` when background work of the tier's own keeps failing."""
        report_to = getattr(self.inner, "report_to", None)
        if report_to is not None:
            report_to(service)

    def check(self) -> None:
        self.inner.check()

    async def close(self, deadline: Mono) -> None:
        await self.inner.close(deadline)


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """How long a guard waits for the verbs to which no caller gives a deadline, and from when on it blames a tier that
    is late: a caller that gives it less is impatient."""

    lookup_s: float = 0.1
    read_s: float = 1.0

    open_s: float = 60.0  # a large store that was not closed is repaired first
    call_s: float = 10.0  # one commit or a few small objects: longer is a device or network that does not answer
    purge_s: float = 60.0  # lists and deletes a scope; it takes effect earlier, and is tried again
    evict_s: float = 300.0  # may delete a million objects


class Guarded(Wrapper):
    """Turns a sick tier into misses. Raises nothing but ClosedError and cancellation, except from `open`, `check`,
    `purge`, `empty`, `tombstones`, `drop_made_after` and `ask`, whose failures their caller must see: TierError
    whatever the tier raised. Where `usage`, `counters` and `restarts` fail they tell what they told last. No verb but
    `read` and `write` outlasts its deadline, even if the tier does not heed cancellation.

    A call that got no answer in time is *given up*: cancelled, and left to end when it does. Its answer is dropped.
    """

    def __init__(self, inner: Tier, clock: Clock, breaker: Breaker | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self.breaker = breaker or Breaker(clock)
        self.limits = GuardLimits()
        self.unanswered: Counter[str] = Counter()
        """Calls without an answer in time, by verb."""
        self._given_up: dict[asyncio.Future[Any], str] = {}  # calls that have not ended, and their verbs
        self._waiters: set[asyncio.Future[bool]] = set()  # of calls under way; `close` wakes them, with True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._usage = Usage(0, 0)
        self._counters: Mapping[str, int] = {}
        self._restarts: Mapping[str, int] = {}
        self.report_to(_Reports(self))

    async def open(self) -> None:
        """Raises TierError, ConfigError or FormatError. A tier whose opening was given up, or cancelled as it ended, is
        closed when that is over; until then it cannot be opened."""
        self._check_order("open")
        self._loop = asyncio.get_running_loop()
        opening = self._begin("open")
        try:
            await self._answer("open", opening, self.limits.open_s)
            self.breaker.succeeded()
        except BaseException:
            if opening in self._given_up or not (opening.cancelled() or opening.exception()):
                opening.add_done_callback(self._close_late)
            raise

    def _close_late(self, _opening: asyncio.Future[Any]) -> None:
        """Whatever it came to: a thread of it may have opened something all the same."""
        closing = asyncio.ensure_future(self.inner.close(self._clock.monotonic() + self.limits.call_s))
        self._expect("open", closing)

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        with self._absorb("peek"):
            return answers_to(wanted, at_once(self.name, "peek", self.inner.peek, chain, wanted), ANSWERS)
        return [Miss.ERROR] * len(wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        if not self.breaker.allows():
            return [Miss.BREAKER] * len(wanted)
        with self._absorb("lookup"):
            given_s = self._left_s(deadline)
            found: list[Miss | None] = [Miss.LATE] * len(wanted)
            if len(self._given_up) < ABANDONED_MAX:
                looking = self._begin("lookup", chain, wanted, deadline)
                if await self._is_answered("lookup", looking, given_s):
                    with suppress(TimeoutError):
                        found = answers_to(wanted, self._result("lookup", looking), ANSWERS)
            self._judge(found, given_s >= self.limits.lookup_s)
            return found
        return [Miss.ERROR] * len(wanted)

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        """Returns when nothing writes to the targets any more, however late; the breaker hears at the deadline."""
        if not self.breaker.allows():
            return [Miss.BREAKER] * len(targets)
        with self._absorb("read"):
            patient = self._left_s(deadline) >= self.limits.read_s
            results = await self._overdue(self.inner.read(chain, targets, deadline), deadline, patient)
            results = answers_to(targets, results, RESULTS)
            self._judge(results, patient)
            return results
        return [Miss.ERROR] * len(targets)

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        if not self.breaker.allows():
            return [Stored.FAILED] * len(blocks)
        with self._absorb("write"):
            try:
                results = await self._overdue(self.inner.write(blocks, deadline), deadline, True)
            except KeyUnavailable as error:
                log.debug("%s: a block could not be encrypted: %s", self.name, str(error))
                return [Stored.NO_KEY] * len(blocks)
            results = answers_to(blocks, results, STORED)
            if Stored.FAILED in results:
                self.breaker.failed()
            else:
                self.breaker.succeeded()
            return results
        return [Stored.FAILED] * len(blocks)

    def touch(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        with self._absorb("touch"):
            at_once(self.name, "touch", self.inner.touch, keys, wall_s)

    def usage(self) -> Usage:
        self._usage = self._told("usage", super().usage, self._usage)
        return self._usage

    def counters(self) -> Mapping[str, int]:
        self._counters = self._told("counters", super().counters, self._counters)
        return self._counters

    def restarts(self) -> Mapping[str, int]:
        self._restarts = self._told("restarts", super().restarts, self._restarts)
        return self._restarts

    async def evict(self, keys: Sequence[BlockKey] | None) -> int:
        with suppress(TierError):
            seconds = self.limits.evict_s if keys is None else self.limits.call_s
            return int(await self._bounded("evict", seconds, keys))
        return 0

    async def empty(self) -> int:
        """`evict` of all. Raises TierError where it is not done."""
        return int(await self._bounded("evict", self.limits.evict_s, None))

    async def drop_made_after(self, time: Wall) -> int:
        if not hasattr(self.inner, "drop_made_after"):
            return 0
        return int(await self._bounded("drop_made_after", self.limits.purge_s, time))

    async def purge(self, scope: Scope, before: Wall) -> int:
        return int(await self._bounded("purge", self.limits.purge_s, scope, before))

    async def tombstones(self) -> Mapping[Scope, Wall]:
        found: Mapping[Scope, Wall] = await self._bounded("tombstones", self.limits.call_s)
        return found

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """A verb of an optional protocol. Raises TierError, at once while the breaker rests, InvalidRequest or
        ClosedError."""
        if self.breaker.resting:
            raise TierError(self.name, verb, f"out of service: {self.breaker.reason}")
        self._check_order(verb)
        return await self._bounded(verb, self.limits.call_s, *arguments)

    async def flush(self, deadline: Mono) -> None:
        with suppress(TierError):
            await self._bounded("flush", self._left_s(deadline), deadline)

    async def close(self, deadline: Mono) -> None:
        """The tier gets three quarters of the time; calls that are still under way then raise ClosedError."""
        left_s = self._left_s(deadline)
        for last in (self.usage, self.counters, self.restarts):  # which are told from then on
            last()
        try:
            with suppress(TierError):
                await self._bounded("close", left_s, deadline - left_s / 4)
        finally:
            for waiter in self._waiters:
                _wake(waiter, True)

    async def _bounded(self, verb: str, seconds: float, *arguments: Any) -> Any:
        return await self._answer(verb, self._begin(verb, *arguments), seconds)

    def _begin(self, verb: str, *arguments: Any) -> asyncio.Future[Any]:
        """A call of the tier, as a task that may outlast its caller."""
        return asyncio.ensure_future(self._call(verb, *arguments))

    async def _call(self, verb: str, *arguments: Any) -> Any:
        return await getattr(self.inner, verb)(*arguments)

    async def _answer(self, verb: str, call: asyncio.Future[T], seconds: float) -> T:
        """The result of a call, within `seconds`, or TierError. The breaker hears of an error, and of a call given up
        that had time enough."""
        answered = await self._is_answered(verb, call, seconds)
        try:
            if not answered:
                raise TierTimeout(self.name, verb, f"no answer within {seconds:.3g} s")
            return self._result(verb, call)
        except (ClosedError, ConfigError, FormatError, InvalidRequest):
            raise
        except Exception as error:
            if answered or seconds >= self.limits.call_s:
                self._failed(verb, error)
            if isinstance(error, TierError):
                raise
            raise tier_error(self.name, verb, error) from error

    async def _is_answered(self, verb: str, call: asyncio.Future[Any], seconds: float) -> bool:
        """Whether a call ends within `seconds`; if not, or if the caller is cancelled, it is given up. Raises
        ClosedError when the tier is closed meanwhile."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(seconds, _wake, waiter, False)
        call.add_done_callback(lambda _: _wake(waiter, False))
        self._waiters.add(waiter)
        try:
            closed = await waiter
        except asyncio.CancelledError:
            abandon(call)  # it may have ended already, with an exception that nobody asks for now
            raise
        finally:
            timer.cancel()
            self._waiters.discard(waiter)
            if not call.done():
                self._give_up(verb, call)
        if call.done():
            return True
        if closed:
            raise ClosedError(f"{self.name} is closed")
        self.unanswered[verb] += 1
        return False

    def _told(self, verb: str, figures: Callable[[], T], last: T) -> T:
        """The figures, or the last ones where the tier cannot tell, as one that is closed. On any thread."""
        try:
            return at_once(self.name, verb, figures)
        except Exception as error:
            log.debug("figures of a tier: %s: %s", type(error).__name__, error)
            return last

    def _result(self, verb: str, call: asyncio.Future[T]) -> T:
        if call.cancelled():
            raise TierError(self.name, verb, "cancelled by the tier itself")
        if (error := call.exception()) is not None and not isinstance(error, Exception):
            raise tier_error(self.name, verb, error) from error
        return call.result()

    def _give_up(self, verb: str, call: asyncio.Future[Any]) -> None:
        call.cancel()
        self._expect(verb, call)

    def _expect(self, verb: str, call: asyncio.Future[Any]) -> None:
        """Know of a call until it ends, without waiting for it."""
        self._given_up[call] = verb
        call.add_done_callback(lambda ended: self._given_up.pop(ended, None))
        abandon(call)

    def _check_order(self, verb: str) -> None:
        """Raises TierTimeout while a call that was given up may still take effect after this one."""
        late = _CHANGING.intersection(self._given_up.values()) if verb in _CHANGING else ()
        for earlier in late:
            raise TierTimeout(self.name, verb, f"an earlier {earlier} that was given up still runs")

    def soon(self, work: Callable[[], None]) -> None:
        """Run `work` on the loop that the tier was opened on, unless that has ended. Thread-safe."""
        soon(self._loop, work)

    def _left_s(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    async def _overdue(self, work: Awaitable[T], deadline: Mono, patient: bool) -> T:
        """Await `work` to its end; report a failure to the breaker if it outlives a deadline that was patient."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._left_s(deadline) + 0.05)
            if not done and patient:
                self.breaker.failed()
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise TierError(self.name, "call", "cancelled by the tier itself") from None
            task.cancel()
            raise
        except Exception:  # of ours, if the task still runs: it has the caller's memory
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            raise
        except BaseException as error:
            if task.done() and task.exception() is error:
                raise tier_error(self.name, "call", error) from error
            raise

    @contextmanager
    def _absorb(self, verb: str) -> Iterator[None]:
        """Swallow any exception but ClosedError: report it to the breaker, and log the first of a row as a warning."""
        try:
            yield
        except ClosedError:
            raise
        except Exception as error:
            self._failed(verb, error)

    def _failed(self, verb: str, error: Exception) -> None:
        level = logging.DEBUG if self.breaker.errors else logging.WARNING
        self.breaker.failed()
        # Its text: a handler that keeps its records would keep the error's frames, and with them the caller's memory.
        log.log(level, "%s: %s failed: %s: %s", self.name, verb, type(error).__name__, str(error))

    def _judge(self, results: Sequence[object], patient: bool) -> None:
        """Report to the breaker what a lookup or read came to: lateness only if the tier was given time enough."""
        if Miss.ERROR in results or (patient and Miss.LATE in results):
            self.breaker.failed()
        elif Miss.LATE not in results:
            self.breaker.succeeded()


def _wake(waiter: asyncio.Future[bool], closed: bool) -> None:
    if not waiter.done():
        waiter.set_result(closed)


class _Reports:
    """A breaker as the service of a tier's own background, which may run on any thread. The breaker is its loop's: it
    hears of a failure there."""

    def __init__(self, guard: Guarded) -> None:
        self._guard = guard

    def trip(self, reason: str) -> None:
        self._guard.soon(lambda: self._guard.breaker.trip(reason))

    def succeeded(self) -> None:
        self._guard.soon(self._guard.breaker.succeeded)


class OptionalVerbs:
    """The verbs of `Retaining`, `Pinning`, `Notebook` and `Describing` that a tier has, by its guard."""

    def __init__(self, guard: Guarded) -> None:
        self._guard = guard

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._guard.ask, verb)
