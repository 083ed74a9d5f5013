"""Threads of simulated processes, of which one runs at a time, in turns that the seed draws.

Each is a real thread that waits until the loop gives it its turn, and runs to its next wait: for a lock, a condition,
the end of another thread, a device, a time. At some locks, drawn from the seed, another one runs first. Event loops of
processes are no threads here: a callback runs to its end, but for the locks that it takes, where threads of its process
may run first as well.

    threads = Threads(loop, seed)
    threading = Primitives(threads)      # what modules find in place of `threading`
    threads.kill(process)                # each of its threads raises Killed where it waits
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvtier.sim.loop import VirtualLoop, process_now

SWITCH = 0.1
"""Share of locks at which another thread runs first."""


class Killed(BaseException):
    """The process of this line has ended."""


def _closed() -> threading.Lock:
    """A lock that one thread waits for and another one releases: half as dear as a semaphore."""
    (lock := threading.Lock()).acquire()
    return lock


class _Real(threading.Thread):
    """A thread that runs one `Thread` after another."""

    idle: list[_Real] = []  # shared by all simulations: to start one costs as much as several turns

    def __init__(self) -> None:
        super().__init__(name="kvtier-sim", daemon=True)
        self.turn = _closed()
        self.work: Callable[[], None] = lambda: None
        self.start()

    def run(self) -> None:
        while True:
            self.turn.acquire()
            self.work()


class Thread:
    """`threading.Thread` as the tiers use it."""

    def __init__(
        self, target: Callable[..., object], threads: Threads, name: str = "", args: Iterable[Any] = (),
        daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._work: Callable[[], object] = lambda: target(*args)
        self._threads = threads
        self._real: _Real | None = None
        self._due: Any = None  # the handle of its next turn
        self._joining: list[Thread] = []
        self.process = process_now()
        self.lane = 0
        self.ended = False

    def start(self) -> None:
        """It gets its first turn soon."""
        self._threads.alive()
        self.process = process_now()
        self.lane = self._threads.add(self)
        self._real = _Real.idle.pop() if _Real.idle else _Real()
        context = contextvars.copy_context()
        self._real.work = lambda: context.run(self._run)
        self.wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        here = self._threads.here()
        assert here is not None, "an event loop waits for a thread"
        if not self.ended:
            self._joining.append(here)
            here.wait(timeout)

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.lane != 0 and not self.ended

    # -- turns ------------------------------------------------------------------------------------------------------

    def wake(self, when: float | None = None) -> None:
        """Its next turn is soon, or at a time. Replaces an earlier call."""
        if self._due is not None:
            self._due.cancel()
        self._due = self._threads.loop.turn_of(self.lane, lambda: self._threads.give_turn(self), when)

    def wait(self, timeout_s: float | None = None) -> None:
        """On this thread: the turn ends, until `wake` or so much later."""
        if timeout_s is not None:
            self.wake(self._threads.loop.time() + max(0.0, timeout_s))
        self._pause()

    def yield_turn(self) -> None:
        """On this thread: others may run first."""
        self.wake()
        self._pause()

    def _pause(self) -> None:
        assert self._real is not None
        self._threads.back.release()
        self._real.turn.acquire()
        self._threads.alive()

    def take_turn(self) -> None:
        """On the loop's thread: run to the next wait."""
        assert self._real is not None
        self._due = None
        self._real.turn.release()
        self._threads.back.acquire()

    def _run(self) -> None:
        try:
            self._threads.alive()
            self._work()
        except Killed:
            pass
        except BaseException as error:
            self._threads.loop.errors.append(f"thread {self.name} ended: {type(error).__name__}: {error}")
        self.ended = True
        self._threads.remove(self)
        for one in self._joining:
            one.wake()
        if self._real is not None:
            _Real.idle.append(self._real)
        self._work = lambda: None
        self._threads.back.release()


