"""One `put`, step by step: slots are reserved, bytes copied, blocks published and queued for the tiers below."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.manager.manager import Manager
from kvtier.manager.put_guarantee import PutGuarantee
from kvtier.manager.slices import SLICE_BLOCKS
from kvtier.manager.work import Work
from kvtier.retention.ranges import ChainTerms
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.slot import Slot, SlotState, copy_in

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STEP_BYTES = 64 * 1024 * 1024
_COPY_BYTES = 1024 * 1024
"""Copied between two looks at whether the put was cancelled."""


class Put:
    """Blocks `start` … of a chain on their way into the cache.

    `step` until it returns None, waiting in between for the space it asks for, or `finish`; then `accepted` is how many
    of them, from `start` on, are in the cache. A step runs on any thread, one at a time. `cancel` ends a put from any
    other thread.
    """

    def __init__(
        self,
        manager: Manager,
        chain: Sequence[BlockKey],
        buffers: Sequence[Buffer],
        terms: ChainTerms,
        *,
        start: int,
        wait: bool,
        request_id: str,
        work: Work | None = None,
    ) -> None:
        """`work` began when this was asked for (None: now): a purge since then ends the put. Raises InvalidRequest for
        buffers that are not these blocks'."""
        self.accepted = 0
        self._manager, self._demoter = manager, manager.demoter
        self._work = work or manager.hierarchy.begin()
        self._request_id = request_id
        self._chain = chain
        self._start = start
        self._terms = terms
        self._wait = wait
        self._buffers = self._checked(buffers)
        self._step_blocks = min(SLICE_BLOCKS, max(1, _STEP_BYTES // manager.host.block_bytes))
        self._depth_of = {key: depth for depth, key in enumerate(chain)}
        self._reached = start  # blocks before it are stored, or were there already
        self._alone: set[int] = set()  # depths in no lower tier: our own tail must not evict them
        self._below = 0  # blocks before it were seen in the lower tier: nobody need ask for them again
        self._waiting: set[int] = set()  # depths of `_alone` that found no space in a queue
        self._tried: set[int] = set()  # depths that a queue has accepted
        self._passed: set[int] = set()  # depths that another caller was filling when they were reached
        self._guarantee: PutGuarantee | None = None  # from the first step on
        self._ended = False
        self._turn = threading.Lock()  # held by the step that runs
        self._cancelled = False
        self._filling: list[Hold] = []  # slots that this put copies into; this and the next under the manager's lock
        self._abandoned: list[Hold] = []  # slots of those that `cancel` gave up

    def _checked(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        expected, wanted = len(self._chain) - self._start, self._manager.host.block_bytes
        if len(buffers) != expected:
            raise InvalidRequest(f"{len(buffers)} buffers for {expected} keys (from key {self._start} on)")
        views = []
        for index, buffer in enumerate(buffers):
            try:
                view = memoryview(buffer).cast("B")
            except (TypeError, ValueError, BufferError) as error:
                raise InvalidRequest(f"buffers[{index}] is not contiguous bytes-like: {error}") from None
            if view.nbytes != wanted:
                raise InvalidRequest(f"buffers[{index}] has {view.nbytes} bytes, a block has {wanted}")
            views.append(view)
        return views

    def step(self) -> int | None:
        """Copy the blocks that find space. None: done. A version of the space signal: wait for a later one."""
        with self._turn:
            version = None if self._ended else self._advance()
        if self._cancelled:
            self._end_cancelled()
        return version

    def finish(self) -> int:
        """The time to wait is over: store the blocks that still find space. Returns `accepted`."""
        self._wait = False
        self.step()
        return self.accepted

    def cancel(self) -> None:
        """Publish nothing from now on, though a step may still be copying: the caller's buffers are its own again when
        this returns. Does not wait."""
        with self._manager.lock:
            self._cancelled = True
            for slot, generation in self._filling:
                if slot.generation == generation and slot.state is SlotState.FILLING:
                    self._manager.host.abort(slot, generation, in_flight=True)
                    self._abandoned.append((slot, generation))
        self._end_cancelled()

    def _end_cancelled(self) -> None:
        """End a cancelled put, unless a step runs: that does it."""
        if self._turn.acquire(blocking=False):
            try:
                if not self._ended:
                    self._end()
            finally:
                self._turn.release()

    def _advance(self) -> int | None:
        manager, chain = self._manager, self._chain
        if self._guarantee is None:  # it has not begun
            protection, given = manager.protection, self._terms
            self._guarantee = PutGuarantee(manager.hierarchy, protection, chain, self._start, given, self._work)
            self._terms = self._guarantee.terms
            manager.finish_put(chain)  # before its blocks are stored: else the policy gives each a rank of its own
            version = manager.space.version
        else:
            self._take_up_passed()
            self._below = self._demoter.below(chain, self._below, self._reached)
            self._waiting = self._demoter.demote_rest(chain, self._reached, self._tried, self._below)
            # In this order: a block that comes down after `alone` was asked for wakes the wait. Pins that
            # `demote_rest` itself undid do not.
            version = manager.space.version
            self._alone = self._demoter.alone(chain, self._reached, self._below)
        while not self._cancelled and not self._purged():
            wait = self._wait and manager.hierarchy.healthy()
            stop = min(len(chain), self._reached + self._step_blocks)
            if wait:
                stop = min(stop, self._reached + self._demoter.space())
            if self._reached < stop:
                self._reached = self._store(self._reached, stop, wait)
                if self._reached == stop < len(chain):
                    continue
            if wait and not self._purged() and (self._reached < len(chain) or self._waiting):
                return version
            break
        if self._take_up_passed():
            self._waiting = self._demoter.demote_rest(chain, self._reached, self._tried, self._below)
        self._end()
        return None

    def _take_up_passed(self) -> bool:
        """Of the blocks that were passed over, those that are there now are given these terms, too, and those that were
        given up are stored. Whether there were any."""
        passed, self._passed = sorted(self._passed), set()
        before = len(passed)
        while passed and not self._cancelled and not self._purged():
            first, most = passed[0], self._step_blocks
            count = next((at for at, depth in enumerate(passed[:most]) if depth != first + at), len(passed[:most]))
            reached = self._store(first, first + count, self._wait and self._manager.hierarchy.healthy())
            if reached < first + count:
                break
            del passed[:count]
        self._passed.update(passed)
        return len(self._passed) < before

    def _purged(self) -> bool:
        with self._manager.lock:
            return self._work.lost(self._chain[:1])

    def _store(self, first: int, stop: int, wait: bool) -> int:
        """Store blocks first … stop-1, as far as there is space; returns the depth reached."""
        manager, chain = self._manager, self._chain
        self._alone |= self._demoter.alone(chain, stop, first)
        slots, reached = manager.reserve(
            chain, first, stop, self._terms, self._claims, insist=wait, work=self._work, passed=self._passed
        )
        stored = {slot.index for slot in slots}
        generations = [slot.generation for slot in slots]
        try:
            self._copy(slots, generations)
            refused = manager.commit(chain, slots, generations, again=True, request_id=self._request_id)
        finally:
            with manager.lock:
                self._filling = []
                for slot, generation in self._abandoned:
                    manager.host.unpin(slot, generation)
                self._abandoned = []
        self._alone.update(refused)
        self._waiting.update(depth for depth in refused if depth < self._demoter.demotable(len(chain)))
        self._tried |= stored.difference(refused)
        return reached

    def _claims(self, key: BlockKey) -> bool:
        """Whether this put's own tail must not evict a block."""
        return self._depth_of.get(key, -1) in self._alone

    def _copy(self, slots: Sequence[Slot], generations: Sequence[int]) -> None:
        """Fill slots from the buffers, until the put is cancelled."""
        with self._manager.lock:
            if self._cancelled:
                for slot, generation in zip(slots, generations, strict=True):
                    self._manager.host.abort(slot, generation)
                return
            self._filling = list(zip(slots, generations, strict=True))
        try:
            for slot in slots:
                source, begin = self._buffers[slot.index - self._start], 0
                for piece in slot.pieces:
                    for offset in range(0, piece.nbytes, _COPY_BYTES):
                        if self._cancelled:
                            return
                        part = piece[offset : offset + _COPY_BYTES]
                        copy_in((part,), source[begin : begin + part.nbytes])
                        begin += part.nbytes
        except BaseException:
            self._manager.abort(slots, generations)
            raise

    def _end(self) -> None:
        """Count the blocks that are there, and end the guarantees of the rest."""
        self._ended = True
        if self._guarantee is None:
            return
        manager, chain = self._manager, self._chain
        manager.finish_put(chain, dropped=len(self._waiting) if manager.lower else 0)
        self._guarantee.end(self._start if self._cancelled else self._reached)
        self.accepted = min([self._reached, *self._passed]) - self._start
