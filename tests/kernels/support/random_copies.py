"""A random engine over a copy engine: it computes into blocks, stores, loads, cancels, and reads behind fences.

It trusts acknowledgements and fences alone, and checks every byte that they make it trust. What computing is, and
where its memory lies, is the subclass's: a simulated device, or a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random

from kvtier.kernels.copy import CopyEngine, Lane, Moves, Outcome


class Walk(ABC):
    """Every block and slot holds one value in all its bytes (or is in flight, and then nobody knows)."""

    BLOCKS, SLOTS, SLOT_BYTES = 12, 9, 64

    def __init__(self, random: Random, engine: CopyEngine) -> None:
        self.random, self.engine = random, engine
        self.generation = [0] * self.SLOTS
        self.ready: dict[int, int] = {}  # slot → value
        self.filling: dict[int, int] = {}  # slot → the value it will have
        self.value = dict.fromkeys(range(self.BLOCKS), 0)  # block → value, once the compute stream has caught up
        self.loading: dict[int, int] = {}  # block → the value it will have
        self.reading = [0] * self.SLOTS
        self.storing = [0] * self.BLOCKS
        self.tickets: list[int] = []  # those that are not over
        self.cancelled: set[int] = set()
        self.loads: dict[int, list[int]] = {}  # tickets of which nothing is acknowledged → their blocks
        self.mismatches: list[str] = []
        self.checked = 0

    # The subclass's: the first two on the compute stream, the third now, the last lets time pass

    @abstractmethod
    def fill(self, block: int, value: int) -> None: ...

    @abstractmethod
    def expect_block(self, block: int, value: int, where: str) -> None: ...

    @abstractmethod
    def expect_slot(self, slot: int, value: int) -> None: ...

    @abstractmethod
    def breathe(self) -> None: ...

    # The walk

    def note(self, right: bool, where: str) -> None:
        self.checked += 1
        if not right:
            self.mismatches.append(where)

    def act(self) -> None:
        action = self.random.random()
        if action < 0.25:
            self.store()
        elif action < 0.5 and self.ready:
            self.load()
        elif action < 0.55 and self.tickets:
            ticket = self.random.choice(self.tickets[-3:])
            self.cancelled.add(ticket)
            self.engine.cancel(ticket)
        elif action < 0.75:
            self.compute()
        elif action < 0.9 and self.loads:
            self.fence_and_read()
        self.settle()

    def settle(self) -> None:
        for ack in self.engine.poll():
            self.loads.pop(ack.ticket, None)
            if ack.last:
                self.tickets.remove(ack.ticket)
            for block, slot, generation in ack.moves.triples():
                assert generation == self.generation[slot] and ack.outcome in (Outcome.DONE, Outcome.ABORTED)
                if ack.lane is Lane.STORE:
                    self.storing[block] -= 1
                    value = self.filling.pop(slot)
                    if ack.outcome is Outcome.DONE:
                        self.ready[slot] = value
                        self.expect_slot(slot, value)
                else:
                    self.reading[slot] -= 1
                    value = self.loading.pop(block)
                    if ack.outcome is Outcome.DONE:
                        self.value[block] = value
                        self.expect_block(block, value, "block")
        self.engine.check()
        self.breathe()

    def store(self) -> None:
        free = [slot for slot in range(self.SLOTS) if slot not in self.filling and not self.reading[slot]]
        blocks = self.random.sample(sorted(self.value), min(3, len(self.value)))
        triples = []
        for block, slot in zip(blocks, self.random.sample(free, min(3, len(free))), strict=False):
            self.generation[slot] += 1
            self.ready.pop(slot, None)
            self.filling[slot] = self.value[block]
            self.storing[block] += 1
            triples.append((block, slot, self.generation[slot]))
        if triples:
            self.tickets.append(self.engine.store(Moves.of(triples)))

    def load(self) -> None:
        blocks = [block for block in range(self.BLOCKS) if block not in self.loading]
        triples = []
        for block in self.random.sample(blocks, min(3, len(blocks))):
            slot = self.random.choice(sorted(self.ready))
            self.reading[slot] += 1
            self.loading[block] = self.ready[slot]
            self.value.pop(block, None)
            triples.append((block, slot, self.generation[slot]))
        if triples:
            ticket = self.engine.load(Moves.of(triples), expedited=self.random.random() < 0.3)
            self.tickets.append(ticket)
            self.loads[ticket] = [block for block, _, _ in triples]

    def compute(self) -> None:
        """A kernel of the model writes a block; the host waits for nothing. Stores that still read the block are
        fenced first."""
        if not self.value:
            return
        block, value = self.random.choice(sorted(self.value)), self.random.randrange(1, 256)
        if self.storing[block]:
            for ticket in self.tickets:
                self.engine.fence(ticket)
        self.fill(block, value)
        self.value[block] = value

    def fence_and_read(self) -> None:
        """Attention reads loaded blocks on the compute stream, behind a fence, before any acknowledgement."""
        ticket = self.random.choice(sorted(self.loads))
        blocks = self.loads.pop(ticket)
        if ticket in self.cancelled:
            return
        self.engine.fence(ticket)
        for block in blocks:
            self.expect_block(block, self.loading[block], "fenced block")
