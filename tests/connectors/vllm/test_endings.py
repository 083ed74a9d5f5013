"""Engines that end otherwise than in good order, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.support.prompts import prompt, tiers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

Start = Callable[..., Any]


def test_an_engine_that_is_killed_while_it_stores_leaves_right_bytes(start: Start, tmp_path: Path) -> None:
    """96 blocks go to disk at 32 a second; the kill comes after some of them."""
    prompts = [prompt(seed, 400) for seed in range(1, 9)]
    first = start(config=tiers(tmp_path, write_rate="2MiB/s"))
    cold = first.generate(prompts=prompts)
    deadline = time.monotonic() + 60
    while first.stats()["g3"]["blocks"] < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.kill()
    second = start(config=tiers(tmp_path))
    kept = second.stats()["g3"]["blocks"]
    assert 0 < kept < 96, "the control: in the midst of it"
    warm = second.generate(prompts=prompts)
    assert [out["tokens"] for out in warm] == [out["tokens"] for out in cold]
    assert 0 < sum(out["read"].get("g3", 0) for out in warm) <= 32 * kept
    assert second.stop() == 0


def test_a_stop_with_a_hanging_disk_ends_in_time(start: Start, tmp_path: Path) -> None:
    engine = start(config=tiers(tmp_path), arguments={"flush_timeout": "2s"})
    engine.sicken(tier="g3", how="hang")
    engine.generate(prompts=[prompt(1)], settle=False)
    began = time.monotonic()
    assert engine.stop(timeout=30) == 0
    assert time.monotonic() - began < 20


def test_an_idle_engine_sleeps_and_a_signal_ends_it(start: Start, tmp_path: Path) -> None:
    engine = start(config=tiers(tmp_path), processes="own")
    engine.generate(prompts=[prompt(1)])
    engine.sleep(seconds=5.0)
    before = cpu_seconds(engine.process.pid)
    engine.sleep(seconds=5.0)
    assert cpu_seconds(engine.process.pid) - before < 0.5, "an engine without work goes on stepping"
    for child in children(engine.process.pid):
        os.kill(child, signal.SIGTERM)
    time.sleep(8)
    engine.kill()
    second = start(config=tiers(tmp_path), processes="own")
    assert second.generate(prompts=[prompt(1)])[0]["read"] == {"g3": 288}
    assert second.stop() == 0


def test_a_signal_ends_an_engine_whose_disk_hangs(start: Start, tmp_path: Path) -> None:
    """A neighbour that froze while it held the index's write lock: nothing can be written, and nothing can be waited
    for."""
    engine = start(config=tiers(tmp_path), processes="own", arguments={"flush_timeout": "2s"})
    engine.generate(prompts=[prompt(1)])
    index = next((tmp_path / "g3").rglob("data.mdb")).parent
    freeze = (
        "import lmdb, os, signal, sys; env = lmdb.open(sys.argv[1], max_dbs=16, map_size=os.stat(sys.argv[1] + "
        "'/data.mdb').st_size); txn = env.begin(write=True); print('held', flush=True); "
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    frozen = subprocess.Popen([sys.executable, "-c", freeze, str(index)], stdout=subprocess.PIPE)
    try:
        assert frozen.stdout is not None and frozen.stdout.readline() == b"held\n"
        answered = engine.generate(prompts=[prompt(2), prompt(3)])
        assert all(len(out["tokens"]) == 24 for out in answered)
        own = engine_processes(engine.process.pid)
        assert own
        began = time.monotonic()
        for child in own:
            os.kill(child, signal.SIGTERM)
        while any(alive(child) for child in own) and time.monotonic() - began < 60:
            time.sleep(0.1)
        assert time.monotonic() - began < 20, [Path(f"/proc/{child}/comm").read_text() for child in own if alive(child)]
    finally:
        frozen.kill()
        frozen.wait()
        engine.kill()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def engine_processes(pid: int) -> list[int]:
    """Python's resource tracker ends with its parent, whatever signals it gets."""
    return [p for p in children(pid) if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def cpu_seconds(pid: int) -> float:
    ticks = 0
    for each in [pid, *children(pid)]:
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
