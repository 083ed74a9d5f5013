"""Everything at once, from a seed: tasks or threads that put, get, purge, evict, pin and flush a small cache, cancelled
anywhere, closed while they work, and opened again over the same stores.

    python -m tests.manager.support.hammer SECONDS [SEED [STACK]]

A block's payload is a pure function of its key, so any wrong byte shows; `hammer_model` tells which blocks must not be
served at all. Buffers are overwritten after every return and every cancellation. The tiers below fail, hang and answer
late; the wall clock is set, the machine suspended. After each round the tiers heal, all calls end, and then: the
invariants hold, nothing is pinned or quarantined, the background lives, and what is put reaches every tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from kvtier.cache import AsyncCache
from kvtier.errors import ClosedError, InvalidRequest, TierError
from kvtier.identity import hashing
from kvtier.identity.keys import BlockKey, Scope, make_keys, scope_of
from kvtier.testing.short_slices import slices_of
from tests.manager.support.hammer_faces import CACHES, Face, TasksFace, ThreadsFace, at_once
from tests.manager.support.hammer_model import Model, bytes_of
from tests.manager.support.hammer_patience import Share, TooLate, in_time
from tests.manager.support.hammer_world import STACKS, World, slow_copies

TASKS, THREADS = 12, 5
ROUND_S = 1.0
LIFE_S = 4.0
CLOSED_S = 5.0 + 4.0  # deadlines.close, and the grace of a busy loop
IDLE_S = {scope_of("blink"): 0.05}
AGE_S = {scope_of("short"): 0.3, scope_of("brief"): 2.0}
LASTING: list[Any] = [None, None, "sure", "shallow", "local", "urgent", "in ranges"]
SCOPES: dict[Scope, str | None] = {
    scope_of("a"): None, scope_of("b"): None, scope_of(None): None, scope_of("a", b"adapter"): None,
    scope_of("blink"): "blink", scope_of("short"): "short", scope_of("brief"): "brief",
}  # fmt: skip
"""Whose blocks are put, and the class they are put in; None: any that lasts."""
SALTS = {scope_of("a"): "a", scope_of("b"): "b", scope_of(None): None, scope_of("brief"): "brief"}


class Hammer:
    """One world, and what is done to the caches over it."""

    def __init__(self, seed: int, stack: str, root: Path) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.world = World(stack, root, self.rng)
        threads = stack == "worker" or (stack != "long" and seed % 3 == 0)
        self.kinds: list[type[Face]] = [ThreadsFace if threads else TasksFace]
        """Threads that call a Cache, or tasks that call an AsyncCache, or both over the same stores."""
        if stack in ("disk", "objects", "both") and seed % 3 == 1:
            self.kinds = [ThreadsFace, TasksFace]
        self.model = Model(self.world.block_bytes, IDLE_S, AGE_S)
        self.chains = {scope: self._prompts(scope) for scope in SCOPES}
        self.fresh: list[list[BlockKey]] = []
        self.done = self.lives = 0
        self.failures: list[BaseException] = []

    def _prompts(self, scope: Scope) -> list[list[BlockKey]]:
        """Prompts of which each leaves an earlier one at some block."""
        rng, shape = random.Random(scope), self.world.shape
        size = self.world.namespace.block_tokens
        prompts = [[rng.randrange(1000) for _ in range(shape.blocks * size)] for _ in range(shape.prompts)]
        for base in prompts[: shape.prompts]:
            for _ in range(shape.forks):
                fork = rng.randrange(1, shape.blocks) * size
                prompts.append(base[:fork] + [rng.randrange(1000) for _ in range(len(base) - fork)])
        return [self._keys(scope, tokens) for tokens in prompts]

    def renewed(self, scope: Scope, rng: random.Random) -> list[BlockKey]:
        """A new prompt in the place of an old one, that it shares a beginning with: of blocks that are new to every
        tier, all bytes are copied and written."""
        chains, place = self.chains[scope], rng.randrange(len(self.chains[scope]))
        fork = rng.randrange(len(chains[place]))
        root = chains[place][fork - 1][-32:] if fork else hashing.chain_root(self.world.namespace.digest, scope)
        size = self.world.namespace.block_tokens
        tokens = [rng.randrange(1 << 30) for _ in range((len(chains[place]) - fork) * size)]
        chains[place] = chains[place][:fork] + make_keys(scope, hashing.chain_hashes(root, tokens, size))
        return chains[place]

    def _keys(self, scope: Scope, tokens: Sequence[int]) -> list[BlockKey]:
        root = hashing.chain_root(self.world.namespace.digest, scope)
        return make_keys(scope, hashing.chain_hashes(root, tokens, self.world.namespace.block_tokens))

    # -- the verbs ------------------------------------------------------------------------------------------------

    def chain(self, rng: random.Random) -> tuple[Scope, list[BlockKey]]:
        scope = rng.choices(list(SCOPES), [4 if terms is None else 1 for terms in SCOPES.values()])[0]
        chain = rng.choice(self.chains[scope])
        return scope, chain[: rng.randint(1, len(chain))]

    async def put(self, face: Face, rng: random.Random) -> None:
        scope, chain = self.chain(rng)
        if rng.random() < 0.3:
            chain = self.renewed(scope, rng)
        start = rng.choice([0, 0, 0, rng.randrange(len(chain))])
        size = self.world.block_bytes
        buffers = [bytearray(bytes_of(key, size)) for key in chain[start:]]
        retention = SCOPES[scope] or rng.choice(LASTING)
        if retention == "in ranges":
            retention = [(0, rng.randrange(1, 100), "urgent"), (16, rng.randrange(17, 200), "shallow")]
        with self.model.using(chain, putting=True):
            try:
                wait, timeout = rng.random() < 0.6, rng.choice([None, 0.0, 0.01, 0.2])
                await face.call(
                    face.cache.put,
                    chain,
                    buffers,
                    retention,
                    wait,
                    start=start,
                    timeout=timeout,
                    request_id=f"r{rng.randrange(9)}",
                )
            except InvalidRequest:
                assert retention == "sure"  # more than may be guaranteed
            finally:
                for buffer in buffers:
                    buffer[:] = b"\xee" * size

    async def get(self, face: Face, rng: random.Random) -> None:
        _, chain = self.chain(rng)
        await self.read(
            face, chain, rng.choice([0, 0, rng.randrange(len(chain))]), rng.choice([None, 0.0, 0.005, 0.1]), rng
        )

    async def read(
        self, face: Face, chain: Sequence[BlockKey], start: int, timeout: float | None, rng: random.Random
    ) -> int:
        """Get, and compare with the model, twice while the lease holds. Returns how many blocks were there."""
        wanted, floors = chain[start:], self.model.floors(chain[start:], face.number)
        with self.model.using(chain) as began:
            request, other = f"r{rng.randrange(9)}", f"r{rng.randrange(9)}"
            async with face.get(chain, timeout, start=start, request_id=request, compared_with=other) as hit:
                self.model.compare(wanted, hit.blocks, hit.tiers, began, floors)
                await face.pause(rng.choice([0, 0, 0.01]))
                for key, block in zip(wanted, hit.blocks, strict=False):
                    assert bytes(block) == bytes_of(key, self.world.block_bytes), "other bytes under a lease"
                return len(hit)

    async def others(self, face: Face, rng: random.Random) -> None:
        cache = face.cache
        scope, chain = self.chain(rng)
        lasting = rng.choice(self.chains[scope_of("a")])[: rng.randint(1, 12)]
        name = f"p{rng.randrange(4)}"
        verbs: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: face.call(cache.match, chain, rng.choice([None, 0.0, 0.01])),
            lambda: face.call(cache.prewarm, chain, rng.choice([None, 0.0, 0.05])),
            lambda: face.call(cache.flush, rng.choice([0.0, 0.02, 0.2])),
            lambda: face.call(cache.evict, rng.choice(["g2", *cache.manager.lower])),
            lambda: self.purge(face, scope),
            lambda: face.call(cache.pins.create, name, lasting, rng.choice([0.5, 3600.0])),
            lambda: face.call(cache.pins.extend, name, 60.0),
            lambda: face.call(cache.pins.delete, name, drop=rng.random() < 0.5),
        ]
        with self.model.using([*chain, *lasting]), contextlib.suppress(InvalidRequest, TierError):
            await rng.choices(verbs, [6, 3, 2, 1, 1, 2, 1, 2])[0]()
        if rng.random() < 0.1:
            cache.computed(rng.randrange(1, 64), rng.choice([0.0, 1e-4, 0.1]))
        cache.stats()
        cache.account(f"r{rng.randrange(9)}")

    async def purge(self, face: Face, scope: Scope) -> None:
        with self.model.purging(scope, face.number):
            if scope in SALTS:
                await face.call(face.cache.purge, SALTS[scope])
            else:
                await face.on_loop(face.cache.manager.purge({scope}))

    # -- callers --------------------------------------------------------------------------------------------------

    async def work(self, face: Face, rng: random.Random, until: float) -> None:
        """One caller: a verb after the other. Tasks are cancelled at some await, some of them twice."""
        with contextlib.suppress(ClosedError):
            while time.monotonic() < until:
                verb = rng.choices([self.put, self.get, self.others], [5, 5, 2])[0]
                if isinstance(face, TasksFace) and rng.random() < 0.35:
                    await self.cancelled(verb(face, rng), rng)
                else:
                    await verb(face, rng)
                self.done += 1

    async def cancelled(self, call: Coroutine[Any, Any, None], rng: random.Random) -> None:
        task = asyncio.ensure_future(call)
        for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 13])):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.01)
        task.cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @contextlib.asynccontextmanager
    async def callers(self, faces: Sequence[Face], until: float) -> AsyncIterator[None]:
        """All of them at work, until they have ended."""
        self.fresh = []  # they may evict it
        tasks: list[asyncio.Future[None]] = []
        threads: list[threading.Thread] = []
        for face in faces:
            for _ in range(TASKS if isinstance(face, TasksFace) else THREADS):
                rng = random.Random(self.rng.randrange(1 << 62))
                if isinstance(face, TasksFace):
                    tasks.append(asyncio.ensure_future(self.work(face, rng, until)))
                else:
                    threads.append(threading.Thread(target=self._on_thread, args=(face, rng, until)))
        for thread in threads:
            thread.start()
        yield
        _, stranded = await asyncio.wait(tasks, timeout=until - time.monotonic() + 30) if tasks else (0, 0)
        for thread in threads:
            await asyncio.to_thread(thread.join, until - time.monotonic() + 30)
        if stranded or any(thread.is_alive() for thread in threads):
            raise TooLate("a caller is stranded")
        await asyncio.gather(*tasks)
        if self.failures:
            raise self.failures[0]

    def _on_thread(self, face: Face, rng: random.Random, until: float) -> None:
        try:
            at_once(self.work(face, rng, until))
        except BaseException as error:
            self.failures.append(error)

    # -- a life ---------------------------------------------------------------------------------------------------

    async def live(self, ends: float) -> None:
        """Open, some rounds, close; what was written is there again in the next life."""
        before = self._held()
        self.world.tiers, faces = [], [await self.opened(kind, number) for number, kind in enumerate(self.kinds)]
        try:
            await self.sees_again(faces[0])
            for _ in range(self.rng.choice([1, 1, 2])):
                await self.round(faces)
                if time.monotonic() > ends:
                    break
            if self.rng.random() < 0.4:
                await self.closed_while_busy(faces)
        finally:
            for face in faces:
                self.world.heal(face.cache)
                await face.call(face.cache.close)
        faces.clear()
        del face
        self.model.restarted()
        self.lives += 1
        await self.nothing_left(before)

    async def opened(self, kind: type[Face], number: int) -> Face:
        """A face of an open cache, over the stores as they are."""
        cache = await asyncio.to_thread(self.world.open, CACHES[kind])
        if isinstance(cache, AsyncCache):
            await cache.__aenter__()
        self.world.hurry(cache)
        return kind(cache, number)

    async def round(self, faces: Sequence[Face]) -> None:
        until = time.monotonic() + ROUND_S
        self.world.calm = self.rng.random() < 0.4
        async with self.callers(faces, until):
            while time.monotonic() < until:
                for face in faces:
                    self.world.trouble(face.cache)
                    with face.cache.manager.lock:
                        face.cache.manager.host.check()
                await asyncio.sleep(0.1)
            if self.rng.random() < 0.1:
                self.world.suspend(self.rng.choice([5.0, 700.0]))
            self.heal(faces)
        if any(face.cache.manager.hierarchy.clock.adopted for face in faces):
            self.model.clock_was_set()
        for face in faces:
            await self.settle(face)
        for face in faces:
            await self.quiesce(face)

    def heal(self, faces: Sequence[Face]) -> None:
        for face in faces:
            self.world.heal(face.cache)

    async def closed_while_busy(self, faces: Sequence[Face]) -> None:
        """Two close each cache while all others call it."""
        async with self.callers(faces, time.monotonic() + 20):
            await asyncio.sleep(self.rng.random() * 0.3)
            self.world.trouble(faces[0].cache)
            began = time.monotonic()
            await asyncio.gather(*(self.closed_twice(face) for face in faces))
            in_time(began + CLOSED_S, f"closing took {time.monotonic() - began:.1f} s")
            for tier in self.world.tiers:
                tier.heal()
        for face in faces:
            with contextlib.suppress(ClosedError):
                await face.call(face.cache.match, self.chains[scope_of(None)][0])
                raise AssertionError("a closed cache answers")

    async def closed_twice(self, face: Face) -> None:
        """By two at once, of which the first may be cancelled."""
        if isinstance(face, ThreadsFace):
            await asyncio.gather(*(asyncio.to_thread(face.cache.close) for _ in range(2)))
            return
        closing = [asyncio.ensure_future(face.cache.close()) for _ in range(2)]
        if self.rng.random() < 0.3:
            await asyncio.sleep(0.01)
            closing[0].cancel()
        await asyncio.gather(*closing, return_exceptions=True)

    def _held(self) -> tuple[set[asyncio.Task[Any]], int]:
        gc.collect()
        return asyncio.all_tasks(), len(list(Path("/proc/self/fd").iterdir()))

    async def nothing_left(self, before: tuple[set[asyncio.Task[Any]], int]) -> None:
        """No task, thread or descriptor of a closed cache."""
        deadline = time.monotonic() + 10
        while True:
            tasks, descriptors = self._held()
            tasks -= before[0]
            threads = [t.name for t in threading.enumerate() if t.name.startswith("kvtier")]
            more = descriptors - before[1] if self.lives > 1 else 0
            if not tasks and not threads and more <= 0:
                return
            in_time(deadline, f"left: {tasks}, {threads}, {more} descriptors")
            await asyncio.sleep(0.05)

    # -- quiescence -----------------------------------------------------------------------------------------------

    async def quiesce(self, face: Face) -> None:
        """All tiers are well, and nobody calls: what must hold then."""
        cache = face.cache
        cache.check()
        self.judge()
        for chains in self.chains.values():
            for chain in chains:
                await self.read(face, chain, 0, 5.0, self.rng)
        self.judge()
        await self.reaches_all(face)
        await self.expires(face)
        scope = self.rng.choice(list(SALTS))
        await self.purge_everywhere(face, scope)
        for chain in self.chains[scope]:
            assert await face.call(cache.match, chain) == 0, "purged"
        cache.check()

    async def purge_everywhere(self, face: Face, scope: Scope) -> None:
        """A tier that was out of reach is asked again after a while."""
        deadline = time.monotonic() + 20
        while True:
            try:
                await self.purge(face, scope)
                return
            except TierError:
                in_time(deadline, "a purge reaches every tier that is well")
                await asyncio.sleep(0.2)

    def judge(self) -> None:
        assert not self.model.wrong, f"{len(self.model.wrong)} blocks: {self.model.wrong[:3]}"

    async def settle(self, face: Face) -> None:
        """Wait until nothing is under way."""
        manager, deadline = face.cache.manager, time.monotonic() + 20
        while True:
            self.world.heal(face.cache)
            await face.call(face.cache.flush, 5.0)
            with manager.lock:
                pinned = sum(pins > 0 for pins in manager.host._table.pins)
                held = [pinned, manager.host.quarantined, len(manager.host.filling()), len(manager.lower.out)]
                held += [abs(manager.host.in_use.surplus) if self.world.resized else 0]
            held.append(self.world.workers_down(face.cache))
            if not any(held):
                return
            in_time(deadline, f"pinned, quarantined, filling, left out, to resize, down: {held}")
            gc.collect()
            await asyncio.sleep(0.05)

    async def reaches_all(self, face: Face) -> None:
        """New blocks are stored, and go to every tier that has space. (A loaded machine may be late, and a breaker open
        for that: then again, when it has let a call through.)"""
        deadline = time.monotonic() + 20
        while True:
            await self.settle(face)
            chain = self._keys(scope_of("fresh"), [self.rng.randrange(1 << 30) for _ in range(4 * 16)])
            payloads = [bytes_of(key, self.world.block_bytes) for key in chain]
            stored = await face.call(face.cache.put, chain, payloads, timeout=5.0)
            flushed = await face.call(face.cache.flush, 10.0)
            lower = face.cache.manager.lower.values()
            missing = {tier.name: [miss for miss in await self._found(face, tier, chain) if miss] for tier in lower}
            if not all(tier.healthy() for tier in lower):
                in_time(deadline, "a tier that answers is well")
                await asyncio.sleep(0.2)
                continue
            if stored != 4 or flushed.pending:
                raise TooLate(f"the background does not live: {stored} of 4 stored, {flushed.pending} pending")
            if self.world.roomy:
                assert not any(missing.values()), f"what was put lacks: {missing}, {face.cache.stats()}"
                self.fresh = [chain]
            return

    async def expires(self, face: Face) -> None:
        """Blocks are over when their class says so, used meanwhile or not."""
        for scope, seconds in {**IDLE_S, scope_of("short"): AGE_S[scope_of("short")]}.items():
            chain = self._keys(scope, [self.rng.randrange(1 << 30) for _ in range(2 * 16)])
            payloads = [bytes_of(key, self.world.block_bytes) for key in chain]
            with self.model.using(chain, putting=True):
                await face.call(face.cache.put, chain, payloads, SCOPES[scope], timeout=0.0)
            await self.read(face, chain, 0, 0.0, self.rng)
            await asyncio.sleep(seconds + 0.01)
            assert await face.call(face.cache.match, chain, 0.0) == 0, f"over for {seconds} s"
            assert await self.read(face, chain, 0, 0.0, self.rng) == 0, f"over for {seconds} s"
        self.judge()

    async def _found(self, face: Face, tier: Any, chain: Sequence[BlockKey]) -> list[Any]:
        deadline = face.cache.manager.hierarchy.clock.monotonic() + 5.0
        found: list[Any] = await face.on_loop(tier.lookup(chain, range(len(chain)), deadline))
        return found

    async def sees_again(self, face: Face) -> None:
        """After a restart: what was durable at the last quiescence, and was not pushed out."""
        deadline = time.monotonic() + 20
        while face.cache.manager.lower.out:
            in_time(deadline, face.cache.stats()["tasks"]["out"])
            await asyncio.sleep(0.05)
        for chain in self.fresh:
            found = await self.read(face, chain, 0, 5.0, self.rng)
            assert found == len(chain), f"{found} of {len(chain)} durable blocks are there again"
        self.fresh = []
        self.judge()


async def hammer(seed: int, seconds: float, stack: str = "memory", root: Path | None = None) -> Hammer:
    """Lives for `seconds`. With an even seed, in slices of a block or two, which chains as short as these would not be
    cut into; with half of the seeds, copies take longer than those of blocks as small as these. Raises the first
    failure, with the command that repeats it."""
    command = f"python -m tests.manager.support.hammer {seconds:g} {seed} {stack}"
    small = seed % 2 == 0 and stack != "long"
    with contextlib.ExitStack() as ending:
        if root is None:
            root = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-hammer-")))
        it = Hammer(seed, stack, root)
        ends = time.monotonic() + seconds
        ending.enter_context(slices_of(1 + seed // 2 % 2) if small else contextlib.nullcontext())
        ending.enter_context(slow_copies(random.Random(seed)) if seed % 4 < 2 else contextlib.nullcontext())
        ending.enter_context(it.world.running())
        try:
            while time.monotonic() < ends:
                await it.live(ends)
        except BaseException as error:
            error.add_note(f"repeat it: {command}")
            raise
    return it


def main() -> None:
    """Seeds from SEED on, a few seconds each, over every stack in turn or one. Goes on past those that fail, prints
    each with the command that repeats it, and ends with 1 if there was one. One that was late because the machine had
    no time for it is counted apart."""
    logging.getLogger("kvtier").setLevel(logging.CRITICAL)
    given_s, first = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    stacks, ends = sys.argv[3:4] or STACKS, time.monotonic() + given_s
    runs, calls, served, lives, failed, starved = 0, 0, 0, 0, 0, 0
    while time.monotonic() < ends or not runs:
        seed, stack = first + runs // len(stacks), stacks[runs % len(stacks)]
        runs += 1
        before = Share.now()
        try:
            it = asyncio.run(asyncio.wait_for(hammer(seed, min(LIFE_S, given_s), stack), 120))
            calls, served, lives = calls + it.done, served + it.model.served, lives + it.lives
        except Exception as error:
            share = Share.now().since(before)
            late = isinstance(error, TooLate | TimeoutError) and share.starved
            failed, starved = failed + (not late), starved + late
            print(f"-- seed {seed} over {stack} {'is late' if late else 'fails'}: {share}", flush=True)
            if not late:
                traceback.print_exc()
    print(
        f"{runs} runs, seeds {first} … {first + (runs - 1) // len(stacks)} over {', '.join(stacks)}: {calls} calls,"
        f" {served} blocks served, {lives} lives, {time.process_time():.0f} s of CPU: {failed} failed"
        f", {starved} had no time"
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