class Threads:
    """Of all processes of one simulation. All verbs are the loop's thread's or that of the thread whose turn it is."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.back = _closed()
        self.dead: set[int] = set()
        self._rng = random.Random(seed)
        self._here: Thread | None = None
        self._of: dict[int, dict[int, Thread]] = {}
        self._started = 0
        loop.thread = self.run

    def run(self, work: Callable[[], None]) -> None:
        """Work of the present process, on a thread of its own."""
        if process_now() not in self.dead:
            Thread(work, self, "work").start()

    def here(self) -> Thread | None:
        """The thread of the running line; None on an event loop."""
        return self._here

    def alive(self) -> None:
        """Raises Killed where the process of the running line has ended."""
        if process_now() in self.dead:
            raise Killed

    def add(self, thread: Thread) -> int:
        """Returns its lane."""
        self._started += 1
        self._of.setdefault(thread.process, {})[-self._started] = thread
        return -self._started

    def remove(self, thread: Thread) -> None:
        """It has ended."""
        del self._of[thread.process][thread.lane]

    def give_turn(self, thread: Thread) -> None:
        """Run a thread to its next wait."""
        if not thread.ended:
            before, self._here = self._here, thread
            thread.take_turn()
            self._here = before

    def kill(self, process: int) -> None:
        """Each thread of the process raises Killed where it waits, and ends; so does every line of it from now on that
        takes a lock or comes to a device."""
        self.dead.add(process)
        while left := self._of.get(process):
            thread = next(iter(left.values()))
            if thread._due is not None:
                thread._due.cancel()
            self.give_turn(thread)

    def may_switch(self) -> None:
        """A place where another thread may run first."""
        self.alive()
        if self._rng.random() >= SWITCH:
            return
        if self._here is not None:
            self._here.yield_turn()
        else:
            self.run_another()

    def run_another(self) -> bool:
        """On an event loop: give a thread of its process a turn now. False where none is ready."""
        return self.loop.run_one(list(self._of.get(process_now(), ())))

    def sleep(self, seconds: float) -> None:
        """On a thread: wait so long."""
        self.alive()
        assert self._here is not None, "an event loop sleeps"
        self._here.wait(seconds)


class _Lock:
    """`threading.RLock`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._holder: object = None
        self._count = 0
        self._waiting: list[Thread] = []

    def _me(self) -> object:
        return self._threads.here() or ("loop", process_now())

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._holder == (me := self._me()):
            self._count += 1
            return True
        self._threads.may_switch()
        return self.take(me)

    def take(self, me: object) -> bool:
        """Without letting others run where it is free."""
        while self._count:
            if isinstance(me, Thread):
                self._waiting.append(me)
                me.wait()
            elif not self._threads.run_another():
                text = "an event loop waits for a lock whose holder waits for a device"
                self._threads.loop.errors.append(text)
                raise AssertionError(text)
        self._holder, self._count = me, 1
        return True

    def release(self) -> None:
        """By a process that has ended it does nothing: nobody is left to take it."""
        self._count -= 1
        if not self._count:
            self._holder = None
            waiting, self._waiting = self._waiting, []
            for thread in waiting:
                thread.wake()

    def give_up(self) -> int:
        """Release it entirely; returns how often it was taken."""
        count, self._count = self._count, 1
        self.release()
        return count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition(_Lock):
    """`threading.Condition`."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(threads)
        self._heard: deque[Thread] = deque()  # those that wait to be notified

    def wait(self, timeout: float | None = None) -> bool:
        me = self._threads.here()
        assert me is not None, "an event loop waits for a condition"
        count = self.give_up()
        self._heard.append(me)
        try:
            me.wait(timeout)
        finally:
            notified = me not in self._heard
            if not notified:
                self._heard.remove(me)
            with contextlib.suppress(Killed):
                self.take(me)
            self._holder, self._count = me, count
        return notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        ends = None if timeout is None else self._threads.loop.time() + timeout
        while not (result := predicate()):
            left_s = None if ends is None else ends - self._threads.loop.time()
            if left_s is not None and left_s <= 0.0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        while n > 0 and self._heard:
            self._heard.popleft().wake()
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._heard))


class PerProcess:
    """A condition of a module, of which each process has its own."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._of: dict[int, _Condition] = {}

    def __enter__(self) -> bool:
        return self._of.setdefault(process_now(), _Condition(self._threads)).acquire()

    def __exit__(self, *_: object) -> None:
        self._of[process_now()].release()

    def wait_for(self, predicate: Callable[[], bool]) -> bool:
        return self._of[process_now()].wait_for(predicate)

    def notify_all(self) -> None:
        self._of[process_now()].notify_all()


class Primitives:
    """What a module finds in place of `threading`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.local = threading.local

    def Lock(self) -> _Lock:
        return _Lock(self._threads)

    def RLock(self) -> _Lock:
        return _Lock(self._threads)

    def Condition(self) -> _Condition:
        return _Condition(self._threads)

    def Thread(self, target: Callable[..., object], name: str = "", daemon: bool | None = None, **more: Any) -> Thread:
        known: Mapping[str, Any] = more
        return Thread(target, self._threads, name, known.get("args", ()))
