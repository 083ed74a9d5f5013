"""G4 against a server that fails in every way we know: no hang, no wrong byte, bounded retries, and it heals."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.retention.terms import Terms
from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace, seal
from kvtier.testing.faults_s3 import FaultyS3, S3Fault, S3Rule, every_fault
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target

NS = sample_namespace(8192)
S = 4
DEADLINE_S = 1.5
HEALTHY_S = 15.0
ATTEMPTS = 3


class Scene:
    """A faulty server and two replicas on it, used over all scenarios; each has a prompt of its own."""

    def __init__(self, server: FaultyS3, client: str) -> None:
        self.server, self.client = server, client
        self.clock = VirtualClock()
        self.writer, self.reader = (self._tier(client, seed) for seed in (1, 2))
        self.seed = 0
        self.last: list[Loaded | Miss] = []

    def _tier(self, client: str, seed: int) -> ObjectTier:
        return ObjectTier(
            "s3://bucket/p", NS, clock=self.clock, stride=S, options=self.server.options, client=client,  # type: ignore[arg-type]
            limits=BucketLimits(connect_s=0.5, read_s=0.2), attempts=ATTEMPTS, seed=seed,
        )  # fmt: skip

    patience = DEADLINE_S

    @property
    def deadline(self) -> float:
        return self.clock.monotonic() + self.patience

    async def use(self, chain: Sequence[BlockKey]) -> int:
        """Every verb once, whatever comes of it; returns how many blocks came back, all with their own bytes."""
        now = self.clock.wall()
        loaded = 0
        for work in (
            lambda: self.writer.write(
                seal(chain, range(len(chain)), NS.block_bytes, now, Terms("t", ttl=300)), self.deadline
            ),
            lambda: self.reader.lookup(chain, range(len(chain)), self.deadline),
            self._read_into(chain),
            self._renew(chain),
            self.reader.tombstones,
        ):
            began = time.monotonic()
            try:
                got = await work()
                loaded += got if isinstance(got, int) else 0
            except TierError:
                pass
            except TimeoutError:
                pass
            assert time.monotonic() - began < 20 * DEADLINE_S, "a call outlived its deadline"
        return loaded

    def _read_into(self, chain: Sequence[BlockKey]):  # type: ignore[no-untyped-def]
        async def work() -> int:
            buffers = [bytearray(NS.block_bytes) for _ in chain]
            targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
            results = await self.reader.read(chain, targets, self.deadline)
            for key, buffer, result in zip(chain, buffers, results, strict=True):
                assert not isinstance(result, Loaded) or buffer == payload_of(key, NS.block_bytes), "a wrong byte"
            self.last = results
            return sum(isinstance(result, Loaded) for result in results)

        return work

    def _renew(self, chain: Sequence[BlockKey]):  # type: ignore[no-untyped-def]
        async def work() -> None:
            self.clock.advance(200)
            self.writer.touch(chain, self.clock.wall())
            await self.writer.flush(self.deadline)

        return work

    async def healthy(self, chain: Sequence[BlockKey]) -> None:
        """With the faults gone and a moment later, everything works, under the same names."""
        self.clock.advance(60)
        self.patience = HEALTHY_S
        blocks = seal(chain, range(len(chain)), NS.block_bytes, self.clock.wall(), Terms("t", ttl=300))
        results = await self.writer.write(blocks, self.deadline)
        if not all(result.durable for result in results):  # the first reuse of a connection that died
            results = await self.writer.write(blocks, self.deadline)
        assert all(result.durable for result in results), results
        assert await self._read_into(chain)() == len(chain), self.last
        self.patience = DEADLINE_S

    def prompt(self) -> list[BlockKey]:
        self.seed += 1
        return chain_of(NS, 2 * S, seed=self.seed)


async def untold(deltas: Deltas) -> None:
    """As of a server that does not stamp its objects."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["s3fs", "obstore"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    with FaultyS3(seed=7).running() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deltas, "measure_skew", untold)  # the server's clock is real, this one runs ahead of it
        scene = Scene(server, request.param)
        await scene.writer.open()
        await scene.reader.open()
        yield scene
        await scene.writer.close(scene.deadline)
        await scene.reader.close(scene.deadline)


