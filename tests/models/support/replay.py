"""Takes the steps of a simulated run of `g3_write.pml` with a real index, and compares what comes out.

Each process of the model is an owner of its own here. The model evicts any leaf, the index the coldest: the others are
used before. The bytes of the slots are the model's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.identity.keys import SCOPE_BYTES
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.marks import mark_below
from kvtier.retention.terms import BUILTIN, PRIORITY
from kvtier.tiers.disk.expired import remove_expired
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index, map_bytes_for
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.read import miss_of
from kvtier.tiers.disk.records import RESERVED, SCOPED_BYTES, SLOT_ALIGN, Entry, NewBlock, SlotReservation, rank_of
from kvtier.tiers.disk.touches import Touches
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall

NOW = Wall(1_700_000_000.0)
SLOTS, LANES, NONE = 2, 3, 15
PARENT, CHILD, OTHER = range(3)
PIDS = (1001, 1002)
HERE = Owner.current()


def histories(path: Path) -> dict[int, list[list[str]]]:
    """Seed → the steps of its run, as words."""
    found: dict[int, list[list[str]]] = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if words[0] == "#":
            found[int(words[1])] = steps = []
        else:
            steps.append(words)
    return found


class Liveness:
    """Stands for /proc: which of the model's processes can still write."""

    def __init__(self) -> None:
        self.killed, self.writing = set[int](), set[int]()

    def started(self, pid: int) -> int | None:
        """As `kvtier.tiers.disk.owner._started`."""
        process = PIDS.index(pid)
        inside = any(lane // 2 == process for lane in self.writing)
        return 1 if process not in self.killed or inside else None


@dataclass
class Lane:
    """A block on its way."""

    name: int = 0
    mark: int = 0
    slot: SlotReservation | None = None


def make_index(folder: Path) -> Index:
    """An empty index with room for SLOTS blocks."""
    size = SLOTS * SLOT_ALIGN
    return Index.create(folder / "index", bytes(16), Geometry(size, size, 1), map_bytes_for(size), HERE)


class Replay:
    """One history. `tenant`: of its own, since purges stay."""

    def __init__(self, index: Index, tenant: int, liveness: Liveness) -> None:
        self._index, self._liveness = index, liveness
        scope = tenant.to_bytes(4, "big").ljust(SCOPE_BYTES, b"\1")
        self._scoped = bytes(SCOPED_BYTES - SCOPE_BYTES) + scope
        self._names = [self._scoped + bytes([name]) * 32 for name in range(3)]
        self._owners = [replace(HERE, pid=pid, started=1, epoch=0) for pid in PIDS]
        self._lanes = [Lane() for _ in range(LANES)]
        self._kept: list[SlotReservation | None] = [None, None]
        self._purges = 0
        self._raw: dict[int, list[bytes]] = {}  # name → what its looks found, the last first
        self.taken = 0

    def run(self, steps: list[list[str]]) -> None:
        """Take the steps; AssertionError where the index does otherwise."""
        lines = iter(steps)
        for words in lines:
            verb, numbers = words[0], [int(word) for word in words[1:] if word.isdigit()]
            getattr(self, f"_{verb}")(*numbers, *words[1 + len(numbers) :], *self._more(verb, words, lines))
            self.taken += 1
        self._index.transact(lambda txn: txn.drop_all(self._names))

    @staticmethod
    def _more(verb: str, words: list[str], lines: Iterator[list[str]]) -> Iterator[list[list[str]]]:
        """For a transaction, the lines up to the state that it leaves."""
        if verb in ("reserve", "publish", "reclaim", "free", "remove"):
            found = [next(lines)]
            while found[-1][0] != "=":
                found.append(next(lines))
            yield found

    # -- steps --------------------------------------------------------------------------------------------------------

    def _reserve(self, lane: int, name: int, mark: int, *rest: object) -> None:
        outcome, lines = (rest[0] if len(rest) == 2 else ""), rest[-1]
        assert isinstance(lines, list)
        self._warm_all_but(lines)
        block = self._block(name, mark)
        got = self._transact(lane // 2, lambda txn: txn.reserve(block, NOW))
        if outcome:
            assert got is Stored[str(outcome).upper()]
        elif (slot := _value(lines, "slot")) == NONE:
            assert got is Stored.FULL
        else:
            assert isinstance(got, SlotReservation) and got.slot == slot
            self._lanes[lane] = Lane(name, mark, got)
        self._compare(lines)

    def _adopt(self, lane: int, name: int, slot: int) -> None:
        kept = self._kept[lane // 2]
        assert kept is not None and kept.slot == slot
        self._lanes[lane] = Lane(name, self._purges, kept)
        self._kept[lane // 2] = None

    def _publish(self, lane: int, name: int, mark: int, outcome: str, lines: list[list[str]]) -> None:
        self._warm_all_but(lines)
        slot, keep = self._lanes[lane].slot, _value(lines, "keep")
        assert slot is not None

        def work(txn: WriteTxn) -> tuple[Stored, list[SlotReservation]]:
            result = txn.publish(slot, self._block(name, mark), NOW)
            return result, txn.reserve_slots(1, 1) if keep is not None else []

        result, ahead = self._transact(lane // 2, work)
        assert result is Stored[outcome.upper()]
        assert [one.slot for one in ahead] == ([] if keep in (None, NONE) else [keep])
        self._kept[lane // 2] = ahead[0] if ahead else self._kept[lane // 2]
        self._compare(lines)

    def _write(self, lane: int, begins: int) -> None:
        (self._liveness.writing.add if begins else self._liveness.writing.discard)(lane)

    def _fault(self, lane: int) -> None:
        """The process gives the store up; `reopen` follows."""

    def _reopen(self, process: int) -> None:
        self._owners[process] = replace(self._owners[process], epoch=self._owners[process].epoch + 1)
        self._kept[process] = None

    def _kill(self, process: int) -> None:
        self._liveness.killed.add(process)

    def _reclaim(self, process: int, lines: list[list[str]]) -> None:
        self._transact(process, WriteTxn.reclaim)
        self._compare(lines)

    def _free(self, process: int, slot: int, lines: list[list[str]]) -> None:
        kept, self._kept[process] = self._kept[process], None
        assert kept is not None and kept.slot == slot
        self._transact(process, lambda txn: txn.release(kept, refund=True))
        self._compare(lines)

    def _purge(self) -> None:
        self._purges += 1
        self._transact(0, lambda txn: txn.purged.apply(self._scoped, mark_below(self._purges + 1)))

    def _remove(self, name: int, lines: list[list[str]]) -> None:
        assert self._transact(0, lambda txn: remove_expired(txn, [self._names[name]], NOW)) == 1
        self._compare(lines)

    def _look(self, name: int, served: int) -> None:
        ((raw, until),) = self._index.find([self._names[name]])
        assert raw is not None
        assert miss_of(self._names[name], raw, until, Touches(), NOW) is (None if served else Miss.PURGED)
        self._raw.setdefault(name, []).insert(0, raw)

    def _overtaken(self, name: int) -> None:
        """A read that found other bytes: of no look is the entry still that write's whose slot has them."""
        here = self._entry(name)
        for raw in self._raw[name]:
            serial = Entry.decode(self._names[name], raw).serial
            same = self._transact(0, lambda txn, raw=raw: txn.is_same(self._names[name], raw))
            assert same == (here is not None and here.serial == serial)

    # -- state --------------------------------------------------------------------------------------------------------

    def _block(self, name: int, mark: int) -> NewBlock:
        parent = self._names[PARENT] if name == CHILD else None
        life = Lifetime.of(BUILTIN["24h"], NOW)
        depth = int(name == CHILD)
        return NewBlock(self._names[name], SLOT_ALIGN, life, depth, digest=bytes(16), parent=parent, position=mark + 1)

    def _entry(self, name: int) -> Entry | None:
        ((raw, _),) = self._index.find([self._names[name]])
        return None if raw is None else Entry.decode(self._names[name], raw)

    def _transact(self, process: int, work):  # type: ignore[no-untyped-def]
        self._index.owner = self._owners[process]
        return self._index.transact(work)

    def _warm_all_but(self, lines: list[list[str]]) -> None:
        """The block that leaves in these lines is the coldest."""
        victim = _value(lines, "evict")
        if victim is None:
            return

        def work(txn: WriteTxn) -> None:
            for name, full in enumerate(self._names):
                entry = txn.find(full)
                if entry is not None and name != victim:
                    txn._entries.update(
                        full, entry, entry.life, rank_of(PRIORITY, txn.tick)
                    )  # `renew` passes dead ones by

        self._index.transact(work)

    def _compare(self, lines: list[list[str]]) -> None:
        """The model's state after a step: where each block is, and the state of each slot."""
        expected = lines[-1][1:]
        found = [self._entry(name) for name in range(3)]
        states = ["FREE"] * SLOTS
        for key, raw in self._index.rows(RESERVED):
            states[SlotReservation.decode(key, raw).slot] = "RESERVED"
        for entry in found:
            if entry is not None:
                assert states[entry.slot] == "FREE"
                states[entry.slot] = "HELD"
        assert [*(str(NONE if one is None else one.slot) for one in found), *states] == expected
        self._index.check()


def _value(lines: list[list[str]], verb: str) -> int | None:
    """The number that a line of these says, if there is one."""
    return next((int(words[1]) for words in lines if words[0] == verb), None)
