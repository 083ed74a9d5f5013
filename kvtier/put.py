"""One `put`, step by step: slots are reserved, bytes copied, blocks published and queued for the tiers below."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.manager.manager import Manager
from kvtier.retention.ranges import ChainTerms
from kvtier.tiers.host.slot import Slot, copy_in

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STEP_BYTES = 64 * 1024 * 1024


class Put:
    """Blocks `start` … of a chain on their way into the cache.

    `step` until it returns None, waiting in between for the space it asks for, or `finish`; then `accepted` is how many
    of them, from `start` on, are in the cache. A step runs on any thread, one at a time.
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
    ) -> None:
        """Raises InvalidRequest for buffers that are not these blocks'."""
        self.accepted = 0
        self._manager = manager
        self._request_id = request_id
        self._chain = chain
        self._start = start
        self._terms = terms
        self._buffers = self._checked(buffers)
        self._step_blocks = max(1, _STEP_BYTES // manager.host.block_bytes)
        self._work = self._steps(wait)

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

    def step(self) -> int | None:
        """Copy the blocks that find space. None: done. A version of the space signal: wait for a later one."""
        return next(self._work, None)

    def finish(self) -> int:
        """The time to wait is over: store the blocks that still find space. Returns `accepted`."""
        self._work.close()
        self._work = self._steps(wait=False)
        self.step()
        return self.accepted

    def _steps(self, wait: bool) -> Generator[int, None, None]:
        manager, chain, terms, reached = self._manager, self._chain, self._terms, self._start
        demoter = manager.demoter
        alone: set[int] = set()  # depths in no lower tier: our own tail must not evict them
        waiting: set[int] = set()  # depths of `alone` that found no space in a queue
        tried: set[int] = set()
        depth_of = {key: index for index, key in enumerate(chain)}

        def keep(key: BlockKey) -> bool:
            return depth_of.get(key, -1) in alone

        if terms.guarantees:
            manager.guarantee(chain, reached, terms)  # refused: before anything is stored
        manager.finish_put(chain)  # before room is made for it: else the policy gives each block a rank of its own
        version = manager.space.version
        while True:
            wait = wait and manager.hierarchy.healthy()
            stop = min(len(chain), reached + self._step_blocks)
            if wait:
                stop = min(stop, reached + demoter.space())
            if reached < stop:
                alone |= demoter.alone(chain, stop, reached)
                slots, reached = manager.reserve(chain, reached, stop, terms, keep, insist=wait)
                self._fill(slots)
                generations = [slot.generation for slot in slots]
                refused = manager.commit(chain, slots, generations, again=True, request_id=self._request_id)
                alone.update(refused)
                waiting.update(index for index in refused if index < demoter.demotable(len(chain)))
                tried.update({slot.index for slot in slots}.difference(refused))
                if reached == stop < len(chain):
                    continue
            if not wait or (reached == len(chain) and not waiting):
                break
            yield version
            waiting = demoter.demote_rest(chain, reached, tried)
            # In this order: a block that comes down after `alone` was asked for wakes the wait. Pins that
            # `demote_rest` itself undid do not.
            version = manager.space.version
            alone.clear()
            alone.update(demoter.alone(chain, reached))
        manager.finish_put(chain, dropped=len(waiting) if manager.lower else 0)
        if terms.guarantees:
            manager.release_guarantees(chain[reached:])
        self.accepted = reached - self._start

    def _fill(self, slots: Sequence[Slot]) -> None:
        generations = [slot.generation for slot in slots]
        try:
            for slot in slots:
                copy_in(slot.pieces, self._buffers[slot.index - self._start])
        except BaseException:
            self._manager.abort(slots, generations)
            raise