_SLOW = (S3Fault.STALL, S3Fault.STALL_BODY, S3Fault.SLOW_BODY)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("clients", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("verb", ["get", "put", "head", "delete", "list", pytest.param("copy", marks=pytest.mark.long)])
async def test_every_fault_once(scene: Scene, verb: str, clients: int) -> None:
    """One request fails: the second attempt, or a miss; then all is well. Each fault with one of the two clients, or
    with both."""
    first = 0 if clients == 2 else ("s3fs", "obstore").index(scene.client)
    for _, fault in every_fault([verb])[first :: 3 - clients]:
        chain = scene.prompt()
        scene.server.rules = [S3Rule(verb, fault, times=1)]
        await scene.use(chain)
        scene.server.rules = []
        await scene.healthy(chain)
        scene.writer.check()
        scene.reader.check()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("verb", "step"), [*(pytest.param(v, 1, marks=pytest.mark.long) for v in ("get", "put", "list", "*")), ("*", 3)]
)
async def test_every_fault_for_ever(scene: Scene, verb: str, step: int) -> None:
    """All requests of a kind fail: misses within the deadline and a bounded number of attempts; then it heals."""
    for _, fault in every_fault([verb])[::step]:
        if fault in _SLOW and verb != "get":
            continue
        chain = scene.prompt()
        before = scene.server.requests.total()
        scene.server.rules = [S3Rule(verb, fault)]
        await scene.use(chain)
        hops = 11 if fault is S3Fault.REDIRECT_LOOP and scene.client == "obstore" else 1  # obstore follows ten
        assert scene.server.requests.total() - before < 80 * ATTEMPTS * hops, f"{fault}: retries are not bounded"
        scene.server.rules = []
        await scene.healthy(chain)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_mix_of_faults_never_gives_a_wrong_byte(scene: Scene) -> None:
    rules = [S3Rule(verb, fault, rate=0.02) for verb, fault in every_fault() if fault not in _SLOW]
    for _ in range(6):
        scene.server.rules = rules
        chain = scene.prompt()
        await scene.use(chain)
        await scene.use(chain)
        scene.server.rules = []
        await scene.healthy(chain)


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(40))
async def test_storms_of_faults(scene: Scene, seed: int) -> None:
    """Some faults at once and often, chosen by the seed; then all is well."""
    rng = random.Random(seed)
    chosen = rng.sample([pair for pair in every_fault() if pair[1] not in _SLOW], 8)
    chain = scene.prompt()
    scene.server.rules = [S3Rule(verb, fault, rate=rng.uniform(0.1, 0.5)) for verb, fault in chosen]
    await scene.use(chain)
    await scene.use(chain)
    scene.server.rules = []
    await scene.healthy(chain)
    scene.writer.check()
    scene.reader.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_without_faults_everything_comes_back(scene: Scene) -> None:
    """The control: the same calls on a healthy server lose nothing."""
    chain = scene.prompt()
    scene.server.rules, scene.patience = [], 30.0
    assert await scene.use(chain) == len(chain)
    scene.patience = DEADLINE_S


@pytest.mark.asyncio(loop_scope="module")
async def test_a_failed_purge_is_heard_of_and_holds_here(scene: Scene) -> None:
    tenant = scope_of("tenant")
    chain = chain_of(NS, S, seed=99, scope=tenant)
    now = scene.clock.wall()
    results = await scene.reader.write(seal(chain, range(S), NS.block_bytes, now), scene.clock.monotonic() + 30)
    assert results == [Stored.STORED] * S
    scene.server.rules = [S3Rule("put", S3Fault.STATUS_503)]
    scene.clock.advance(1)
    with pytest.raises(TierError):
        await scene.reader.purge(tenant, scene.clock.wall())
    scene.server.rules = []
    assert await scene._read_into(chain)() == 0


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_a_server_whose_name_nobody_knows_costs_no_more_than_the_deadline(client: str) -> None:
    clock = VirtualClock()
    options = {"endpoint_url": "http://nobody.invalid:1", "key": "k", "secret": "s"}
    tier = ObjectTier("s3://bucket", NS, clock=clock, stride=S, options=options, client=client, seed=1)  # type: ignore[arg-type]
    began = time.monotonic()
    await tier.open()
    chain = chain_of(NS, S)
    targets = [Target(i, (memoryview(bytearray(NS.block_bytes)),)) for i in range(S)]
    for call in (
        lambda deadline: tier.lookup(chain, range(S), deadline),
        lambda deadline: tier.read(chain, targets, deadline),
        lambda deadline: tier.write(seal(chain, range(S), NS.block_bytes, clock.wall()), deadline),
    ):
        with contextlib.suppress(TierError):
            results = await call(clock.monotonic() + DEADLINE_S)
            assert not {None, Stored.STORED} & {*results} and not any(isinstance(r, Loaded) for r in results)
    await tier.close(clock.monotonic() + 1)
    assert time.monotonic() - began < 60
