"""`kvtier bench index --scale` has a figure for every verb, and the lock is given back where it has to be."""

from __future__ import annotations

import asyncio
import gc
import threading

from kvtier.bench.tiers.scale import Collector, TimedLock, _Subject, chain_of, scope_of_chain


def test_every_verb_has_a_figure() -> None:
    entry = asyncio.run(_Subject(2000).measure())
    assert entry["blocks"] == 2000 and isinstance(entry["bytes_per_block"], int)
    assert isinstance(entry["bytes_per_block_with_evicted"], int)
    median, longest = entry["same_work_ms"]
    assert 0 < median <= longest and entry["bare_us_per_block"] > 0
    alone = {"fill", "put", "get", "match", "train", "stats", "space", "purge", "evict"}
    assert set(entry["verbs"]) == alone | {"pin by name", "list of pins", "end of pins"}
    below = asyncio.run(_Subject(2000).measure_below())
    assert set(below) == {"get from below", "guaranteed put", "flush, taken over below"}
    for figure in [*entry["verbs"].values(), *below.values()]:
        assert figure["us_per_block"] > 0 and figure["lock_ms"] > 0
    assert below["get from below"]["loop_ms"] > 0


def test_a_lock_measures_the_longest_hold_and_still_excludes() -> None:
    lock, inside = TimedLock(), []

    def count() -> None:
        for _ in range(200):
            with lock:
                inside.append(len(inside))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == list(range(800)) and lock.longest_ns > 0


def test_the_time_of_the_garbage_collector_is_told_apart() -> None:
    collector = Collector()
    try:
        cycles = [[] for _ in range(200_000)]
        for cycle in cycles:
            cycle.append(cycle)
        with (lock := TimedLock(collector.thread_time_ns)):
            gc.collect()
        assert 0 < lock.longest_ns < collector.longest_ns / 2
    finally:
        collector.close()


def test_chains_share_nothing_but_scopes() -> None:
    chains = [chain_of(number, 5, scopes=2) for number in range(4)]
    assert len({key for chain in chains for key in chain}) == 20
    assert {key[:16] for key in chains[0]} == {scope_of_chain(0, 2)} == {key[:16] for key in chains[2]}


def test_what_is_collected_on_another_thread_is_not_this_threads_time() -> None:
    collector = Collector()
    try:
        began = collector.thread_time_ns()
        other = threading.Thread(target=lambda: [gc.collect() for _ in range(5)])
        other.start()
        other.join()
        assert collector.longest_ns > 0 and collector.thread_time_ns() >= began
    finally:
        collector.close()
