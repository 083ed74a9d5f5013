"""Plays histories: one seed after the other, and a failing one with ever fewer steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from kvtier.sim.engines import errors_told
from kvtier.sim.history import History
from kvtier.sim.kernel import Kernel, installed
from kvtier.sim.ledger import Wrong
from kvtier.sim.loop import Stuck, VirtualLoop
from kvtier.sim.world import World
from kvtier.testing.short_slices import slices_of


@dataclass(frozen=True)
class Played:
    """`failure`: in one line, "" if every promise held; `where`: the innermost lines that raised it. `digest` of all
    that happened; `lines`: what happened; `served` blocks; `virtual_s` and `cpu_s` of time."""

    history: History
    failure: str
    where: str
    digest: str
    lines: tuple[str, ...]
    served: int
    turns: int
    virtual_s: float
    cpu_s: float


def play(history: History) -> Played:
    """Play one history. The same history gives the same but for `cpu_s`. Not for use beside another event loop of
    this thread, nor by two threads at once."""
    began, failure, where = time.process_time(), "", ""
    with _alone(), slices_of(history.slices) if history.slices else contextlib.nullcontext(), _disks(history) as disks:
        loop, kernel, folder = disks
        world = World(history, loop, kernel, folder)
        try:
            asyncio.set_event_loop(loop)
            with errors_told(world.ledger):
                loop.run_until_complete(world.run())
        except (Wrong, Stuck) as error:
            failure = f"{type(error).__name__}: {error}"
            where = _where(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            where = _where(error)
        finally:
            for host in world.hosts:
                if host.process:
                    host.cut_off()
                    loop.kill(host.process)
                if host.cache is not None:
                    host.cache.manager.host.arena.close()
            asyncio.set_event_loop(None)
            loop.close()
    return Played(
        history, failure, where, world.digest, tuple(world.log), world.ledger.served, loop.turns, loop.time() - 1000.0,
        time.process_time() - began,
    )  # fmt: skip


@contextlib.contextmanager
def _disks(history: History) -> Iterator[tuple[VirtualLoop, Kernel | None, Path]]:
    """The loop, and what the machines' disks are made of, where G3 is the real one."""
    loop = VirtualLoop(history.seed)
    if history.disk == "model":
        yield loop, None, Path()
        return
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-sim-", dir=in_memory) as folder,
        installed(loop, history.seed) as kernel,
    ):
        for number in range(len(history.skews)):
            Path(folder, f"host{number}").mkdir()
        yield loop, kernel, Path(folder)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Nothing depends on the machine: no garbage is collected at its own time, and work is cut by how often it asks for
    its CPU time, or never, and not by what it took. Errors that are injected are not logged."""
    log = logging.getLogger("kvtier")
    level, collecting = log.level, gc.isenabled()
    gc.disable()
    log.setLevel(logging.CRITICAL + 1)
    try:
        with (
            mock.patch("time.thread_time_ns", partial(next, itertools.count(0, 1000))),
            mock.patch("kvtier.tiers.host.tier.SLICE_NS", 1 << 62),
            mock.patch("kvtier.manager.turns.TURN_NS", -1),
            mock.patch("kvtier.manager.hierarchy.TURN_NS", -1),
            mock.patch("kvtier.connectors.vllm.worker.fill_page_table", lambda arena: None),
        ):
            yield
    finally:
        log.setLevel(level)
        if collecting:
            gc.enable()


def _where(error: BaseException) -> str:
    lines = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{line.filename.rpartition('/')[2]}:{line.lineno} {line.name}" for line in reversed(lines))


def shrink(failed: Played, tried: Callable[[int], None] = lambda left: None) -> Played:
    """The same kind of failure with as few steps as leaving some out gives. `tried` hears how many are left."""
    best = failed
    size = max(1, len(best.history.steps) // 2)
    while True:
        start, smaller = 0, False
        while start < len(best.history.steps):
            kept = [*range(start), *range(start + size, len(best.history.steps))]
            played = play(best.history.only(kept))
            if _kind(played) == _kind(failed):
                best, smaller = played, True
            else:
                start += size
            tried(len(best.history.steps))
        if size == 1 and not smaller:
            return best
        size = max(1, size // 2)


def _kind(played: Played) -> str:
    """What failed, without its times and numbers."""
    return "".join(char for char in played.failure if not char.isdigit())[:40]
