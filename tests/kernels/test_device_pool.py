"""DevicePool under several streams, over a simulated device that runs what is ready in any order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import pytest
from simulated_driver import COMPUTE, SimulatedDriver, _Operation

from kvtier.kernels.engine import open_pool_engine
from kvtier.kernels.method import Table
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.device.stream_order import HostOrder, StreamOrder
from kvtier.tiers.device.torch_pool import DevicePool
from kvtier.tiers.host.arena import Arena
from kvtier.times import Wall

BLOCK, BLOCKS, STREAMS = 4096, 4, 3


class Device(SimulatedDriver):
    """Also torch.cuda, as far as the order of slots needs it: any of several streams may be the current one."""

    def __init__(self, kernels: ctypes.CDLL, random: Random) -> None:
        super().__init__(kernels, random, steps_per_query=1)
        self.random = random
        self.handles = [COMPUTE, *(self.stream(0) for _ in range(STREAMS - 1))]
        self.handle = COMPUTE
        self.waits = 0

    def current_stream(self) -> int:
        return self.handle

    @contextmanager
    def on(self, handle: int) -> Iterator[None]:
        before, self.handle = self.handle, handle
        yield
        self.handle = before

    def enqueue(self, work: object) -> None:
        self._streams[self.handle].append(_Operation(work))  # type: ignore[arg-type]


POOLS = "cuda:1"
"""The pool's device. The caller's current one is another."""


class TorchCuda:
    """`torch.cuda` over a Device. Without a name it means the caller's current device, whose streams order nothing
    here."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def current_stream(self, of: object = None) -> SimpleNamespace:
        if of != POOLS:
            return SimpleNamespace(cuda_stream=0, wait_event=lambda event: None)
        device, handle = self._device, self._device.handle

        def wait_event(event: TorchEvent) -> None:
            device.waits += 1
            device.wait(handle, event.handle)

        return SimpleNamespace(cuda_stream=handle, wait_event=wait_event)

    def Event(self) -> TorchEvent:
        return TorchEvent(self._device)


class TorchEvent:
    def __init__(self, device: Device) -> None:
        self._device, self.handle = device, device.event()

    def record(self, stream: SimpleNamespace) -> None:
        self._device.record(self.handle, stream.cuda_stream)

    def query(self) -> bool:
        return self._device.reached(self.handle)


@pytest.fixture
def arena() -> Iterator[Arena]:
    memory = Arena(BLOCK, 1, 8 * BLOCK)
    memory.open()
    yield memory
    memory.close()


class Users:
    """Requests on several streams over one pool of few slots. Block b of the chain holds b + 1 in every byte."""

    def __init__(self, kernels: ctypes.CDLL, seed: int, arena: Arena, ordered: bool) -> None:
        self.random = Random(seed)
        self.device = Device(kernels, self.random)
        self.arena = arena
        self.pool = DevicePool(BLOCKS, BLOCK)
        self.pool._order = StreamOrder(TorchCuda(self.device), POOLS) if ordered else HostOrder()
        self.pool._engine = open_pool_engine(
            self.pool.rows, arena.views(), arena.slot_bytes, driver=self.device, table=Table("", {})
        )
        self.chains = [[key] for key in chain_of(sample_namespace(BLOCK), 8)]
        self.life = Lifetime.of(BUILTIN["24h"], Wall(0.0))
        self.generation = 0
        self.wrong: list[str] = []

    def request(self) -> None:
        """One block found or computed, read by the request, and freed, while all of its work is only enqueued."""
        block = self.random.randrange(len(self.chains))
        chain, value = self.chains[block], block + 1
        with self.device.on(self.random.choice(self.device.handles)):
            slots = self.pool.pin(chain, Wall(1.0))
            if not slots:
                slots = self.pool.allocate(1)
                if self.random.random() < 0.3 and self.generation:
                    self._load(slots[0], value)
                else:
                    self.device.enqueue(lambda: self.pool.rows[slots[0]].fill_(value))
                self.pool.confirm(slots, chain, self.life)
            self.device.enqueue(lambda: self._expect(slots[0], value, "read"))
            if self.random.random() < 0.3:
                with self.device.on(self.random.choice(self.device.handles)):
                    self._store(slots[0], value)
            self.pool.free(slots)

    def _expect(self, slot: int, value: int, where: str) -> None:
        if not bool((self.pool.rows[slot] == value).all()):
            self.wrong.append(where)

    def _store(self, slot: int, value: int) -> None:
        self.generation += 1
        assert self.pool.copy_out([slot], [(value - 1, self.generation)], lambda *_: None) == [True]
        if bytes(self.arena.pieces(value - 1)[0]) != bytes([value]) * BLOCK:
            self.wrong.append("stored")

    def _load(self, slot: int, value: int) -> None:
        self.arena.pieces(value - 1)[0][:] = bytes([value]) * BLOCK
        assert self.pool.copy_in([(value - 1, self.generation)], [slot], lambda *_: None) == [True]

    def close(self) -> None:
        self.device.drain()
        self.pool.check()
        self.pool.detach()


def test_slots_change_streams_without_a_wrong_byte(kernel_library: ctypes.CDLL, arena: Arena) -> None:
    for seed in range(15):
        users = Users(kernel_library, seed, arena, ordered=True)
        for _ in range(60):
            users.request()
        users.close()
        assert users.wrong == []
        assert users.device.waits > 5
        assert sum(map(len, users.pool._order._uses.values())) <= BLOCKS * STREAMS  # type: ignore[attr-defined]


def test_without_the_order_they_meet(kernel_library: ctypes.CDLL, arena: Arena) -> None:
    """The control: what was not waited for is seen, in reads and in stores."""
    seen: set[str] = set()
    for seed in range(15):
        users = Users(kernel_library, seed, arena, ordered=False)
        for _ in range(60):
            users.request()
        users.close()
        seen.update(users.wrong)
    assert seen == {"read", "stored"}


def test_work_on_several_slots_is_waited_for_once(kernel_library: ctypes.CDLL) -> None:
    device = Device(kernel_library, Random(0))
    order = StreamOrder(TorchCuda(device), POOLS)
    device.enqueue(lambda: None)
    order.used([0, 1, 2])
    with device.on(device.handles[1]):
        order.follow([0, 1, 2, 3])
        assert device.waits == 1
        device.drain()
        order.follow([0, 1, 2])
        assert device.waits == 1 and order._uses == {}


def test_one_stream_waits_for_nothing(kernel_library: ctypes.CDLL, arena: Arena) -> None:
    users = Users(kernel_library, 0, arena, ordered=True)
    users.device.handles = [COMPUTE]
    for _ in range(60):
        users.request()
    users.close()
    assert users.wrong == [] and users.device.waits == 0
