"""Work of many tasks that are ready at once is done in many turns of the loop."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.manager import turns
from kvtier.manager.turns import Turns


class Rounds:
    """Counts the turns of the running loop, while it is entered."""

    def __init__(self) -> None:
        self.number = 0

    async def _count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)

    async def __aenter__(self) -> Rounds:
        self._task = asyncio.ensure_future(self._count())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


async def test_pieces_beyond_the_time_of_a_turn_have_one_each_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    shared, done = Turns(), list[tuple[int, int]]()

    async def work(number: int) -> None:
        for _ in range(3):
            await shared.next()
            done.append((rounds.number, number))

    async with Rounds() as rounds:
        await asyncio.gather(*map(work, range(20)))
    assert len({turn for turn, _ in done}) == 60, "two in one turn"
    assert [number for _, number in done] == [0, *range(20), *range(20), *range(1, 20)], "first come, first served"


async def test_brief_pieces_are_done_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 1 << 62)
    shared, done = Turns(), list[int]()

    async def work() -> None:
        for _ in range(3):
            await shared.next()
            done.append(rounds.number)

    async with Rounds() as rounds:
        await asyncio.gather(*(work() for _ in range(20)))
    assert len(done) == 60 and max(done) - min(done) <= 1


async def test_who_is_cancelled_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_NS", 0)
    shared, done = Turns(), list[int]()

    async def work(number: int) -> None:
        await shared.next()
        done.append(number)

    tasks = [asyncio.ensure_future(work(number)) for number in range(9)]
    await asyncio.sleep(0)
    for task in tasks[1:8:2]:
        task.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert done == [0, 2, 4, 6, 8] and sum(isinstance(end, asyncio.CancelledError) for end in ended) == 4
    await asyncio.sleep(0.01)
    await asyncio.wait_for(shared.next(), 5)  # nobody has the turn
    assert not shared._waiting


async def test_brief_pieces_share_a_turn_beside_others_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a turn of its own, in which the engine's callbacks took most of the time: 64 tasks took a second."""
    clock = [0]
    monkeypatch.setattr(turns.time, "thread_time_ns", lambda: clock[0])
    shared, done = Turns(), list[int]()

    async def engine() -> None:
        while True:
            clock[0] += 2 * turns.TURN_NS
            await asyncio.sleep(0)

    async def work(number: int) -> None:
        for _ in range(4):
            await shared.next()
            clock[0] += turns.TURN_NS // 20
            done.append(rounds.number)

    busy = asyncio.ensure_future(engine())
    async with Rounds() as rounds:
        await asyncio.gather(*map(work, range(20)))
    busy.cancel()
    assert len(done) == 80 and max(done) - min(done) < 20
    assert max(done.count(turn) for turn in done) <= 20, "no more than fit"
