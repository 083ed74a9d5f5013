"""What programs and engines do with the cache of one process: each call is compared with the ledger and with its bound.

Buffers are overwritten as soon as they are the caller's again, and memory of a slot that was given up is written to
until that is acknowledged: as engines and devices do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvtier.cache import AsyncCache
from kvtier.errors import ClosedError, InvalidRequest, TierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.retention.terms import BUILTIN
from kvtier.sim.ledger import Before, Ledger, Purge, Wrong, bytes_of
from kvtier.sim.prompts import SALTS, SHORT, chain_of_step, kind_of
from kvtier.tiers.host.slot import Slot, copy_in
from kvtier.times import Mono

GRACE_S = 1.0
"""How much later than its deadline a call may return: the work of its threads, and cleaning up."""
CALL_S = 60.0
"""Bound of a call without a deadline of the caller's, such as a pin's: a tier has so long."""
PURGE_S = 60.0 + 5.0 + 10.0 + 5.0
"""That of a purge: the tiers take it; where the log refuses it, those are told so; then all are asked which purges they
know, and told its number."""
EVICT_S = 310.0
"""That of a whole tier, and what was retained there."""
_RANGES = [(0, 20, "urgent"), (16, 70, "shallow")]


class Client:
    """Callers of `cache`, in `process`. `leapt()`: how long all machines were suspended so far; `told` hears results;
    `bound_s`: after which a purge is in force everywhere."""

    def __init__(
        self, cache: AsyncCache, process: int, ledger: Ledger, leapt: Callable[[], float], told: Callable[[str], None],
        bound_s: float,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._process = process
        self._ledger = ledger
        self._leapt = leapt
        self._told = told
        self._bound_s = bound_s
        self._size = cache.namespace.block_bytes

    async def do(self, verb: str, args: Mapping[str, Any], rng: random.Random) -> None:
        """One step. Errors of tiers are answers to purges and pins, and nowhere else."""
        work: Callable[..., Coroutine[Any, Any, str]] = getattr(self, f"_{verb}")
        began, leapt = self._ledger.now(), self._leapt()
        try:
            told = await work(args, rng)
        except (InvalidRequest, TierError) as error:
            if verb not in ("purge", "pin", "unpin", "put", "request"):
                raise
            told = type(error).__name__
        took = self._ledger.now() - began - (self._leapt() - leapt)
        self._told(f"{verb}: {told}")
        if took > self._bound(verb, args) + GRACE_S:
            raise Wrong(f"{verb} took {took:.3f} s, and its bound is {self._bound(verb, args):g} s")

    def _bound(self, verb: str, args: Mapping[str, Any]) -> float:
        deadlines = self._cache.config.deadlines
        known = {
            "put": deadlines.put, "get": deadlines.get, "prewarm": deadlines.get, "request": deadlines.get,
            "match": deadlines.lookup, "flush": deadlines.flush, "evict": EVICT_S, "purge": PURGE_S,
        }  # fmt: skip
        given = args.get("timeout")
        # Forward passes: under the lease, over the slots, and after these were given up.
        passes = 3 if args.get("ending") == "late" else 2
        extra = args.get("hold", 0.0) + passes * args.get("forward", 0.0) + (given or 0.0 if verb == "request" else 0.0)
        return float((known.get(verb, CALL_S) if given is None else given) + extra)

    # -- programs ---------------------------------------------------------------------------------------------------

    async def _put(self, args: Mapping[str, Any], rng: random.Random) -> str:
        chain = chain_of_step(args)
        start = min(args["start"], len(chain) - 1)
        kind: Any = kind_of(args) or args["kind"]
        buffers = [bytearray(bytes_of(key, self._size)) for key in chain[start:]]
        with self._ledger.using(chain, putting=True):
            try:
                stored = await self._cache.put(
                    chain, buffers, _RANGES if kind == "ranges" else kind, args["wait"], start=start,
                    timeout=args["timeout"], request_id=f"r{rng.randrange(9)}",
                )  # fmt: skip
            finally:
                for buffer in buffers:
                    buffer[:] = b"\xee" * self._size
        return f"{stored} of {len(buffers)}"

    async def _get(self, args: Mapping[str, Any], rng: random.Random) -> str:
        chain = chain_of_step(args)
        start = min(args["start"], len(chain) - 1)
        getting = self._cache.get(chain, args["timeout"], start=start, request_id=f"r{rng.randrange(9)}")
        async with self._watched(chain[start:], chain) as before, getting as hit:
            self._ledger.compare(chain[start:], [bytes(block) for block in hit.blocks], before)
            await asyncio.sleep(args["hold"])
            self._same(chain[start:], [bytes(block) for block in hit.blocks])
            return f"{len(hit)} of {len(chain) - start} from {','.join(hit.tiers)} {hit.miss}"

    async def read_all(self, chain: Sequence[BlockKey], timeout: float) -> int:
        """How many blocks of it are served."""
        async with self._watched(chain, chain) as before, self._cache.get(chain, timeout) as hit:
            self._ledger.compare(chain, [bytes(block) for block in hit.blocks], before)
            self._told(f"reads {len(hit)} of {len(chain)} from {','.join(hit.tiers)} {hit.miss or ''}")
            return len(hit)

    async def _match(self, args: Mapping[str, Any], rng: random.Random) -> str:
        chain = chain_of_step(args)
        async with self._watched(chain, chain) as before:
            count = await self._cache.match(chain, args["timeout"])
            self._ledger.claimed(chain, count, before)
            return str(count)

    async def _prewarm(self, args: Mapping[str, Any], rng: random.Random) -> str:
        chain = chain_of_step(args)
        with self._ledger.using(chain):
            return str(await self._cache.prewarm(chain, args["timeout"]))

    async def _flush(self, args: Mapping[str, Any], rng: random.Random) -> str:
        flushed = await self._cache.flush(args["timeout"])
        return f"{flushed.pending} pending, {flushed.dropped} dropped"

    async def _evict(self, args: Mapping[str, Any], rng: random.Random) -> str:
        return str(await self._cache.evict(args["tier"]) if args["tier"] in self._tiers() else 0)

    async def _purge(self, args: Mapping[str, Any], rng: random.Random) -> str:
        return str(await self.purge(args["scope"]))

    async def purge(self, scope: int) -> int:
        """A purge of a tenant. Raises TierError."""
        salt, tenant = SALTS[scope]
        purge: Purge = self._ledger.purge(tenant, self._process)
        try:
            count = await self._cache.purge(salt)
        except Exception:
            purge.answered = True
            raise
        purge.answered, purge.ended = True, self._ledger.now()
        return count

    async def _pin(self, args: Mapping[str, Any], rng: random.Random) -> str:
        chain = chain_of_step(args)
        with self._ledger.using(chain):
            return str((await self._cache.pins.create(args["name"], chain, args["seconds"])).resident)

    async def _unpin(self, args: Mapping[str, Any], rng: random.Random) -> str:
        if rng.random() < 0.5:
            return str((await self._cache.pins.extend(args["name"], args["seconds"])).blocks)
        return str(await self._cache.pins.delete(args["name"], drop=rng.random() < 0.5))

    # -- an engine's request ----------------------------------------------------------------------------------------

    async def _request(self, args: Mapping[str, Any], rng: random.Random) -> str:
        """Load the prefix, compute the rest under the lease, store what was computed. `ending`: what becomes of the
        forward pass; "preempt": the lease ends, and the request comes again."""
        chain, manager = chain_of_step(args), self._cache.manager
        timeout = args["timeout"]
        limit = Mono(self._cache.config.deadlines.get if timeout is None else timeout)
        async with self._watched(chain, chain) as before:
            lease = await manager.promote(chain, Mono(self._ledger.now() + limit))
            with lease:
                self._ledger.compare(chain, [_whole(slot) for slot in lease.slots], before)
                await asyncio.sleep(args["forward"])
                self._same(chain, [_whole(slot) for slot in lease.slots])
                hit = len(lease)
                if args["ending"] == "preempt":
                    lease.release()
                    again = manager.pin(chain)
                    self._same(chain, [_whole(slot) for slot in again.slots])
                    again.release()
                    return f"{hit} of {len(chain)}, preempted"
                return f"{hit} of {len(chain)}, {await self._compute(args, chain, hit)}"

    async def _compute(self, args: Mapping[str, Any], chain: Sequence[BlockKey], hit: int) -> str:
        """Fill slots for the blocks behind the hit, during a forward pass, and commit or give up."""
        with self._ledger.using(chain, putting=True):
            return await self._fill(args, chain, hit)

    async def _fill(self, args: Mapping[str, Any], chain: Sequence[BlockKey], hit: int) -> str:
        manager = self._cache.manager
        terms = SHORT.get(scope_of_key(chain[0]), BUILTIN["24h"])
        slots, _ = manager.reserve(chain, hit, len(chain), terms)
        generations = [slot.generation for slot in slots]
        try:
            for slot in slots:
                copy_in(slot.pieces, memoryview(b"\xdd" * self._size))
            await asyncio.sleep(args["forward"])
            if args["ending"] == "commit":
                for slot in slots:
                    copy_in(slot.pieces, memoryview(bytes_of(chain[slot.index], self._size)))
        except BaseException:
            with suppress(BaseException):
                manager.abort(slots, generations)
            raise
        if args["ending"] == "commit":
            refused = manager.commit(chain, slots, generations)
            return f"{len(slots)} computed, {len(refused)} in RAM only"
        manager.abort(slots, generations, in_flight=args["ending"] == "late")
        if args["ending"] == "late":
            views = [slot.pieces for slot in slots]
            try:
                await asyncio.sleep(args["forward"])
            finally:  # a device says that it is done whatever became of the request
                for slot, generation, pieces in zip(slots, generations, views, strict=True):
                    copy_in(pieces, memoryview(b"\xcc" * self._size))
                    manager.acknowledge(slot, generation)
        return f"{len(slots)} given up"

    # -- the ledger -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _watched(
        self, wanted: Sequence[BlockKey], chain: Sequence[BlockKey]
    ) -> AsyncIterator[Mapping[BlockKey, Before]]:
        """Around a call that reads: gives what is known of the blocks before it."""
        proven = self._cache.manager.hierarchy.proven_at
        before = self._ledger.before(wanted, self._process, proven, self._bound_s)
        with self._ledger.using(chain):
            yield before

    def _same(self, keys: Sequence[BlockKey], blocks: Sequence[bytes]) -> None:
        for key, block in zip(keys, blocks, strict=False):
            if block != bytes_of(key, self._size):
                raise Wrong("other bytes under a lease")

    def _tiers(self) -> tuple[str, ...]:
        return ("g2", *self._cache.manager.lower)


def _whole(slot: Slot) -> bytes:
    return b"".join(slot.pieces)


async def cancelled(call: Callable[[], Coroutine[Any, Any, None]], turns: int | None) -> None:
    """The call, cancelled after so many turns (None: never). A cache that is closed meanwhile says so."""
    with suppress(ClosedError):
        if turns is None:
            return await call()
        task = asyncio.ensure_future(call())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
